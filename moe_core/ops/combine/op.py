"""Dispatch gathers tokens into rows; combine sums rows into tokens. Both are torch.library ops.

The backward pass of each is also a gather, where autograd would scatter. A gather is deterministic
and needs no atomic operations on a GPU. Autograd differentiates the combine's torch form, in which
a used row has one choice. All forms give the same values up to rounding: Triton and C++ sum a
token's rows in fp32 and round once.
"""

# T tokens, K top-k, N rows, M model dim

import torch
from torch import Tensor

from moe_core.context import in_transform
from moe_core.ops.autograd import (
    is_differentiated_again,
    op,
    register_gradient,
)
from moe_core.ops.backend import Kernels, chosen, load
from moe_core.ops.combine import reference
from moe_core.ops.plan.op import DispatchPlan


def dispatch(tokens: Tensor, plan: DispatchPlan, kernels: str | Kernels = "auto") -> Tensor:
    """tokens [T, M] -> rows [N, M]: row n is the token of choice `plan.choices[n]`."""
    if in_transform(tokens):
        return reference.dispatch_rows(tokens, plan.choices, plan.slots.shape[1])
    language = _language(chosen(kernels, tokens), tokens)
    return _dispatch_rows(tokens, plan.choices, plan.slots, plan.kept, language)


def combine(
    rows: Tensor, gates: Tensor, plan: DispatchPlan, kernels: str | Kernels = "auto"
) -> Tensor:
    """Sum each token's rows, weighted by its gate values; dropped choices add 0.

    Args:
        rows: [N, M]. Rows without a choice at the end may be missing, because an exchange between
            ranks does not return them.
        gates: [T, K].
        plan: the row of each choice.
        kernels: see `backend.chosen`.

    Returns:
        [T, M] in the wider dtype of rows and gates.
    """
    language = _language(chosen(kernels, rows), rows, gates)
    if language == "torch":
        return reference.sum_rows(rows, plan.slots, plan.kept, gates)
    return _combine_rows(rows, gates, plan.choices, plan.slots, plan.kept, language)


def _language(kernels: Kernels, rows: Tensor, gates: Tensor | None = None) -> str:
    """The language of the form for these rows: C++ has fp32 and bf16, and gates in fp32."""
    is_known = rows.dtype in (torch.float32, torch.bfloat16)
    if gates is not None:
        is_known = is_known and gates.dtype == torch.float32
    if kernels.language == "cpp" and not is_known:
        return "torch"
    return kernels.language


# 1. Ops. `language` is that of the form that computes them.


@op("moe_core::dispatch_rows")
def _dispatch_rows(
    tokens: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None, language: str
) -> Tensor:
    return load("combine", language).dispatch_rows(tokens, choices, slots.shape[1])


@op("moe_core::sum_rows")
def _sum_rows(rows: Tensor, slots: Tensor, kept: Tensor | None, language: str) -> Tensor:
    return load("combine", language).sum_rows(rows, slots, kept, None)


@op("moe_core::combine_rows")
def _combine_rows(
    rows: Tensor, gates: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None, language: str
) -> Tensor:
    return load("combine", language).sum_rows(rows, slots, kept, gates)


@op("moe_core::combine_rows_backward")
def _combine_rows_backward(
    grad: Tensor,
    needs: list[bool],
    rows: Tensor,
    gates: Tensor,
    choices: Tensor,
    slots: Tensor,
    kept: Tensor | None,
    language: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, M], 0 for rows without a choice, and of gates [T, K]."""
    choices = choices[: rows.shape[0]]
    return load("combine", language).combine_rows_backward(grad, rows, gates, choices, slots, kept)


# 2. Fake kernels and autograd


@_dispatch_rows.register_fake
def _(tokens, choices, slots, kept, language):
    return tokens.new_empty(choices.shape[0], tokens.shape[1])


@_sum_rows.register_fake
def _(rows, slots, kept, language):
    return rows.new_empty(slots.shape[0], rows.shape[1])


@_combine_rows.register_fake
def _(rows, gates, choices, slots, kept, language):
    dtype = torch.promote_types(rows.dtype, gates.dtype)
    return rows.new_empty(slots.shape[0], rows.shape[1], dtype=dtype)


@_combine_rows_backward.register_fake
def _(grad, needs, rows, gates, choices, slots, kept, language):
    # The gradients are contiguous, whatever the strides of rows and gates.
    return rows.new_empty(rows.shape), gates.new_empty(gates.shape)


def _save_dispatch(ctx, inputs, output) -> None:
    _, _, slots, kept, ctx.language = inputs
    ctx.save_for_backward(slots, kept)


def _differentiate_dispatch(ctx, grad):
    slots, kept = ctx.saved_tensors
    if is_differentiated_again(grad):
        return reference.sum_rows(grad, slots, kept, None), None, None, None, None
    return _sum_rows(grad, slots, kept, ctx.language), None, None, None, None


def _plain_combine(rows, gates, choices, slots, kept, language) -> Tensor:
    return reference.sum_rows(rows, slots, kept, gates)


_dispatch_rows.register_autograd(_differentiate_dispatch, _save_dispatch)
register_gradient(_combine_rows, 2, _combine_rows_backward, _plain_combine)
