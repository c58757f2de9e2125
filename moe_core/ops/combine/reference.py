"""Dispatch and combine in plain torch: the specification, for any kind of derivative."""

# T tokens, K top-k, N rows, M model dim

import torch
import torch.nn.functional as F
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
    if rows.shape[0] == 0:  # capacity 0: slots refer to no row
        rows = F.pad(rows, (0, 0, 0, 1))
    terms = rows.index_select(0, slots.flatten()).unflatten(0, slots.shape)  # [T, K, M]
    if gates is not None:
        # Both factors have one dtype, because a product of two dtypes takes twice as long.
        terms = terms.to(torch.promote_types(terms.dtype, gates.dtype))
    if kept is not None:
        # Not a product with 0: the row of a dropped choice, or its gate, may hold NaN.
        terms = terms.masked_fill(~kept.unsqueeze(2), 0)
    if gates is not None:
        if kept is not None:
            gates = gates.masked_fill(~kept, 0)
        terms = terms * gates.unsqueeze(2)
    if slots.shape[1] == 1:
        return terms.squeeze(1)
    return terms.sum(1)
