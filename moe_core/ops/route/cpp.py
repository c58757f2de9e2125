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
from moe_core.ops.native.library import call, in_fp32
from moe_core.ops.route.inputs import RouteGradients, RouteSettings, SavedRoute


def forward(
    x: Tensor,
    weight: Tensor | None,
    noise: Tensor | None,
    cast_to: torch.dtype | None,
    settings: RouteSettings,
) -> tuple[Tensor, ...]:
    """As the op `moe_core::route`."""
    logits = x
    if weight is not None:
        with without_autocast(x):
            logits = F.linear(x.float(), weight)
    num_tokens, num_experts = logits.shape
    top_k = settings.top_k
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
    if settings.activation == "sigmoid" and settings.normalize:
        scores = torch.empty_like(gates)
    tensors = (in_fp32(logits), in_fp32(noise), ids, gates, scores, probs, sums)
    sizes = (num_tokens, num_experts, top_k)
    call("route_forward", tensors, (*sizes, *_numbers(settings)), settings.kernels)
    inputs = x.new_empty(0) if cast_to is None else x.to(cast_to)
    if scores is None:
        scores = logits.new_empty(0)
    if weight is None or not settings.loss.startswith("load_importance"):
        logits = x.new_empty(0)
    return gates, ids, probs, sums, inputs, scores, logits


def backward(
    saved: SavedRoute, grads: RouteGradients, settings: RouteSettings
) -> tuple[Tensor, Tensor]:
    """As the op `moe_core::route_backward`."""
    x, weight, noise, ids, gates, probs, scores, logits = saved
    if weight is None:
        logits = x
    grad_sums = grads.sums
    if grad_sums is None:
        settings = settings._replace(loss="none")
    elif settings.loss == "none":
        grad_sums = None
    grad = empty(probs.shape, probs.dtype, probs.device)
    kept = scores if scores.numel() else None
    inputs = map(in_fp32, (logits, noise, grads.gates, grads.probs, grad_sums))
    tensors = (ids, gates, kept, probs, *inputs, grad)
    sizes = (*probs.shape, ids.shape[1])
    call("route_backward", tensors, (*sizes, *_numbers(settings)), settings.kernels)
    if weight is None:
        return grad, x.new_empty(0)
    with without_autocast(x):
        if grads.inputs is None:
            of_tokens = grad @ weight
        else:
            of_tokens = torch.addmm(grads.inputs.float(), grad, weight)
        return of_tokens.to(x.dtype), grad.t() @ x.float()


def _numbers(settings: RouteSettings) -> tuple[int | float, ...]:
    is_sigmoid, loss = settings.activation == "sigmoid", KERNEL_LOSSES.index(settings.loss)
    return (
        int(settings.normalize),
        int(is_sigmoid),
        torch.get_num_threads(),
        loss,
        float(settings.noise_std),
        float(settings.loss_noise_std),
    )
