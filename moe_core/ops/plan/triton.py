"""The dispatch plan in Triton.

A choice's row is the number of choices before it, ordered by expert, then k, then token.

1. `_count_kernel`: each block of tokens counts its choices for each expert and k, a cell each.
2. `_scan_kernel`: the cumulative sum of the cells is where each block's rows end.
3. `_plan_kernel`: within a block a choice counts the ones before it of the same expert.
"""

# T tokens, E experts, K top-k, N rows, B blocks

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import on_its_device

_TILE = 4096  # counts that a program of the scan reads at a time
_BLOCK = 128  # tokens of a program; the counts of all blocks take T * K * E / 32 bytes


@triton.jit
def _place_in_block(
    expert_ids, order, order_stride, num_tokens, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Of each choice of a block, the k-th of BLOCK tokens: number t * K + k, expert (-1 past the
    end), how many of the same expert come before it in the block, and how many the block has."""
    k = tl.program_id(1)
    if order is not None:
        order += k * order_stride
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < num_tokens
    token = i.to(tl.int64)
    if order is not None:
        token = tl.load(order + i, mask=there, other=0)
    choice = token * TOP_K + k
    expert = tl.load(expert_ids + choice, mask=there, other=-1)
    # The same experts again along the other axis.
    token_across = i.to(tl.int64)
    if order is not None:
        token_across = tl.load(order + i, mask=there, other=0)
    across = tl.load(expert_ids + token_across * TOP_K + k, mask=there, other=-1)
    same = (expert.to(tl.int32)[:, None] == across.to(tl.int32)[None, :]).to(tl.int32)
    earlier = i[None, :] < i[:, None]
    return choice, expert, tl.sum(tl.where(earlier, same, 0), axis=1), tl.sum(same, axis=1)


@triton.jit(do_not_specialize=["order_stride", "num_tokens", "num_blocks"])
def _count_kernel(
    expert_ids,
    order,
    counts,
    order_stride,
    num_tokens,
    num_blocks,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _, expert, _, count = _place_in_block(expert_ids, order, order_stride, num_tokens, TOP_K, BLOCK)
    cell = (expert * TOP_K + tl.program_id(1)) * num_blocks + tl.program_id(0)
    # all choices of the expert store the same count
    tl.store(counts + cell, count, mask=expert >= 0)


@triton.jit(do_not_specialize=["num_cells"])
def _scan_kernel(
    counts, limits, ends, starts, kept_starts, offsets, totals, num_cells,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For one expert: where the rows of each of its cells [K * B] end, where its rows start before
    and after the limits, where they end after the limits (offsets), and its number of choices."""
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    of_expert = tl.zeros([BLOCK_E], dtype=tl.int32)
    for first in range(0, num_cells, BLOCK_C):
        cell = first + tl.arange(0, BLOCK_C)
        mask = (e < NUM_EXPERTS)[:, None] & (cell < num_cells)[None, :]
        values = tl.load(counts + e[:, None] * num_cells + cell[None, :], mask=mask, other=0)
        of_expert += tl.sum(values, 1)
    start = tl.sum(tl.where(e < expert, of_expert, 0))
    total = tl.sum(tl.where(e == expert, of_expert, 0))
    kept = of_expert
    if limits is not None:
        limit = tl.load(limits + e, mask=e < NUM_EXPERTS, other=0)
        kept = tl.minimum(of_expert.to(tl.int64), limit).to(tl.int32)
    kept_start = tl.sum(tl.where(e < expert, kept, 0))
    tl.store(starts + expert, start)
    tl.store(kept_starts + expert, kept_start)
    tl.store(offsets + expert, kept_start + tl.sum(tl.where(e == expert, kept, 0)))
    tl.store(totals + expert, total.to(tl.int64))
    end = start
    for first in range(0, num_cells, BLOCK_C):
        cell = first + tl.arange(0, BLOCK_C)
        mask = cell < num_cells
        values = tl.load(counts + expert * num_cells + cell, mask=mask, other=0)
        tl.store(ends + expert * num_cells + cell, end + tl.cumsum(values, 0), mask=mask)
        end += tl.sum(values)


@triton.jit(do_not_specialize=["order_stride", "num_tokens", "num_blocks"])
def _plan_kernel(
    expert_ids, order, ends, starts, kept_starts, limits, choices, slots, kept, order_stride,
    num_tokens, num_blocks, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    choice, expert, place, count = _place_in_block(
        expert_ids, order, order_stride, num_tokens, TOP_K, BLOCK
    )
    there = expert >= 0
    cell = (expert * TOP_K + tl.program_id(1)) * num_blocks + tl.program_id(0)
    row = (tl.load(ends + cell, mask=there, other=0) - count + place).to(tl.int64)
    if kept is None:
        tl.store(slots + choice, row, mask=there)
        tl.store(choices + row, choice, mask=there)
    else:  # close the gaps that dropped choices leave between the experts' rows
        place = row - tl.load(starts + expert, mask=there, other=0)
        row = place + tl.load(kept_starts + expert, mask=there, other=0)
        fits = place < tl.load(limits + expert, mask=there, other=0)
        tl.store(slots + choice, tl.where(fits, row, 0), mask=there)
        tl.store(kept + choice, fits.to(tl.uint8), mask=there)
        tl.store(choices + row, choice, mask=there & fits)


@on_its_device
def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limits: Tensor | None,
    priority: Tensor | None,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """What `reference.make_plan` returns, number for number."""
    assert expert_ids.dim() == 2
    assert expert_ids.dtype == torch.int64
    num_tokens, top_k = expert_ids.shape
    num_choices = num_tokens * top_k
    assert num_choices < 2**31, "offsets are int32"
    expert_ids = expert_ids.contiguous()
    assert limits is None or limits.shape == (num_experts,)
    order, order_stride = None, 0
    if priority is not None:
        order = priority.t().contiguous().argsort(descending=True, stable=True)
        if order.dim() == 2:  # [K, T]; of [T] the same row serves every k
            order_stride = num_tokens
    grid = (triton.cdiv(num_tokens, _BLOCK), top_k)
    num_cells = top_k * grid[0]
    cells = expert_ids.new_zeros(num_experts, num_cells, dtype=torch.int32)
    if num_choices:
        _count_kernel[grid](
            expert_ids, order, cells, order_stride, num_tokens, grid[0], top_k, _BLOCK, num_warps=8
        )
    ends = torch.empty_like(cells)
    starts, kept_starts = cells.new_empty(2, num_experts).unbind()
    offsets, counts = cells.new_empty(num_experts), expert_ids.new_empty(num_experts)
    block_e = triton.next_power_of_2(num_experts)
    block_c = max(_TILE // block_e, 1)
    _scan_kernel[(num_experts,)](
        cells, limits, ends, starts, kept_starts, offsets, counts, num_cells, num_experts, block_e,
        block_c,
    )  # fmt: skip
    choices, slots = expert_ids.new_zeros(num_rows), torch.empty_like(expert_ids)
    kept = kept_bytes = None
    if limits is not None:
        kept = torch.empty_like(expert_ids, dtype=torch.bool)
        kept_bytes = kept.view(torch.uint8)
    if num_choices:
        _plan_kernel[grid](
            expert_ids, order, ends, starts, kept_starts, limits, choices, slots, kept_bytes,
            order_stride, num_tokens, grid[0], top_k, _BLOCK, num_warps=8,
        )  # fmt: skip
    return choices, offsets, slots, kept, counts
