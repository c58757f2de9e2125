"""The linear layers of all experts in torch, as one torch.library op.

It is an op because it reads the offsets: a compiled program does not look inside it, and on the
meta device it has shapes alone.
"""

# E experts, N rows, I input features, O output features

from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_core.context import in_transform
from moe_core.ops.autograd import empty_gradients, op, register_gradient
from moe_core.ops.ffn import grouped, reference, split


def expert_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Apply the linear layer of each expert to its rows, in the dtype of the rows.

    Args:
        rows: [N, I], the rows of expert 0 first.
        weight: [E, O, I].
        bias: [E, O] or None.
        offsets: [E], the end of each expert's rows.

    Returns:
        [N, O], differentiable in rows, weight and bias. Rows past offsets[-1] are undefined.
    """
    if in_transform(rows):
        return reference.plain_linear(rows, weight, bias, offsets)
    weight = weight.to(rows.dtype)
    if bias is not None:
        bias = bias.to(rows.dtype)
    return _expert_linear(rows, weight, bias, offsets)


def _form(rows: Tensor) -> ModuleType:
    """The module that computes `linear` and its gradients."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped
    return split


@op("moe_core::expert_linear")
def _expert_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    return _form(rows).linear(rows, weight, bias, offsets)


@op("moe_core::expert_linear_backward")
def _expert_linear_backward(
    grad: Tensor,
    needs: list[bool],
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, weight and bias; empty where `needs` is False."""
    form = _form(rows)
    grad_rows, grad_weight, grad_bias = [grad.new_empty(0) for _ in range(3)]
    if needs[0]:
        grad_rows = form.linear(grad, weight.transpose(1, 2), None, offsets)
    if needs[1]:
        grad_weight = form.weight_grad(grad, rows, offsets)
    if needs[2]:
        grad_bias = form.bias_grad(grad, offsets)
    return grad_rows, grad_weight, grad_bias


@_expert_linear.register_fake
def _(rows, weight, bias, offsets):
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_expert_linear_backward.register_fake
def _(grad, needs, rows, weight, bias, offsets):
    return tuple(empty_gradients(grad, (rows, weight, bias), needs))


register_gradient(_expert_linear, 3, _expert_linear_backward, reference.plain_linear)


@register_flop_formula(torch.ops.moe_core.expert_linear)
def _flops(rows_shape, weight_shape, *others, out_shape=None, **kwargs) -> int:
    return 2 * rows_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.moe_core.expert_linear_backward)
def _backward_flops(grad_shape, needs, rows_shape, weight_shape, *others, out_shape=None, **kwargs):
    return (needs[0] + needs[1]) * _flops(rows_shape, weight_shape)
