"""Triton form of a linear router with the choice of experts.

A program of the forward kernel reads its tokens once. It casts them, multiplies them by the
router's weight and chooses experts from the logits, which stay in registers. A program of the
backward kernel computes the gradients of the logits and of the tokens in one pass.

Products are in fp32, not TF32, so that the choices are the same as in fp32. With at most 64 experts
the products take less time than reading the tokens from memory.
"""

# T tokens, E experts, K top-k, M model dim
# A program handles BLOCK_T tokens and all E experts, padded to BLOCK_E, BLOCK_M channels at a time.

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import KERNEL_LOSSES, on_its_device
from moe_core.ops.route.triton import choose, grad_of_choice

_BLOCK_T = 32
_BLOCK_M = 64
_LEAST_EXPERTS = 16  # the smallest dim of a tile in a matrix product


@triton.jit(do_not_specialize=["num_tokens"])
def route_tokens_kernel(
    x, weight, noise, inputs, noisy, clean, ids, gates, probs, block_sums, num_tokens,
    M: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    LOSS: tl.constexpr, NOISE_STD: tl.constexpr, LOSS_NOISE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    logits = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        channels = t[:, None] * M + m[None, :]
        inside = (t < num_tokens)[:, None] & (m < M)[None, :]
        tokens = tl.load(x + channels, mask=inside, other=0.0)
        if inputs is not None:
            tl.store(inputs + channels, tokens.to(inputs.dtype.element_ty), mask=inside)
        weight_mask = (m < M)[:, None] & (e < NUM_EXPERTS)[None, :]
        columns = tl.load(weight + e[None, :] * M + m[:, None], mask=weight_mask, other=0.0)
        logits = tl.dot(tokens.to(tl.float32), columns, logits, input_precision="ieee")

    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    mask = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    noisy_logits = logits
    if noise is not None:
        noisy_logits += NOISE_STD * tl.load(noise + cells, mask=mask, other=0.0)
    if noisy is not None:
        tl.store(noisy + cells, noisy_logits, mask=mask)
    if clean is not None:
        tl.store(clean + cells, logits, mask=mask)
    choose(
        noisy_logits, logits, t, block, ids, gates, probs, block_sums, num_tokens, NUM_EXPERTS,
        TOP_K, NORMALIZE, LOSS, LOSS_NOISE, clean is not None, BLOCK_T, BLOCK_E, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def route_tokens_backward_kernel(
    weight, noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, grad_inputs, grad_logits,
    grad_x, num_tokens, M: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr, LOSS: tl.constexpr, LOSS_NOISE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    of_noisy, of_clean = grad_of_choice(
        t, noisy, clean, ids, probs, grad_gates, grad_probs, grad_sums, num_tokens, NUM_EXPERTS,
        TOP_K, NORMALIZE, LOSS, LOSS_NOISE, BLOCK_T, BLOCK_E,
    )  # fmt: skip
    is_expert = (e < NUM_EXPERTS)[None, :]
    gradient = tl.where(is_expert, of_noisy + of_clean, 0.0)
    cells = t[:, None] * NUM_EXPERTS + e[None, :]
    tl.store(grad_logits + cells, gradient, mask=(t < num_tokens)[:, None] & is_expert)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        channels = t[:, None] * M + m[None, :]
        inside = (t < num_tokens)[:, None] & (m < M)[None, :]
        weight_mask = (e < NUM_EXPERTS)[:, None] & (m < M)[None, :]
        rows = tl.load(weight + e[:, None] * M + m[None, :], mask=weight_mask, other=0.0)
        of_tokens = tl.dot(gradient, rows, input_precision="ieee")
        if grad_inputs is not None:
            of_tokens += tl.load(grad_inputs + channels, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + channels, of_tokens.to(grad_x.dtype.element_ty), mask=inside)


@on_its_device
def forward(
    x: Tensor,
    weight: Tensor,
    noise: Tensor | None,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    loss_noise_std: float,
    cast_to: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the op `moe_core::route_tokens`."""
    x, weight = x.contiguous(), weight.contiguous()
    num_tokens, model_dim = x.shape
    num_experts = weight.shape[0]
    num_blocks = triton.cdiv(num_tokens, _BLOCK_T)
    gates = weight.new_empty(num_tokens, top_k)
    ids = weight.new_empty(num_tokens, top_k, dtype=torch.int64)
    probs = weight.new_empty(num_tokens, num_experts)
    inputs, noisy, clean = None, None, None
    if cast_to is not None:
        inputs = torch.empty_like(x, dtype=cast_to)
    if loss.startswith("load_importance"):
        noisy = torch.empty_like(probs)
        if noise is not None:
            clean = torch.empty_like(probs)
    num_block_sums = num_blocks
    if loss == "none":
        num_block_sums = 0
    block_sums = weight.new_empty(num_block_sums, 2, num_experts)
    if num_blocks:
        route_tokens_kernel[(num_blocks,)](
            x, weight, noise, inputs, noisy, clean, ids, gates, probs, block_sums, num_tokens,
            model_dim, num_experts, top_k, normalize, KERNEL_LOSSES.index(loss), noise_std,
            loss_noise_std, _BLOCK_T, _block_of_experts(num_experts),
            triton.next_power_of_2(top_k), _BLOCK_M, num_warps=4,
        )  # fmt: skip
    empty = weight.new_empty(0)
    return (
        gates,
        ids,
        probs,
        block_sums.sum(0),
        x.new_empty(0) if inputs is None else inputs,
        empty if noisy is None else noisy,
        weight.new_empty(0) if clean is None else clean,
    )


@on_its_device
def backward(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    probs: Tensor,
    noisy: Tensor,
    clean: Tensor,
    grads: tuple[Tensor | None, ...],
    normalize: bool,
    loss: str,
    loss_noise_std: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight.

    Args:
        noisy, clean: logits [T, E]; empty if the loss does not read them, or if they are equal.
        grads: the gradients of gates, probs, sums and the cast tokens; None means zeros.
    """
    x, weight = x.contiguous(), weight.contiguous()
    grad_gates, grad_probs, grad_sums, grad_inputs = (
        grad if grad is None else grad.contiguous() for grad in grads
    )
    num_tokens, model_dim = x.shape
    num_experts = weight.shape[0]
    grad_logits = torch.empty_like(probs)
    grad_x = torch.empty_like(x)
    if num_tokens:
        route_tokens_backward_kernel[(triton.cdiv(num_tokens, _BLOCK_T),)](
            weight, _filled(noisy), _filled(clean), ids, probs, grad_gates, grad_probs, grad_sums,
            grad_inputs, grad_logits, grad_x, num_tokens, model_dim, num_experts, ids.shape[1],
            normalize, KERNEL_LOSSES.index(loss), loss_noise_std, _BLOCK_T,
            _block_of_experts(num_experts), _BLOCK_M, num_warps=4,
        )  # fmt: skip
    return grad_x, grad_logits.t() @ x.float()


def _filled(logits: Tensor) -> Tensor | None:
    """The logits, or None if they were not kept (empty)."""
    if logits.dim() == 1:
        return None
    return logits


def _block_of_experts(num_experts: int) -> int:
    return max(triton.next_power_of_2(num_experts), _LEAST_EXPERTS)
