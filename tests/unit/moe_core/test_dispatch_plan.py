"""Properties of the dispatch plan: who gets a row, where, and who is dropped."""

# T tokens, E experts, K top-k, N rows

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core.ops import DispatchPlan, combine, dispatch, make_plan


@st.composite
def routings(draw):
    """expert_ids [T, K] without repeats in a token, E, capacity, priority (with ties)."""
    num_experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, num_experts))
    choices = draw(st.lists(st.permutations(range(num_experts)), max_size=12))
    expert_ids = torch.tensor([c[:top_k] for c in choices], dtype=torch.long).view(-1, top_k)
    capacity = draw(st.none() | st.integers(0, 8))
    levels = st.lists(
        st.sampled_from([0.1, 0.5, 0.9]), min_size=len(choices), max_size=len(choices)
    )
    priority = draw(st.none() | levels.map(lambda p: torch.tensor(p, dtype=torch.float32)))
    return expert_ids, num_experts, capacity, priority


def plain_rows(expert_ids, num_experts, capacity, priority) -> list[list[int]]:
    """The kept choices of every expert in order, by the definition."""
    num_tokens, top_k = expert_ids.shape
    order = sorted(range(num_tokens), key=lambda t: 0 if priority is None else -priority[t].item())
    kept = [[] for _ in range(num_experts)]
    for k in range(top_k):
        for t in order:
            rows = kept[expert_ids[t, k]]
            if capacity is None or len(rows) < capacity:
                rows.append(t * top_k + k)
    return kept


def rows_of(plan: DispatchPlan) -> list[list[int]]:
    ends = plan.offsets.tolist()
    return [plan.choices[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


@given(routings())
@settings(deadline=None, max_examples=300)
def test_plan_follows_the_definition(routing):
    expert_ids, num_experts, capacity, _ = routing
    num_tokens, top_k = expert_ids.shape
    plan = make_plan(*routing)
    expected = plain_rows(*routing)
    assert rows_of(plan) == expected
    assert (
        plan.counts.tolist() == torch.bincount(expert_ids.flatten(), minlength=num_experts).tolist()
    )
    # The number of rows is known from shapes alone, and holds all that is kept.
    limit = (
        num_tokens * top_k if capacity is None else min(num_tokens * top_k, num_experts * capacity)
    )
    assert len(plan.choices) == limit >= plan.offsets[-1]
    # slots and choices are each other's inverse over the kept choices.
    kept = {choice for rows in expected for choice in rows}
    flags = torch.ones_like(expert_ids, dtype=torch.bool) if plan.kept is None else plan.kept
    assert set(flags.flatten().nonzero().flatten().tolist()) == kept
    slots = plan.slots.flatten()
    assert all(plan.choices[slots[choice]] == choice for choice in kept)
    # of dropped ones too: they are gathered, then masked
    assert all(0 <= slot < max(limit, 1) for slot in slots)
    if capacity is None:
        assert len(kept) == num_tokens * top_k
        assert plan.kept is None


@given(routings())
@settings(deadline=None, max_examples=60)
def test_combine_adds_up_what_dispatch_sent(routing):
    expert_ids, num_experts, capacity, priority = routing
    num_tokens, top_k = expert_ids.shape
    tokens = torch.arange(1.0, num_tokens * 3 + 1).view(num_tokens, 3)
    gates = torch.arange(1.0, num_tokens * top_k + 1).view(num_tokens, top_k)
    plan = make_plan(expert_ids, num_experts, capacity, priority)
    kept = torch.zeros(num_tokens * top_k)
    kept[[choice for rows in plain_rows(*routing) for choice in rows]] = 1
    y = combine(dispatch(tokens, plan), gates, plan)
    torch.testing.assert_close(y, tokens * (gates * kept.view_as(gates)).sum(1, keepdim=True))


# The same three tokens for every way through: two of them want expert 1 first.
EXPERT_IDS = torch.tensor([[1, 0], [1, 2], [0, 1]])


@pytest.mark.parametrize(
    ("capacity", "priority", "rows"),
    [
        (None, None, [[4, 1], [0, 2, 5], [3]]),
        (2, None, [[4, 1], [0, 2], [3]]),  # token 2's second choice finds expert 1 full
        (1, None, [[4], [0], [3]]),  # first choices go before all second ones
        (1, [0.2, 0.9, 0.3], [[4], [2], [3]]),  # token 1 goes first
        (1, [0.5, 0.5, 0.5], [[4], [0], [3]]),  # equal priority keeps the order
        (0, None, [[], [], []]),
        (None, [0.2, 0.9, 0.3], [[4, 1], [2, 0, 5], [3]]),  # another order, nothing dropped
    ],
)
def test_three_tokens_by_hand(capacity, priority, rows):
    priority = None if priority is None else torch.tensor(priority)
    assert rows_of(make_plan(EXPERT_IDS, 3, capacity, priority)) == rows
    assert plain_rows(EXPERT_IDS, 3, capacity, priority) == rows


def test_more_rows_than_32_bits_number():
    ids = torch.empty(2**30, 2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="2\\^31 or more choices"):
        make_plan(ids, 4, None)
