"""The order in which rows are sent and received, against plain enumeration."""

# W ranks, E experts, T tokens, K top-k, r hidden parts, d chunks

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_core.ops import make_plan
from moe_core.parallel import ParallelStrategy, valid_r
from moe_core.parallel.chunks import ChunkLayout, kept_counts, plan_received
from moe_core.parallel.hierarchical import _transpose_blocks

CASES = [
    (num_experts, r, degree, capacity)
    for num_experts in (8, 4, 2, 1)
    for r in valid_r(num_experts, 4)[1:]
    for degree in (1, 2, 3, 8)
    for capacity in (None, 3)
]


def run_of(row: int, num_rows: int, num_sharers: int, degree: int) -> tuple[int, int]:
    """(sharer, chunk) of an expert's row: the last unit that begins at it or before."""
    units = max(2 * (degree - 1), 1)
    starts = [num_rows * u // (num_sharers * units) for u in range(num_sharers * units)]
    unit = max(u for u, start in enumerate(starts) if start <= row)
    return unit // units, (unit % units + 1) // 2


def test_rows_are_sent_as_enumerated():
    for case in CASES:
        check_sent_rows(*case)


def check_sent_rows(num_experts, r, degree, capacity):
    torch.manual_seed(0)
    expert_ids = torch.rand(11, num_experts).argsort(1)[:, :2]
    plan = make_plan(expert_ids, num_experts, capacity)
    counts = kept_counts(plan)
    layout = ChunkLayout.of(num_experts, 4, ParallelStrategy(r, degree))
    num_rows = int(counts.sum())
    arranged = layout.arrange(plan, num_rows)

    ranks_per_expert = max(4 // num_experts, 1)
    sharers = ranks_per_expert // r
    sent = []  # (chunk, rank, expert, row, choice)
    starts = [0, *plan.offsets.tolist()]
    for expert, part in itertools.product(range(num_experts), range(r)):
        for row in range(int(counts[expert])):
            sharer, chunk = run_of(row, int(counts[expert]), sharers, degree)
            rank = expert * 4 // num_experts + part * sharers + sharer
            choice = int(plan.choices[starts[expert] + row]) * r + part
            sent.append((chunk, rank, expert, row, choice))
    sent.sort()
    assert arranged.choices.tolist() == [choice for *_, choice in sent]
    sharers_of_ranks = layout.sharers(counts.device).unsqueeze(1)
    by_rank = layout.chunk_sizes(layout.by_rank(counts), sharers_of_ranks)  # [W, E_l, d]
    for chunk, rank in itertools.product(range(degree), range(4)):
        expected = sum(row[:2] == (chunk, rank) for row in sent)
        assert int(by_rank[rank, :, chunk].sum()) == expected
    # every kept choice finds its rows
    slots = arranged.slots.flatten()
    for row, choice in enumerate(arranged.choices.tolist()):
        assert slots[choice] == row
    if arranged.kept is not None:
        assert arranged.kept.sum() == len(sent)


def test_received_rows_are_sorted_by_expert():
    counts = torch.tensor([[2, 0, 3], [0, 0, 1], [4, 0, 2]])  # [W, E_l]
    num_rows = int(counts.sum())
    plan = plan_received(counts, num_rows)
    expert_of_row = torch.arange(3).repeat(3).repeat_interleave(counts.flatten())
    order = expert_of_row.argsort(stable=True)
    assert torch.equal(plan.choices, order)
    assert torch.equal(plan.slots.flatten()[order], torch.arange(num_rows))
    assert plan.offsets.tolist() == [6, 6, 12]
    assert plan.offsets.dtype == torch.int32


@st.composite
def tables(draw):
    num_rows, num_columns = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 4), min_size=num_columns, max_size=num_columns)
    return torch.tensor(draw(st.lists(row, min_size=num_rows, max_size=num_rows)))


@given(tables())
def test_2dh_transposes_blocks(sizes):
    rows = torch.arange(int(sizes.sum())).unsqueeze(1)
    blocks = iter(rows.split(sizes.flatten().tolist()))
    table = [[next(blocks) for _ in row] for row in sizes]
    expected = torch.cat([block for column in zip(*table, strict=True) for block in column])
    assert torch.equal(_transpose_blocks(rows, sizes), expected)
