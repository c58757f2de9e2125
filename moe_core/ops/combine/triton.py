"""Triton form: gathers tokens into rows, and sums rows into tokens.

Each launcher has the arguments of its torch form in `reference`. Sums are in fp32 (fp64 for fp64)
and rounded once. One program computes each output element, with a fixed order of additions and no
atomic operations, so runs repeat bit by bit. Offsets are 64-bit integers, because N * M may exceed
2^31.
"""

# T tokens, K top-k, N rows, M model dim
# A program computes a tile of BLOCK_N rows (or tokens) and BLOCK_M columns.

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import on_its_device
from moe_core.ops.blocks import cdiv, next_power_of_2
from moe_core.ops.launch import recordable

_TILE = 4096  # elements of a tile: 32 for each thread of 4 warps
_MAX_BLOCK_M = 512


@recordable
@triton.jit(do_not_specialize=["num_rows"])
def _dispatch_kernel(
    tokens,
    choices,
    rows,
    num_rows,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(choices + n, mask=n < num_rows, other=0) // TOP_K
    mask = (n < num_rows)[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(tokens + token[:, None] * WIDTH + columns[None, :], mask=mask)
    tl.store(
        rows + n[:, None] * WIDTH + columns[None, :], values.to(rows.dtype.element_ty), mask=mask
    )


@recordable
@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(
    rows, slots, kept, gates, out, num_tokens, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    SUM_DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=SUM_DTYPE)
    for k in range(TOP_K):
        choice = t * TOP_K + k
        is_kept = t < num_tokens
        # The row of a dropped choice is not read. It may hold NaN, or be missing.
        if kept is not None:
            is_kept = is_kept & (tl.load(kept + choice, mask=is_kept, other=0) != 0)
        slot = tl.load(slots + choice, mask=is_kept, other=0)
        mask = is_kept[:, None] & inside[None, :]
        term = tl.load(rows + slot[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
        term = term.to(SUM_DTYPE)
        if gates is not None:
            gate = tl.load(gates + choice, mask=is_kept, other=0.0).to(SUM_DTYPE)
            term = term * gate[:, None]
        total += term
    mask = (t < num_tokens)[:, None] & inside[None, :]
    tl.store(out + t[:, None] * WIDTH + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@recordable
@triton.jit(do_not_specialize=["num_rows"])
def _combine_backward_kernel(
    grad, rows, gates, choices, slots, kept, grad_rows, grad_gates, num_rows, WIDTH: tl.constexpr,
    TOP_K: tl.constexpr, SUM_DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = n < num_rows
    choice = tl.load(choices + n, mask=is_row, other=0)
    used = is_row
    # `choices` has an entry for unused rows too. An unused row is not the slot of that choice.
    if kept is not None:
        is_kept = tl.load(kept + choice, mask=is_row, other=0) != 0
        used = is_row & is_kept & (tl.load(slots + choice, mask=is_row, other=0) == n)
    gate = tl.load(gates + choice, mask=used, other=0.0).to(SUM_DTYPE)
    token = choice // TOP_K
    dot = tl.zeros([BLOCK_N, BLOCK_M], dtype=SUM_DTYPE)
    for start in range(0, WIDTH, BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        inside = (columns < WIDTH)[None, :]
        row_offsets = n[:, None] * WIDTH + columns[None, :]
        token_offsets = token[:, None] * WIDTH + columns[None, :]
        grads = tl.load(grad + token_offsets, mask=used[:, None] & inside, other=0.0).to(SUM_DTYPE)
        values = tl.load(rows + row_offsets, mask=used[:, None] & inside, other=0.0).to(SUM_DTYPE)
        dot += grads * values
        row_grads = (grads * gate[:, None]).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + row_offsets, row_grads, mask=is_row[:, None] & inside)
    tl.store(grad_gates + choice, tl.sum(dot, axis=1).to(grad_gates.dtype.element_ty), mask=used)


@on_its_device
def dispatch_rows(
    tokens: Tensor, choices: Tensor, top_k: int, dtype: torch.dtype | None = None
) -> Tensor:
    """tokens [T, M] of any dtype, choices [N] int64 -> [N, M] in `dtype`, or that of the tokens."""
    tokens = _matrix(tokens)
    _check_indices(tokens.device, choices)
    num_rows = choices.shape[0]
    width = tokens.shape[1]
    rows = tokens.new_empty(num_rows, width, dtype=dtype)
    if rows.numel():
        block_n, block_m = _tile(width)
        grid = (cdiv(num_rows, block_n), cdiv(width, block_m))
        _dispatch_kernel[grid](
            tokens, choices.contiguous(), rows, num_rows, width, top_k, block_n, block_m
        )
    return rows


@on_its_device
def sum_rows(rows: Tensor, slots: Tensor, kept: Tensor | None, gates: Tensor | None) -> Tensor:
    """rows [N, M], slots, kept and gates [T, K] -> [T, M] in the wider dtype."""
    rows = _matrix(rows)
    _check_indices(rows.device, slots, kept, gates)
    assert all(x is None or x.shape == slots.shape for x in (kept, gates))
    num_tokens, top_k = slots.shape
    width = rows.shape[1]
    dtype = rows.dtype
    if gates is not None:
        dtype = torch.promote_types(dtype, gates.dtype)
    out = rows.new_empty(num_tokens, width, dtype=dtype)
    if out.numel():
        block_n, block_m = _tile(width)
        grid = (cdiv(num_tokens, block_n), cdiv(width, block_m))
        _sum_kernel[grid](
            rows, _contiguous(slots), _contiguous(kept), _contiguous(gates), out,
            num_tokens, width, top_k, _sum_dtype(dtype), block_n, block_m,
        )  # fmt: skip
    return out


@on_its_device
def combine_rows_backward(
    grad: Tensor, rows: Tensor, gates: Tensor, choices: Tensor, slots: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of rows [N, M], 0 for rows without a choice, and of gates [T, K].

    The rows are read once.
    """
    grad, rows = _matrix(grad), _matrix(rows)
    _check_indices(rows.device, gates, choices, slots, kept)
    assert grad.shape == (slots.shape[0], rows.shape[1])
    assert choices.shape == rows.shape[:1]
    assert all(x is None or x.shape == slots.shape for x in (kept, gates))
    num_rows, width = rows.shape
    top_k = slots.shape[1]
    grad_rows = torch.empty_like(rows)
    # Zeros, because the kernel does not write the gradients of dropped choices.
    grad_gates = torch.zeros_like(gates, memory_format=torch.contiguous_format)
    if rows.numel():
        block_n, block_m = _tile(width)
        sum_dtype = _sum_dtype(torch.promote_types(grad.dtype, rows.dtype))
        _combine_backward_kernel[(cdiv(num_rows, block_n),)](
            grad, rows, _contiguous(gates), _contiguous(choices), _contiguous(slots),
            _contiguous(kept), grad_rows, grad_gates, num_rows, width, top_k, sum_dtype,
            block_n, block_m,
        )  # fmt: skip
    return grad_rows, grad_gates


def _tile(width: int) -> tuple[int, int]:
    block_m = min(next_power_of_2(width), _MAX_BLOCK_M)
    return min(_TILE // block_m, 64), block_m


def _sum_dtype(dtype: torch.dtype):
    if dtype == torch.float64:
        return tl.float64
    return tl.float32


def _contiguous(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    x = x.contiguous()
    # Triton treats pointers to bool as pointers to single bits.
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    return x


def _matrix(x: Tensor) -> Tensor:
    assert x.dim() == 2
    return x.contiguous()  # a gradient may be an expanded tensor


def _check_indices(device: torch.device, *tensors: Tensor | None) -> None:
    assert all(x is None or x.device == device for x in tensors)
