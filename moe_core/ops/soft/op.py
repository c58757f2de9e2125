"""Soft dispatch and soft combine. Soft MoE uses them instead of a dispatch plan.

Both are torch.library ops. For the backward pass they keep their inputs and one number per slot or
token, the logarithm of the softmax's denominator. Both ops keep the same logits tensor. Autograd
would instead keep the weights of both softmaxes, each in two dtypes.

Source: Soft MoE, arXiv 2308.00951, section 2.1.
"""

# B images, N tokens of an image, S slots of an image, M model dim

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform
from moe_core.ops.autograd import register_gradient
from moe_core.ops.soft import reference


def soft_dispatch(tokens: Tensor, logits: Tensor) -> Tensor:
    """Slots: weighted means of an image's tokens. The weights are a softmax over the tokens.

    Args:
        tokens: [B, N, M]. The products are computed in their dtype.
        logits: [B, N, S].

    Returns:
        [B, S, M], differentiable in both arguments.
    """
    if in_transform(tokens):
        return reference.soft_dispatch(tokens, logits)
    return torch.ops.moe_core.soft_dispatch(tokens, logits)[0]


def soft_combine(rows: Tensor, logits: Tensor) -> Tensor:
    """Tokens: weighted means of an image's rows. The weights are a softmax over the slots.

    Args:
        rows: [B, S, M], the experts' results for the slots. The products are computed in their
            dtype.
        logits: [B, N, S], the logits of the dispatch.

    Returns:
        [B, N, M], differentiable in both arguments.
    """
    if in_transform(rows):
        return reference.soft_combine(rows, logits)
    return torch.ops.moe_core.soft_combine(rows, logits)[0]


# 1. Ops. Each also returns the logsumexp of the logits, for its backward op.


@torch.library.custom_op("moe_core::soft_dispatch", mutates_args=())
def _soft_dispatch(tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, M] and [B, 1, S]."""
    total = logits.logsumexp(1, keepdim=True)
    weights = _weights(logits, total).to(tokens.dtype)
    return weights.transpose(1, 2) @ tokens, total


@torch.library.custom_op("moe_core::soft_combine", mutates_args=())
def _soft_combine(rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N, M] and [B, N, 1]."""
    total = logits.logsumexp(2, keepdim=True)
    weights = _weights(logits, total).to(rows.dtype)
    return weights @ rows, total


@torch.library.custom_op("moe_core::soft_dispatch_backward", mutates_args=())
def _soft_dispatch_backward(
    grad: Tensor, needs: list[bool], tokens: Tensor, logits: Tensor, slots: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of tokens and logits."""
    weights = _weights(logits, total)
    grad_tokens = weights.to(grad.dtype) @ grad
    grad_weights = (tokens @ grad.transpose(1, 2)).to(logits.dtype)
    # sum_n weights * grad_weights, from tensors that are smaller
    mean = _row_products(grad, slots, logits.dtype).unsqueeze(1)  # [B, 1, S]
    return grad_tokens, weights.mul_(grad_weights.sub_(mean))


@torch.library.custom_op("moe_core::soft_combine_backward", mutates_args=())
def _soft_combine_backward(
    grad: Tensor, needs: list[bool], rows: Tensor, logits: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and logits."""
    weights = _weights(logits, total)
    grad_rows = weights.to(grad.dtype).transpose(1, 2) @ grad
    grad_weights = (grad @ rows.transpose(1, 2)).to(logits.dtype)
    mean = _row_products(grad, out, logits.dtype).unsqueeze(2)  # [B, N, 1]
    return grad_rows, weights.mul_(grad_weights.sub_(mean))


def _weights(logits: Tensor, total: Tensor) -> Tensor:
    return (logits - total).exp_()


def _row_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The inner products of the rows of a and b [..., M], summed in `dtype`: [...]."""
    return torch.linalg.vecdot(a.to(dtype), b.to(dtype))


# 2. Fake kernels and autograd


@_soft_dispatch.register_fake
def _(tokens, logits):
    num_images, _, num_slots = logits.shape
    slots = tokens.new_empty(num_images, num_slots, tokens.shape[2])
    return slots, logits.new_empty(num_images, 1, num_slots)


@_soft_combine.register_fake
def _(rows, logits):
    num_images, num_tokens, _ = logits.shape
    out = rows.new_empty(num_images, num_tokens, rows.shape[2])
    return out, logits.new_empty(num_images, num_tokens, 1)


@_soft_dispatch_backward.register_fake
@_soft_combine_backward.register_fake
def _(grad, needs, values, logits, out, total):
    return values.new_empty(values.shape), logits.new_empty(logits.shape)


_BACKWARDS = {
    "soft_dispatch": torch.ops.moe_core.soft_dispatch_backward,
    "soft_combine": torch.ops.moe_core.soft_combine_backward,
}
for _name, _op in _BACKWARDS.items():
    register_gradient(_name, 2, _op, getattr(reference, _name), saved_outputs=(0, 1))


@register_flop_formula([torch.ops.moe_core.soft_dispatch, torch.ops.moe_core.soft_combine])
def _flops(values_shape, logits_shape, *args, out_shape=None, **kwargs) -> int:
    num_images, num_tokens, num_slots = logits_shape
    return 2 * num_images * num_tokens * num_slots * values_shape[2]


@register_flop_formula(list(_BACKWARDS.values()))
def _backward_flops(
    grad_shape, needs, values_shape, logits_shape, *args, out_shape=None, **kwargs
) -> int:
    return 2 * _flops(values_shape, logits_shape)
