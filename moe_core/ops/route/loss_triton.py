"""Triton form of the auxiliary losses, from their sums per expert. It is one program."""

# E experts

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import KERNEL_LOSSES, on_its_device
from moe_core.ops.blocks import next_power_of_2
from moe_core.ops.launch import recordable

_GSHARD: tl.constexpr = tl.constexpr(KERNEL_LOSSES.index("gshard"))


@triton.jit
def _tokens(total, num_tokens, sums):
    """The number of tokens, at least 1, in the dtype of the sums."""
    count = num_tokens.to(sums.dtype)
    if total is not None:
        count = tl.load(total).to(sums.dtype)
    return tl.maximum(count, 1.0)


@triton.jit
def _variation(values, mask, NUM_EXPERTS: tl.constexpr):
    """The mean, the unbiased variance, and the denominator of the squared variation."""
    mean = tl.sum(values, axis=0) / NUM_EXPERTS
    deviation = tl.where(mask, values - mean, 0.0)
    variance = tl.sum(deviation * deviation, axis=0) / (NUM_EXPERTS - 1)
    return mean, variance, mean * mean + 1e-10


@triton.jit
def _variation_grad(values, mask, NUM_EXPERTS: tl.constexpr):
    """The gradient of the squared variation with respect to each value."""
    mean, variance, denominator = _variation(values, mask, NUM_EXPERTS)
    by_variance = 2 * (values - mean) / (NUM_EXPERTS - 1) / denominator
    by_mean = 2 * mean * variance / (denominator * denominator) / NUM_EXPERTS
    return by_variance - by_mean


@recordable
@triton.jit(do_not_specialize=["num_tokens"])
def _loss_kernel(
    sums, total, num_tokens, value, LOSS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    mask = e < NUM_EXPERTS
    first = tl.load(sums + e, mask=mask, other=0.0)
    second = tl.load(sums + NUM_EXPERTS + e, mask=mask, other=0.0)
    if LOSS == _GSHARD:
        tokens = _tokens(total, num_tokens, first)
        loss = NUM_EXPERTS * tl.sum(first * second, axis=0) / tokens / tokens
    elif NUM_EXPERTS == 1:
        loss = tl.sum(first, axis=0) * 0
    else:
        _, importance, importance_scale = _variation(first, mask, NUM_EXPERTS)
        _, load, load_scale = _variation(second, mask, NUM_EXPERTS)
        loss = (importance / importance_scale + load / load_scale) / 2
    tl.store(value, loss)


@recordable
@triton.jit(do_not_specialize=["num_tokens"])
def _loss_backward_kernel(
    grad, sums, total, num_tokens, grad_sums, LOSS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    mask = e < NUM_EXPERTS
    first = tl.load(sums + e, mask=mask, other=0.0)
    second = tl.load(sums + NUM_EXPERTS + e, mask=mask, other=0.0)
    scale = tl.load(grad)
    if LOSS == _GSHARD:
        tokens = _tokens(total, num_tokens, first)
        scale = scale * NUM_EXPERTS / tokens / tokens
        grad_first = scale * second
        grad_second = scale * first
    elif NUM_EXPERTS == 1:
        grad_first = first * 0
        grad_second = first * 0
    else:
        grad_first = scale / 2 * _variation_grad(first, mask, NUM_EXPERTS)
        grad_second = scale / 2 * _variation_grad(second, mask, NUM_EXPERTS)
    tl.store(grad_sums + e, grad_first, mask=mask)
    tl.store(grad_sums + NUM_EXPERTS + e, grad_second, mask=mask)


@on_its_device
def loss_of_sums(sums: Tensor, total: Tensor | None, num_tokens: int, loss: str) -> Tensor:
    """The loss from sums [2, E]. `total` is a scalar tensor that replaces `num_tokens`, or None."""
    if loss == "none":
        return sums.new_zeros(())
    num_experts = sums.shape[1]
    value = sums.new_empty(())
    _loss_kernel[(1,)](
        sums.contiguous(), total, num_tokens, value, KERNEL_LOSSES.index(loss), num_experts,
        next_power_of_2(num_experts), num_warps=1,
    )  # fmt: skip
    return value


@on_its_device
def loss_of_sums_backward(
    grad: Tensor, sums: Tensor, total: Tensor | None, num_tokens: int, loss: str
) -> Tensor:
    """The gradient of the sums [2, E] from `grad`, the gradient of the loss (a scalar)."""
    if loss == "none":
        return torch.zeros_like(sums)
    num_experts = sums.shape[1]
    grad_sums = torch.empty_like(sums, memory_format=torch.contiguous_format)
    _loss_backward_kernel[(1,)](
        grad, sums.contiguous(), total, num_tokens, grad_sums, KERNEL_LOSSES.index(loss),
        num_experts, next_power_of_2(num_experts), num_warps=1,
    )  # fmt: skip
    return grad_sums
