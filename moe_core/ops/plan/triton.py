"""The dispatch plan in Triton.

A choice's row is the number of choices before it, ordered by expert, then k, then token. Blocks of
tokens count their choices for each expert and k. A cumulative sum of these counts is where each
block's rows start. Within a block a choice counts the ones before it of the same expert.
"""

# T tokens, E experts, K top-k, N rows, B blocks

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import on_its_device

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
    # by each choice of the expert, all the same number
    tl.store(counts + cell, count, mask=expert >= 0)


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
    # [E, K * B], counts to begin with
    ends = expert_ids.new_zeros(num_experts, top_k * grid[0], dtype=torch.int32)
    if num_choices:
        _count_kernel[grid](
            expert_ids,
            order,
            ends,
            order_stride,
            num_tokens,
            grid[0],
            top_k,
            _BLOCK,
            num_warps=8,
        )
        ends = ends.flatten().cumsum(0, dtype=torch.int32).view_as(ends)
    expert_ends = ends[:, -1].contiguous() if num_choices else ends.sum(1, dtype=torch.int32)
    counts = expert_ends.diff(prepend=expert_ends.new_zeros(1))
    choices, slots = expert_ids.new_zeros(num_rows), torch.empty_like(expert_ids)
    kept = kept_starts = None
    offsets = expert_ends
    if limits is not None:
        kept = torch.empty_like(expert_ids, dtype=torch.bool)
        kept_counts = torch.minimum(counts, limits).int()
        offsets = kept_counts.cumsum(0, dtype=torch.int32)
        kept_starts = offsets - kept_counts
    if num_choices:
        kept_bytes = None if kept is None else kept.view(torch.uint8)
        _plan_kernel[grid](
            expert_ids, order, ends, expert_ends - counts, kept_starts, limits, choices, slots,
            kept_bytes, order_stride, num_tokens, grid[0], top_k, _BLOCK, num_warps=8,
        )  # fmt: skip
    return choices, offsets, slots, kept, counts.long()
