"""Grouped matrix products as torch.library ops, so that torch.compile, torch.export and FLOP counting see them whole.

Three layers: the kernels per device, the ops with their fake kernels, and the autograd formulas.

`torch.nn.functional.grouped_mm` does the work on a GPU in bf16. Everywhere else it is a loop over the experts' matrix
products (torch 2.11); the loop here is the same one with the bias in the product (a bias added afterwards costs a third
more on two cores) and takes every dtype and layout. Its own fake kernel knows bf16 alone, hence the ops.
"""

# E experts, N rows, I input features, O output features

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_ALIGNMENT = 16  # bytes: F.grouped_mm takes no row stride that is not a multiple of it


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """`rows_e @ weight[e]^T + bias[e]` for every expert's rows; differentiable in rows, weight and bias.

    Args:
        rows: [N, I], expert 0's rows first.
        weight: [E, O, I], of any dense layout; its gradient comes in the same layout.
        bias: [E, O] or None.
        offsets: [E] int32, where each expert's rows end.

    Returns:
        [N, O]; rows past offsets[-1] hold nothing meaningful.
    """
    return torch.ops.moe_core.grouped_linear(rows, weight, bias, offsets)


# 1. Kernels


def _groups(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends], ends, strict=False))


def grouped_linear_by_loop(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    groups = _groups(offsets)
    for e, (start, end) in enumerate(groups):
        if end > start and bias is not None:
            torch.addmm(bias[e], rows[start:end], weight[e].t(), out=out[start:end])
        elif end > start:
            torch.mm(rows[start:end], weight[e].t(), out=out[start:end])
    out[groups[-1][1] :] = 0
    return out


def grouped_weight_grad_by_loop(grad: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`grad_e^T @ rows_e` for every expert, in the layout of `weight` [E, O, I]."""
    out = torch.empty_like(weight)
    for e, (start, end) in enumerate(_groups(offsets)):
        torch.mm(grad[start:end].t(), rows[start:end], out=out[e])
    return out


def group_sum_by_loop(rows: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, O] -> [E, O]: the sum over every expert's rows."""
    return torch.stack([rows[start:end].sum(0) for start, end in _groups(offsets)])


def grouped_linear_by_grouped_mm(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """The same by F.grouped_mm; runs wherever that does."""
    num_rows, out_features = len(rows), weight.shape[1]
    out = F.grouped_mm(_aligned(rows), _aligned(weight, pad_rows=True).transpose(1, 2), offs=offsets)[:, :out_features]
    if bias is None:
        return out.contiguous()
    expert = torch.searchsorted(offsets, torch.arange(num_rows, device=rows.device, dtype=offsets.dtype), right=True)
    return out + bias.index_select(0, expert.clamp_(max=len(bias) - 1))


def grouped_weight_grad_by_grouped_mm(grad: Tensor, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The same by F.grouped_mm."""
    if weight.stride(-1) != 1:  # a transposed view: write the gradient in the layout underneath it
        return grouped_weight_grad_by_grouped_mm(rows, grad, weight.transpose(1, 2), offsets).transpose(1, 2)
    out = F.grouped_mm(_aligned(grad).t(), _aligned(rows), offs=offsets)
    return out[:, : grad.shape[1], : rows.shape[1]].contiguous()


def group_sum_by_grouped_mm(rows: Tensor, offsets: Tensor) -> Tensor:
    """The same by F.grouped_mm: a product with ones, which sums in fp32 and in a fixed order."""
    ones = rows.new_ones(len(rows), _ALIGNMENT // rows.element_size())
    return F.grouped_mm(_aligned(rows).t(), ones, offs=offsets)[:, : rows.shape[1], 0].contiguous()


def _aligned(x: Tensor, pad_rows: bool = False) -> Tensor:
    """x as F.grouped_mm wants it: one dense dimension, its start and all other strides on multiples of 16 bytes."""
    unit = _ALIGNMENT // x.element_size()
    columns, rows = -x.shape[-1] % unit, -x.shape[-2] % unit if pad_rows else 0
    if columns or rows:
        return F.pad(x, (0, columns, 0, rows))
    on_unit = x.data_ptr() % _ALIGNMENT == 0 and all(s % unit == 0 for s in x.stride() if s != 1)
    plain = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]  # an expanded gradient is neither of the two
    transposed = x.stride(-2) == 1 and x.stride(-1) >= x.shape[-2]
    return x if on_unit and (plain or transposed) else x.clone(memory_format=torch.contiguous_format)


# 2. Ops, fake kernels and FLOP formulas


def _make_op(name: str, by_loop: Callable, by_grouped_mm: Callable):
    """On a GPU F.grouped_mm in bf16, which reads nothing back; for other dtypes it is a loop as well (torch 2.11)."""

    def on_gpu(rows: Tensor, *others):
        return (by_grouped_mm if rows.dtype == torch.bfloat16 and len(rows) else by_loop)(rows, *others)

    op = torch.library.custom_op(f"moe_core::{name}", by_loop, mutates_args=(), device_types="cpu")
    op.register_kernel("cuda")(on_gpu)
    return op


_grouped_linear = _make_op("grouped_linear", grouped_linear_by_loop, grouped_linear_by_grouped_mm)
_grouped_weight_grad = _make_op("grouped_weight_grad", grouped_weight_grad_by_loop, grouped_weight_grad_by_grouped_mm)
_group_sum = _make_op("group_sum", group_sum_by_loop, group_sum_by_grouped_mm)


@_grouped_linear.register_fake
def _(rows, weight, bias, offsets):
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_grouped_weight_grad.register_fake
def _(grad, rows, weight, offsets):
    return torch.empty_like(weight)


@_group_sum.register_fake
def _(rows, offsets):
    return rows.new_empty(offsets.shape[0], rows.shape[1])


@register_flop_formula(torch.ops.moe_core.grouped_linear)
def _linear_flops(rows_shape, weight_shape, bias_shape, offsets_shape, *, out_shape=None, **kwargs) -> int:
    return 2 * rows_shape[0] * weight_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.moe_core.grouped_weight_grad)
def _weight_grad_flops(grad_shape, rows_shape, weight_shape, offsets_shape, *, out_shape=None, **kwargs) -> int:
    return 2 * rows_shape[0] * weight_shape[1] * weight_shape[2]


# 3. Autograd


def _save(ctx, inputs, output) -> None:
    rows, weight, bias, offsets = inputs
    ctx.save_for_backward(rows, weight, offsets)
    ctx.has_bias = bias is not None


def _backward(ctx, grad):
    rows, weight, offsets = ctx.saved_tensors
    needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
    grad_rows = grouped_linear(grad, weight.transpose(1, 2), None, offsets) if needs_rows else None
    grad_weight = torch.ops.moe_core.grouped_weight_grad(grad, rows, weight, offsets) if needs_weight else None
    grad_bias = torch.ops.moe_core.group_sum(grad, offsets) if ctx.has_bias and needs_bias else None
    return grad_rows, grad_weight, grad_bias, None


torch.library.register_autograd("moe_core::grouped_linear", _backward, setup_context=_save)
