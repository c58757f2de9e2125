"""C++ form of routing: one pass over the logits, and one for their gradients.

Everything is in fp32. The choices are those of the specification. The sums over tokens are added in
an order that does not depend on the number of threads, so runs repeat exactly.
"""

# T tokens, E experts, K top-k, M model dim

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.context import without_autocast
from moe_core.ops.backend import KERNEL_LOSSES
from moe_core.ops.buffers import empty
from moe_core.ops.native.library import call


def product(tokens: Tensor, weight: Tensor) -> Tensor:
    """The logits [T, E] of tokens [T, M] and a weight [E, M] in fp32."""
    with without_autocast(tokens):
        return F.linear(tokens.float(), weight)


def product_backward(
    grad: Tensor, tokens: Tensor, weight: Tensor, grad_inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of tokens and weight from that of the logits [T, E].

    Args:
        grad_inputs: the gradient of the cast tokens, which is added to that of the tokens.
    """
    with without_autocast(tokens):
        if grad_inputs is None:
            of_tokens = grad @ weight
        else:
            of_tokens = torch.addmm(grad_inputs.float(), grad, weight)
        return of_tokens.to(tokens.dtype), grad.t() @ tokens.float()


def forward(
    logits: Tensor,
    noise: Tensor | None,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    loss_noise_std: float,
    activation: str,
    kernels: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gates [T, K], ids [T, K], probs [T, E], the sums of the loss [2, E] and the scores.

    The scores [T, K] are the sigmoids of the chosen logits, if the gate values are these divided
    by their sum; otherwise they are empty.

    Args:
        logits, noise: [T, E]; experts are chosen by `logits + noise_std * noise`.
        loss: one of KERNEL_LOSSES.
    """
    num_tokens, num_experts = logits.shape
    # otherwise C++ would read past the end of a tensor
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be from 1 to the {num_experts} experts")
    if noise is not None and noise.shape != logits.shape:
        raise ValueError(f"noise is {list(noise.shape)}, the logits {list(logits.shape)}")
    gates = logits.new_empty(num_tokens, top_k)
    ids = torch.empty_like(gates, dtype=torch.int64)
    probs = empty(logits.shape, logits.dtype, logits.device)
    sums = logits.new_empty(2, num_experts)
    scores = None
    if activation == "sigmoid" and normalize:
        scores = torch.empty_like(gates)
    tensors = (_ready(logits), _ready(noise), ids, gates, scores, probs, sums)
    sizes = (num_tokens, num_experts, top_k)
    settings = _settings(normalize, activation, loss, noise_std, loss_noise_std)
    call("route_forward", tensors, (*sizes, *settings), kernels)
    if scores is None:
        scores = logits.new_empty(0)
    return gates, ids, probs, sums, scores


def backward(
    logits: Tensor,
    noise: Tensor | None,
    ids: Tensor,
    gates: Tensor,
    probs: Tensor,
    scores: Tensor,
    grads: tuple[Tensor | None, ...],
    normalize: bool,
    loss: str,
    noise_std: float,
    loss_noise_std: float,
    activation: str,
    kernels: str,
) -> Tensor:
    """The gradient of the logits [T, E].

    Args:
        grads: the gradients of gates, probs and sums; None means zeros.
    """
    grad = empty(probs.shape, probs.dtype, probs.device)
    kept = None
    if scores.numel():
        kept = scores
    inputs = (_ready(logits), _ready(noise), *map(_ready, grads))
    sizes = (*probs.shape, ids.shape[1])
    settings = _settings(normalize, activation, loss, noise_std, loss_noise_std)
    tensors = (ids, gates, kept, probs, *inputs, grad)
    call("route_backward", tensors, (*sizes, *settings), kernels)
    return grad


def _settings(
    normalize: bool, activation: str, loss: str, noise_std: float, loss_noise_std: float
) -> tuple[int | float, ...]:
    numbers = (int(normalize), int(activation == "sigmoid"), torch.get_num_threads())
    return (*numbers, KERNEL_LOSSES.index(loss), float(noise_std), float(loss_noise_std))


def _ready(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return x.float().contiguous()
