"""The dispatch plan: who gets a row, where, and who is dropped; and its C++ form against the torch
one, number for number."""

# T tokens, E experts, K top-k, N rows

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import make_layer

from moe_core.ops import DispatchPlan, combine, dispatch, make_plan
from moe_core.ops.backend import language
from moe_core.ops.native import library


@st.composite
def routings(draw):
    """expert_ids [T, K] without repeats in a token, E, capacity, priority (with ties)."""
    num_experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, num_experts))
    choices = draw(st.lists(st.permutations(range(num_experts)), max_size=12))
    expert_ids = torch.tensor([c[:top_k] for c in choices], dtype=torch.long).view(-1, top_k)
    capacity = draw(st.none() | st.integers(0, 8))
    level, size = st.sampled_from([0.1, 0.5, 0.9]), len(choices)
    levels = st.lists(level, min_size=size, max_size=size).map(torch.tensor)
    priority = draw(st.none() | levels)
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
@settings(max_examples=100)
def test_plan_follows_the_definition(routing):
    expert_ids, num_experts, capacity, _ = routing
    num_tokens, top_k = expert_ids.shape
    plan = make_plan(*routing)
    expected = plain_rows(*routing)
    assert rows_of(plan) == expected
    assert torch.equal(plan.counts, expert_ids.flatten().bincount(minlength=num_experts))
    # The number of rows is known from shapes alone, and holds all that is kept.
    limit = num_tokens * top_k
    if capacity is not None:
        limit = min(limit, num_experts * capacity)
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
@settings(max_examples=60)
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


# The form in C++

needs_cpp = pytest.mark.skipif(
    library.chosen() is None, reason="this CPU or compiler lacks the instructions"
)


def assert_same_plan(ids, num_experts, capacity, priority) -> None:
    got = make_plan(ids, num_experts, capacity, priority, "auto")
    expected = make_plan(ids, num_experts, capacity, priority, "torch")
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype)


def draw_ids(data) -> tuple[torch.Tensor, int, torch.Generator]:
    """Expert ids [T, K], the number of experts, and what draws the rest."""
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, min(num_experts, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.rand(data.draw(st.integers(0, 70)), num_experts, generator=generator)
    return scores.topk(top_k).indices, num_experts, generator


@needs_cpp
@given(st.data())
@settings(max_examples=60)
def test_plan_equals_torch(data):
    ids, num_experts, generator = draw_ids(data)
    capacity = data.draw(st.none() | st.integers(0, 30))
    priority = torch.randint(5, (len(ids),), generator=generator)  # with ties
    assert_same_plan(ids, num_experts, capacity, data.draw(st.sampled_from([None, priority])))


@needs_cpp
@given(st.data())
@settings(max_examples=60)
def test_plan_with_a_capacity_on_the_device_and_a_priority_for_each_choice(data):
    ids, num_experts, generator = draw_ids(data)
    capacity = torch.tensor(data.draw(st.integers(0, 30)))
    priority = torch.randint(5, ids.shape, generator=generator)
    assert_same_plan(ids, num_experts, capacity, priority)


@needs_cpp
@pytest.mark.parametrize("shape", [(700,), (300, 3), (0,)])
def test_a_priority_in_fp32_orders_as_a_stable_sort(shape):
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-40, -3.0, 0.7])
    values = torch.cat([values, torch.randn(60, generator=generator)])
    priority = values[torch.randint(len(values), shape, generator=generator)]
    ids = torch.randint(4, (shape[0], 1), generator=generator).repeat(1, priority[:1].numel() or 1)
    for one in (priority, priority.nan_to_num(0)):
        assert_same_plan(ids, 4, 40, one)


@needs_cpp
def test_plan_of_many_experts():
    ids = torch.rand(40, 1024, generator=torch.Generator().manual_seed(0)).topk(8).indices
    for capacity in (None, 1):
        assert_same_plan(ids, 1024, capacity, None)


@needs_cpp
def test_what_cannot_be():
    for expert in (-1, 4):
        with pytest.raises(ValueError, match=r"below num_experts \(4\)"):
            make_plan(torch.tensor([[0], [expert]]), 4, None)
    arguments = (torch.tensor([[0], [1]]), 4, 1, None, None, 1, "cpp")
    with pytest.raises(ValueError, match=r"num_rows \(1\) at least"):  # two choices are kept
        torch.ops.moe_core.make_plan(*arguments)


@needs_cpp
def test_ids_and_capacities_in_32_bits():
    ids, capacity = torch.randint(4, (30, 2)), torch.tensor(9)
    expected = make_plan(ids, 4, capacity, kernels="torch")
    found = make_plan(ids.int(), 4, capacity.int())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_cpp
def test_any_strides():
    ids = torch.stack([torch.arange(40) % 4, torch.arange(40) % 3], 0).t()
    assert_same_plan(ids, 4, 9, torch.arange(80).remainder(7)[::2])


@needs_cpp
def test_opcheck():
    ids = torch.arange(14).view(7, 2) % 8
    for limit, device_limit in ((None, None), (2, None), (None, torch.tensor(2))):
        arguments = (ids, 8, limit, device_limit, torch.rand(7), 14, "cpp")
        torch.library.opcheck(torch.ops.moe_core.make_plan.default, arguments)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_equals_the_one_by_torch(dtype):
    outcomes = []
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for kernels in ("auto", "torch"):
        layer = make_layer(dtype=torch.float32, kernels=kernels, top_k=2, batch_prioritized=True)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y, aux_loss = layer(x)
        loss = y.float().square().sum() + aux_loss
        gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
        outcomes.append([y, aux_loss, *gradients, *layer.last_routing])
    # sums of at most 30 * 10 terms near 1: 300 * 6e-8 in fp32; bf16 rounds each value by 4e-3
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*outcomes, rtol=tolerance, atol=tolerance)


@needs_cpp
def test_which_form_runs(monkeypatch, choose_again):
    assert language("auto", "cpu") == "cpp"
    assert language("torch", "cpu") == "torch"
    assert language("auto", "meta") == "torch"
    with pytest.raises(ValueError, match=r"kernels \('cpp'\) must be one of auto, triton, "):
        language("cpp", "cpu")
    monkeypatch.setattr(library, "sets_of_cpu", list)
    choose_again()
    assert language("auto", "cpu") == "torch"
