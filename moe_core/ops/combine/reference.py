"""Dispatch and combine in plain torch: the specification."""

# T tokens, K top-k, N rows, M model dim

import torch
from torch import Tensor


def dispatch_rows(tokens: Tensor, choices: Tensor, top_k: int) -> Tensor:
    """tokens [T, M] -> [N, M]: row n is the token of choice `choices[n]` [N]."""
    token_ids = choices
    if top_k > 1:
        token_ids = choices // top_k
    return tokens.index_select(0, token_ids)


def sum_rows(rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None) -> Tensor:
    """`sum_k gates_tk * rows[slots_tk]` over the kept choices.

    Args:
        rows: [N, M].
        slots: the row of each choice [T, K].
        kept: [T, K], False where a choice was dropped; None: all are kept.
        gates: [T, K]; None: 1.

    Returns:
        [T, M] in the wider dtype of rows and gates.
    """
    total: Tensor | None = None
    for k in range(slots.shape[1]):
        term = _rows_at(rows, slots[:, k])
        if gates is not None:
            gate = gates[:, k : k + 1]
            # The product is in place, because memory traffic dominates. Both factors have one
            # dtype, because a product of two dtypes takes twice as long.
            term = term.to(torch.promote_types(term.dtype, gate.dtype)).mul_(gate)
        if kept is not None:
            # Not a product with 0: the row of a dropped choice may hold NaN.
            term.masked_fill_(~kept[:, k : k + 1], 0)
        if total is None:
            total = term
        else:
            total.add_(term)
    assert total is not None, "top_k is at least 1"
    return total


def plain_sum_rows(
    rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None
) -> Tensor:
    """As `sum_rows`, without operations in place: for derivatives and torch.func transforms."""
    terms = _rows_at(rows, slots.flatten()).unflatten(0, slots.shape)  # [T, K, M]
    if gates is not None:
        terms = terms * gates.unsqueeze(2)
    if kept is not None:
        terms = terms.masked_fill(~kept.unsqueeze(2), 0)
    return terms.sum(1)


def combine_rows_backward(
    grad: Tensor, rows: Tensor, gates: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, M], 0 for rows without a choice, and of gates [T, K]."""
    grad_rows = grad.index_select(0, choices // slots.shape[1])
    dtype = torch.promote_types(rows.dtype, grad_rows.dtype)
    products = rows.to(dtype) * grad_rows
    grad_gates = _rows_at(products.sum(1), slots.flatten()).view_as(slots)
    grad_rows *= gates.flatten().index_select(0, choices).unsqueeze(1)
    if kept is not None:
        unused = torch.arange(rows.shape[0], device=rows.device) >= kept.sum()
        grad_rows.masked_fill_(unused.unsqueeze(1), 0)
        grad_gates = grad_gates.masked_fill_(~kept, 0)
    return grad_rows.to(rows.dtype), grad_gates.to(gates.dtype)


def _rows_at(rows: Tensor, slots: Tensor) -> Tensor:
    """A copy of `rows[slots]`; zeros if there are no rows (capacity 0)."""
    if rows.shape[0] == 0:
        return rows.new_zeros(slots.shape + rows.shape[1:])
    return rows.index_select(0, slots)
