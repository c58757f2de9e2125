"""Tokens gathered into rows and rows summed back into tokens, as torch.library ops with a gather
for a backward each.

A choice is the flat index `t * K + k` of token t's k-th expert. `choices` [N] names the choice in
each row, `slots` [T, K] the row of each choice, `kept` [T, K] the choices that were not dropped
(None: all). A gather in both directions is deterministic and needs no atomics on a GPU, where
autograd would scatter.

Each op decides by its tensors' device and `kernels` (`backend.choose`) whether Triton's kernels,
C++ (`rows_x86`, where `kernels` is "auto") or the torch ones here run. They give the same values,
but for rounding: all but torch's add up a token's rows in fp32 and round once.
"""

# T tokens, K top-k, N rows, M model dim

import torch
from torch import Tensor

from moe_core.kernels import rows_x86
from moe_core.kernels.backend import choose


def dispatch_rows(
    tokens: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None, kernels: str = "auto"
) -> Tensor:
    """tokens [T, M] -> [N, M]: row n is the token of `choices[n]`."""
    return torch.ops.moe_core.dispatch_rows(tokens, choices, slots, kept, kernels)


def combine_rows(
    rows: Tensor,
    gates: Tensor,
    choices: Tensor,
    slots: Tensor,
    kept: Tensor | None,
    kernels: str = "auto",
) -> Tensor:
    """rows [N, M], gates [T, K] -> `sum_k gates_tk * rows[slots_tk]` of the kept choices [T, M], in
    the wider dtype.

    Rows that hold no choice may be missing at the end: an exchange between ranks does not bring
    them back.
    """
    return torch.ops.moe_core.combine_rows(rows, gates, choices, slots, kept, kernels)


# 1. Ops


@torch.library.custom_op("moe_core::dispatch_rows", mutates_args=())
def _dispatch_rows(
    tokens: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None, kernels: str = "auto"
) -> Tensor:
    if choose(kernels, tokens.device.type) == "triton":
        return _triton().dispatch_rows(tokens, choices, slots.shape[1])
    top_k = slots.shape[1]
    return tokens.index_select(0, choices if top_k == 1 else choices // top_k)


@torch.library.custom_op("moe_core::sum_rows", mutates_args=())
def _sum_rows(
    rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None, kernels: str = "auto"
) -> Tensor:
    return _sum(rows, slots, kept, gates, kernels)


@torch.library.custom_op("moe_core::combine_rows", mutates_args=())
def _combine_rows(
    rows: Tensor,
    gates: Tensor,
    choices: Tensor,
    slots: Tensor,
    kept: Tensor | None,
    kernels: str = "auto",
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
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, M] (0 where a row holds no choice) and of gates [T, K]."""
    choices = choices[: rows.shape[0]]
    if choose(kernels, rows.device.type) == "triton":
        return _triton().combine_rows_backward(grad, rows, gates, choices, slots, kept)
    if kernels == "auto" and rows_x86.differentiates(grad, rows, gates):
        return rows_x86.combine_rows_backward(grad, rows, gates, choices, slots, kept)
    return _combine_rows_backward_by_torch(grad, rows, gates, choices, slots, kept)


def _sum(
    rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None, kernels: str
) -> Tensor:
    if choose(kernels, rows.device.type) == "triton":
        return _triton().sum_rows(rows, slots, kept, gates)
    if kernels == "auto" and rows_x86.sums(rows, gates):
        return rows_x86.sum_rows(rows, slots, kept, gates)
    return _sum_rows_by_torch(rows, slots, kept, gates)


def _triton():
    from moe_core.kernels import triton_rows  # here, since it imports Triton

    return triton_rows


# 2. The torch kernels


def _sum_rows_by_torch(
    rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None
) -> Tensor:
    total = None
    for k in range(slots.shape[1]):
        term = _rows_at(rows, slots[:, k])
        if gates is not None:
            gate = gates[:, k : k + 1]
            # in place, since memory is what costs here, and of one dtype, since a product of two is
            # twice as slow
            term = term.to(torch.promote_types(term.dtype, gate.dtype)).mul_(gate)
        # a fill, not a product with 0: the row of a dropped choice may hold anything
        if kept is not None:
            term.masked_fill_(~kept[:, k : k + 1], 0)
        total = term if total is None else total.add_(term)
    return total


def _combine_rows_backward_by_torch(
    grad: Tensor, rows: Tensor, gates: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad_rows = grad.index_select(0, choices // slots.shape[1])
    # of one dtype, as above
    products = rows.to(torch.promote_types(rows.dtype, grad_rows.dtype)) * grad_rows
    grad_gates = _rows_at(products.sum(1), slots.flatten()).view_as(slots)
    grad_rows *= gates.flatten().index_select(0, choices).unsqueeze(1)
    if kept is not None:
        unused = torch.arange(rows.shape[0], device=rows.device) >= kept.sum()
        grad_rows.masked_fill_(unused.unsqueeze(1), 0)
        grad_gates = grad_gates.masked_fill_(~kept, 0)
    return grad_rows.to(rows.dtype), grad_gates.to(gates.dtype)


def _rows_at(rows: Tensor, slots: Tensor) -> Tensor:
    """`rows[slots]`, a copy; zeros where there is no row at all (capacity 0)."""
    return (
        rows.index_select(0, slots)
        if rows.shape[0]
        else rows.new_zeros(slots.shape[0], *rows.shape[1:])
    )


# 3. Fake kernels and autograd


@_dispatch_rows.register_fake
def _(tokens, choices, slots, kept, kernels="auto"):
    return tokens.new_empty(choices.shape[0], tokens.shape[1])


@_sum_rows.register_fake
def _(rows, slots, kept, gates, kernels="auto"):
    dtype = rows.dtype if gates is None else torch.promote_types(rows.dtype, gates.dtype)
    return rows.new_empty(slots.shape[0], rows.shape[1], dtype=dtype)


@_combine_rows.register_fake
def _(rows, gates, choices, slots, kept, kernels="auto"):
    dtype = torch.promote_types(rows.dtype, gates.dtype)
    return rows.new_empty(slots.shape[0], rows.shape[1], dtype=dtype)


@_combine_rows_backward.register_fake
def _(grad, rows, gates, choices, slots, kept, kernels="auto"):
    # dense, whatever their strides are
    return rows.new_empty(rows.shape), gates.new_empty(gates.shape)


def _save_dispatch(ctx, inputs, output) -> None:
    _, _, slots, kept, ctx.kernels = inputs
    ctx.save_for_backward(slots, kept)


def _dispatch_backward(ctx, grad):
    slots, kept = ctx.saved_tensors
    return torch.ops.moe_core.sum_rows(grad, slots, kept, None, ctx.kernels), None, None, None, None


def _save_combine(ctx, inputs, output) -> None:
    *tensors, ctx.kernels = inputs
    ctx.save_for_backward(*tensors)


def _combine_backward(ctx, grad):
    grads = torch.ops.moe_core.combine_rows_backward(grad, *ctx.saved_tensors, ctx.kernels)
    return *grads, None, None, None, None


torch.library.register_autograd(
    "moe_core::dispatch_rows", _dispatch_backward, setup_context=_save_dispatch
)
torch.library.register_autograd(
    "moe_core::combine_rows", _combine_backward, setup_context=_save_combine
)
