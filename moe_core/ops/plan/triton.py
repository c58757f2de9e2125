"""The dispatch plan in Triton.

A choice's row is the number of choices before it, ordered by expert, then k, then token.

1. `_count_kernel`: each block of tokens counts its choices for each expert and k. One such count is
   a cell.
2. `_scan_kernel`: the start of a block's rows is the sum of all previous cells.
3. `_plan_kernel`: the row of a choice is this start plus the number of previous choices of the same
   expert in the block.
"""

# T tokens, E experts, K top-k, N rows, B blocks

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.ops.backend import on_its_device
from moe_core.ops.blocks import cdiv, next_power_of_2
from moe_core.ops.launch import recordable

_TILE = 4096  # counts that a program of the scan reads at a time
_EXPERTS_AT_A_TIME = 64  # experts that a program of the count compares with its choices
_BLOCK = 128  # tokens of a program; the counts of all blocks take T * K * E / 32 bytes


@triton.jit
def _load_block(expert_ids, order, order_stride, num_tokens, TOP_K: tl.constexpr, i):
    """Load the choice t * K + k and its expert for the tokens at positions `i` and every k.

    The expert is -1 past the end.
    """
    k = tl.program_id(1)
    mask = i < num_tokens
    token = i.to(tl.int64)
    if order is not None:
        token = tl.load(order + k * order_stride + i, mask=mask, other=0)
    choice = token * TOP_K + k
    return choice, tl.load(expert_ids + choice, mask=mask, other=-1).to(tl.int32)


@recordable
@triton.jit(do_not_specialize=["order_stride", "num_tokens", "num_blocks"])
def _count_kernel(
    expert_ids, order, counts, order_stride, num_tokens, num_blocks, NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Count the choices of a block. Every cell is written, so the cells need no initialisation."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, expert = _load_block(expert_ids, order, order_stride, num_tokens, TOP_K, i)
    for first in range(0, NUM_EXPERTS, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        count = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), axis=0)
        cell = (e * TOP_K + tl.program_id(1)) * num_blocks + tl.program_id(0)
        tl.store(counts + cell, count, mask=e < NUM_EXPERTS)


@recordable
@triton.jit(do_not_specialize=["limit", "num_cells", "num_rows"])
def _scan_kernel(
    counts, device_limit, firsts, starts, kept_starts, offsets, totals, choices, limit, num_cells,
    num_rows, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute for one expert the positions of its rows and its number of choices.

    The positions are: the start of the rows of each cell [K * B], the start of the expert's rows
    before and after the limit, and the end after the limit (`offsets`). The programs together
    also write 0 to `choices` for the rows without a choice.
    """
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
    if device_limit is None:
        kept = tl.minimum(of_expert, limit)
    else:
        kept = tl.minimum(of_expert.to(tl.int64), tl.load(device_limit)).to(tl.int32)
    kept_start = tl.sum(tl.where(e < expert, kept, 0))
    tl.store(starts + expert, start)
    tl.store(kept_starts + expert, kept_start)
    tl.store(offsets + expert, kept_start + tl.sum(tl.where(e == expert, kept, 0)))
    tl.store(totals + expert, total.to(tl.int64))
    for first in range(0, num_cells, BLOCK_C):
        cell = first + tl.arange(0, BLOCK_C)
        mask = cell < num_cells
        values = tl.load(counts + expert * num_cells + cell, mask=mask, other=0)
        earlier = tl.cumsum(values, 0) - values
        tl.store(firsts + expert * num_cells + cell, start + earlier, mask=mask)
        start += tl.sum(values)
    num_kept = tl.sum(kept)
    for first in range(num_kept + expert * BLOCK_C, num_rows, NUM_EXPERTS * BLOCK_C):
        row = first + tl.arange(0, BLOCK_C)
        tl.store(choices + row, tl.zeros([BLOCK_C], dtype=tl.int64), mask=row < num_rows)


@recordable
@triton.jit(do_not_specialize=["limit", "order_stride", "num_tokens", "num_blocks"])
def _plan_kernel(
    expert_ids, order, firsts, starts, kept_starts, device_limit, choices, slots, kept, limit,
    order_stride, num_tokens, num_blocks, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCK
    i = block + tl.arange(0, BLOCK)
    choice, expert = _load_block(expert_ids, order, order_stride, num_tokens, TOP_K, i)
    # The same experts along the other axis.
    across = block + tl.arange(0, BLOCK)
    _, expert_across = _load_block(expert_ids, order, order_stride, num_tokens, TOP_K, across)
    is_before = (expert[:, None] == expert_across[None, :]) & (across[None, :] < i[:, None])
    place = tl.sum(is_before.to(tl.int32), axis=1)
    mask = expert >= 0
    cell = (expert * TOP_K + tl.program_id(1)) * num_blocks + tl.program_id(0)
    row = (tl.load(firsts + cell, mask=mask, other=0) + place).to(tl.int64)
    if kept is None:
        tl.store(slots + choice, row, mask=mask)
        tl.store(choices + row, choice, mask=mask)
    else:  # close the gaps that dropped choices leave between the experts' rows
        place_of_expert = row - tl.load(starts + expert, mask=mask, other=0)
        row = place_of_expert + tl.load(kept_starts + expert, mask=mask, other=0)
        if device_limit is None:
            fits = place_of_expert < limit
        else:
            fits = place_of_expert < tl.load(device_limit)
        tl.store(slots + choice, tl.where(fits, row, 0), mask=mask)
        tl.store(kept + choice, fits.to(tl.uint8), mask=mask)
        tl.store(choices + row, choice, mask=mask & fits)


@on_its_device
def make_plan(
    expert_ids: Tensor,
    num_experts: int,
    limit: int | Tensor | None,
    priority: Tensor | None,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """The same results as `reference.make_plan`, number for number."""
    assert expert_ids.dim() == 2
    assert expert_ids.dtype == torch.int64
    num_tokens, top_k = expert_ids.shape
    num_choices = num_tokens * top_k
    assert num_choices < 2**31, "offsets are int32"
    expert_ids = expert_ids.contiguous()
    kept = kept_bytes = None
    if limit is not None:
        kept = torch.empty_like(expert_ids, dtype=torch.bool)
        kept_bytes = kept.view(torch.uint8)
    device_limit: Tensor | None = None  # read by the kernels
    most = num_choices
    if isinstance(limit, Tensor):
        device_limit = limit
    elif limit is not None:
        most = min(limit, num_choices)
    order, order_stride = _order(priority)
    grid = (cdiv(num_tokens, _BLOCK), top_k)
    num_cells = top_k * grid[0]
    cells = expert_ids.new_empty(num_experts, num_cells, dtype=torch.int32)
    firsts = torch.empty_like(cells)
    block_e = next_power_of_2(num_experts)
    if num_choices:
        _count_kernel[grid](
            expert_ids, order, cells, order_stride, num_tokens, grid[0], num_experts, top_k, _BLOCK,
            min(block_e, _EXPERTS_AT_A_TIME), num_warps=8,
        )  # fmt: skip
    starts, kept_starts, offsets = (cells.new_empty(num_experts) for _ in range(3))
    counts = expert_ids.new_empty(num_experts)
    choices, slots = expert_ids.new_empty(num_rows), torch.empty_like(expert_ids)
    block_c = max(_TILE // block_e, 1)
    _scan_kernel[(num_experts,)](
        cells, device_limit, firsts, starts, kept_starts, offsets, counts, choices, most, num_cells,
        num_rows, num_experts, block_e, block_c,
    )  # fmt: skip
    if num_choices:
        _plan_kernel[grid](
            expert_ids, order, firsts, starts, kept_starts, device_limit, choices, slots,
            kept_bytes, most, order_stride, num_tokens, grid[0], top_k, _BLOCK, num_warps=8,
        )  # fmt: skip
    return choices, offsets, slots, kept, counts


def _order(priority: Tensor | None) -> tuple[Tensor | None, int]:
    """The tokens by descending priority [T] or [K, T], and the stride of k.

    The stride is 0 if every k has the same order.
    """
    if priority is None:
        return None, 0
    order = priority.t().contiguous().argsort(descending=True, stable=True)
    if order.dim() == 2:
        return order, order.shape[1]
    return order, 0
