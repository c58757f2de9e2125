"""Rows summed into tokens on an x86 CPU, in C++: one pass over memory, sums in fp32 that are
rounded once."""

# T tokens, K top-k, N rows, M model dim

from ctypes import c_long

import torch
from torch import Tensor

from moe_core.kernels.library_x86 import library, pointer, usable

_DTYPES = (torch.float32, torch.bfloat16)


def sums(rows: Tensor, gates: Tensor | None) -> bool:
    """Whether `sum_rows` is for these."""
    return _here(rows) and (gates is None or gates.dtype == torch.float32)


def differentiates(grad: Tensor, rows: Tensor, gates: Tensor) -> bool:
    """Whether `combine_rows_backward` is for these."""
    return (
        _here(rows) and gates.dtype == torch.float32 and grad.dtype in (torch.float32, rows.dtype)
    )


def sum_rows(rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None) -> Tensor:
    """`sum_k gates_tk * rows[slots_tk]` [T, M] of the kept choices."""
    out = rows.new_empty(
        len(slots), rows.shape[1], dtype=rows.dtype if gates is None else torch.float32
    )
    tensors = (rows, slots, kept, gates)
    _call(
        "rows_sum",
        (*tensors, out),
        (*slots.shape, rows.shape[1], torch.get_num_threads()),
        (rows, out),
    )
    return out


def combine_rows_backward(
    grad: Tensor, rows: Tensor, gates: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, M], 0 where a row holds no choice, and of gates [T, K]."""
    grad_rows, grad_gates = rows.new_empty(rows.shape), gates.new_zeros(gates.shape)
    used = len(choices) if kept is None else int(kept.sum())
    tensors = (grad, rows, choices, gates, grad_rows, grad_gates)
    sizes = (len(rows), used, slots.shape[1], rows.shape[1], torch.get_num_threads())
    _call("rows_combine_backward", tensors, sizes, (rows, grad))
    return grad_rows, grad_gates


def _call(
    function: str, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], of_two_dtypes: tuple
) -> None:
    tensors = [None if t is None else t.contiguous() for t in tensors]  # the new ones are
    numbers = (*sizes, *(t.dtype == torch.bfloat16 for t in of_two_dtypes))
    getattr(library(), function)(*map(pointer, tensors), *map(c_long, numbers))


def _here(rows: Tensor) -> bool:
    """Without a row, capacity 0, there is nothing that a slot could name."""
    return (
        rows.device.type == "cpu" and rows.dtype in _DTYPES and len(rows) > 0 and usable(rows.dtype)
    )
