"""Dispatch gathers tokens into rows; combine sums rows into tokens. Both are torch.library ops.

The backward pass of each is also a gather, where autograd would scatter. A gather is deterministic
and needs no atomic operations on a GPU. All forms give the same values up to rounding: Triton and
C++ sum a token's rows in fp32 and round once.
"""

# T tokens, K top-k, N rows, M model dim

import torch
from torch import Tensor

from moe_core.context import in_transform
from moe_core.ops.autograd import is_differentiated_again, plain_gradients
from moe_core.ops.backend import Request, load, select
from moe_core.ops.combine.reference import dispatch_rows, plain_sum_rows
from moe_core.ops.plan.op import DispatchPlan


def dispatch(tokens: Tensor, plan: DispatchPlan, kernels: str = "auto") -> Tensor:
    """tokens [T, M] -> rows [N, M]: row n is the token of choice `plan.choices[n]`."""
    if in_transform(tokens):
        return dispatch_rows(tokens, plan.choices, plan.slots.shape[1])
    return torch.ops.moe_core.dispatch_rows(tokens, plan.choices, plan.slots, plan.kept, kernels)


def combine(rows: Tensor, gates: Tensor, plan: DispatchPlan, kernels: str = "auto") -> Tensor:
    """Sum each token's rows, weighted by its gate values; dropped choices add 0.

    Args:
        rows: [N, M]. Rows without a choice at the end may be missing, because an exchange between
            ranks does not return them.
        gates: [T, K].
        plan: the row of each choice.
        kernels: see `backend.select`.

    Returns:
        [T, M] in the wider dtype of rows and gates.
    """
    if in_transform(rows):
        return plain_sum_rows(rows, plan.slots, plan.kept, gates)
    return torch.ops.moe_core.combine_rows(
        rows, gates, plan.choices, plan.slots, plan.kept, kernels
    )


# 1. Ops


@torch.library.custom_op("moe_core::dispatch_rows", mutates_args=())
def _dispatch_rows(
    tokens: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None, kernels: str
) -> Tensor:
    form = select("combine", Request(kernels, tokens.device.type, tokens.dtype))
    return load(form).dispatch_rows(tokens, choices, slots.shape[1])


@torch.library.custom_op("moe_core::sum_rows", mutates_args=())
def _sum_rows(
    rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None, kernels: str
) -> Tensor:
    return _sum(rows, slots, kept, gates, kernels)


@torch.library.custom_op("moe_core::combine_rows", mutates_args=())
def _combine_rows(
    rows: Tensor, gates: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None, kernels: str
) -> Tensor:
    return _sum(rows, slots, kept, gates, kernels)


@torch.library.custom_op("moe_core::combine_rows_backward", mutates_args=())
def _combine_rows_backward(
    grad: Tensor,
    rows: Tensor,
    gates: Tensor,
    choices: Tensor,
    slots: Tensor,
    kept: Tensor | None,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, M], 0 for rows without a choice, and of gates [T, K]."""
    choices = choices[: rows.shape[0]]
    request = Request(
        kernels,
        rows.device.type,
        rows.dtype,
        gate_dtype=gates.dtype,
        grad_dtype=grad.dtype,
    )
    form = select("combine", request)
    return load(form).combine_rows_backward(grad, rows, gates, choices, slots, kept)


def _sum(
    rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None, kernels: str
) -> Tensor:
    gate_dtype = None
    if gates is not None:
        gate_dtype = gates.dtype
    request = Request(kernels, rows.device.type, rows.dtype, gate_dtype=gate_dtype)
    return load(select("combine", request)).sum_rows(rows, slots, kept, gates)


# 2. Fake kernels and autograd


@_dispatch_rows.register_fake
def _(tokens, choices, slots, kept, kernels):
    return tokens.new_empty(choices.shape[0], tokens.shape[1])


@_sum_rows.register_fake
def _(rows, slots, kept, gates, kernels):
    dtype = rows.dtype
    if gates is not None:
        dtype = torch.promote_types(dtype, gates.dtype)
    return rows.new_empty(slots.shape[0], rows.shape[1], dtype=dtype)


@_combine_rows.register_fake
def _(rows, gates, choices, slots, kept, kernels):
    dtype = torch.promote_types(rows.dtype, gates.dtype)
    return rows.new_empty(slots.shape[0], rows.shape[1], dtype=dtype)


@_combine_rows_backward.register_fake
def _(grad, rows, gates, choices, slots, kept, kernels):
    # The gradients are contiguous, whatever the strides of rows and gates.
    return rows.new_empty(rows.shape), gates.new_empty(gates.shape)


def _save_dispatch(ctx, inputs, output) -> None:
    _, _, slots, kept, ctx.kernels = inputs
    ctx.save_for_backward(slots, kept)


def _differentiate_dispatch(ctx, grad):
    slots, kept = ctx.saved_tensors
    if is_differentiated_again(grad):
        return plain_sum_rows(grad, slots, kept, None), None, None, None, None
    grad_tokens = torch.ops.moe_core.sum_rows(grad, slots, kept, None, ctx.kernels)
    return grad_tokens, None, None, None, None


def _save_combine(ctx, inputs, output) -> None:
    rows, gates, choices, slots, kept, ctx.kernels = inputs
    ctx.save_for_backward(rows, gates, choices, slots, kept)


def _differentiate_combine(ctx, grad):
    rows, gates, choices, slots, kept = ctx.saved_tensors
    if is_differentiated_again(grad):

        def function(rows, gates):
            return (plain_sum_rows(rows, slots, kept, gates),)

        needs = ctx.needs_input_grad[:2]
        return (*plain_gradients(function, (rows, gates), needs, [grad]), None, None, None, None)
    grad_rows, grad_gates = torch.ops.moe_core.combine_rows_backward(
        grad, rows, gates, choices, slots, kept, ctx.kernels
    )
    return grad_rows, grad_gates, None, None, None, None


torch.library.register_autograd(
    "moe_core::dispatch_rows", _differentiate_dispatch, setup_context=_save_dispatch
)
torch.library.register_autograd(
    "moe_core::combine_rows", _differentiate_combine, setup_context=_save_combine
)
