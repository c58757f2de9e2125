"""Soft dispatch and soft combine. Soft MoE uses them instead of a dispatch plan.

Dispatch is combine with the transposed logits. So both are one torch.library op. For the backward
pass it keeps its inputs, its output and one number per slot or token, the logarithm of the
softmax's denominator. Both calls keep the same logits tensor. Autograd would instead keep the
weights of both softmaxes, each in two dtypes.

Source: Soft MoE, arXiv 2308.00951, section 2.1.
"""

# B images, N tokens of an image, S slots of an image, M model dim

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform
from moe_core.ops.autograd import op, register_gradient
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
    return _soft_combine(tokens, logits.transpose(1, 2))[0]


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
    return _soft_combine(rows, logits)[0]


@op("moe_core::soft_combine")
def _soft_combine(rows: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N, M] and, for the backward pass, the logsumexp of the logits [B, N, 1]."""
    total = logits.logsumexp(2, keepdim=True)
    weights = _weights(logits, total).to(rows.dtype)
    return weights @ rows, total


@op("moe_core::soft_combine_backward")
def _soft_combine_backward(
    grad: Tensor, needs: list[bool], rows: Tensor, logits: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and logits."""
    weights = _weights(logits, total)
    grad_rows = weights.to(grad.dtype).transpose(1, 2) @ grad
    grad_weights = (grad @ rows.transpose(1, 2)).to(logits.dtype)
    # sum_s weights * grad_weights, from tensors that are smaller
    mean = torch.linalg.vecdot(grad.to(logits.dtype), out.to(logits.dtype)).unsqueeze(2)
    return grad_rows, weights.mul_(grad_weights.sub_(mean))


def _weights(logits: Tensor, total: Tensor) -> Tensor:
    return (logits - total).exp_()


@_soft_combine.register_fake
def _(rows, logits):
    num_images, num_tokens, _ = logits.shape
    out = rows.new_empty(num_images, num_tokens, rows.shape[2])
    return out, logits.new_empty(num_images, num_tokens, 1)


@_soft_combine_backward.register_fake
def _(grad, needs, rows, logits, out, total):
    return rows.new_empty(rows.shape), torch.empty_like(logits)


register_gradient(
    _soft_combine,
    2,
    _soft_combine_backward,
    reference.soft_combine,
    saved_outputs=(0, 1),
)


@register_flop_formula(torch.ops.moe_core.soft_combine)
def _flops(rows_shape, logits_shape, *args, out_shape=None, **kwargs) -> int:
    num_images, num_tokens, num_slots = logits_shape
    return 2 * num_images * num_tokens * num_slots * rows_shape[2]


@register_flop_formula(torch.ops.moe_core.soft_combine_backward)
def _backward_flops(
    grad_shape, needs, rows_shape, logits_shape, *args, out_shape=None, **kwargs
) -> int:
    return 2 * _flops(rows_shape, logits_shape)
