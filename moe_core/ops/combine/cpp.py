"""C++ form: sums rows into tokens in one pass over memory. Sums are in fp32 and rounded once.

The dispatch has no C++ form; torch gathers the tokens.
"""

# T tokens, K top-k, N rows, M model dim

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_core.ops.combine.reference import dispatch_rows
from moe_core.ops.native.library import call

__all__ = ["combine_rows_backward", "dispatch_rows", "sum_rows"]


def sum_rows(rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None) -> Tensor:
    """As `reference.sum_rows`, with gates in fp32."""
    dtype = rows.dtype
    if gates is not None:
        dtype = torch.float32
    num_tokens, top_k = slots.shape
    if rows.shape[0] == 0:  # capacity 0: slots refer to no row
        return rows.new_zeros(num_tokens, rows.shape[1], dtype=dtype)
    out = rows.new_empty(num_tokens, rows.shape[1], dtype=dtype)
    sizes = (num_tokens, top_k, rows.shape[1], torch.get_num_threads())
    _call("rows_sum", (rows, slots, kept, gates, out), sizes, (rows.dtype, out.dtype))
    return out


def combine_rows_backward(
    grad: Tensor, rows: Tensor, gates: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, M], 0 for rows without a choice, and of gates [T, K].

    Gates are in fp32, grad is in fp32 or the rows' dtype.
    """
    grad_rows = rows.new_empty(rows.shape)
    grad_gates = gates.new_zeros(gates.shape)
    num_rows, model_dim = rows.shape
    if num_rows == 0:
        return grad_rows, grad_gates
    num_used = len(choices)
    if kept is not None:
        num_used = int(kept.sum())
    sizes = (num_rows, num_used, slots.shape[1], model_dim, torch.get_num_threads())
    tensors = (grad, rows, choices, gates, grad_rows, grad_gates)
    _call("rows_combine_backward", tensors, sizes, (rows.dtype, grad.dtype))
    return grad_rows, grad_gates


def _call(
    function: str,
    tensors: Sequence[Tensor | None],
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> None:
    # Outputs are contiguous already, so they are not copied.
    contiguous = [None if t is None else t.contiguous() for t in tensors]
    is_bf16 = [int(dtype == torch.bfloat16) for dtype in dtypes]
    call(function, contiguous, list(sizes) + is_bf16)
