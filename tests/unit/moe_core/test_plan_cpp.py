"""The dispatch plan in C++ against the torch form, number for number."""

# T tokens, E experts, K top-k

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import make_layer

from moe_core.ops import make_plan
from moe_core.ops.backend import Request, select
from moe_core.ops.native import library

pytestmark = pytest.mark.skipif(
    not library.usable(torch.float32), reason="this CPU or compiler lacks the instructions"
)
OPS = torch.ops.moe_core


def assert_same_plan(ids, num_experts, capacity, priority, num_rows: int | None = None) -> None:
    got = make_plan(ids, num_experts, capacity, priority, "auto", num_rows)
    expected = make_plan(ids, num_experts, capacity, priority, "torch", num_rows)
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


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_plan_equals_torch(data):
    ids, num_experts, generator = draw_ids(data)
    capacity = data.draw(st.none() | st.integers(0, 30))
    priority = torch.randint(5, (len(ids),), generator=generator)  # with ties
    assert_same_plan(ids, num_experts, capacity, data.draw(st.sampled_from([None, priority])))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_plan_with_a_capacity_for_each_expert_and_a_priority_for_each_choice(data):
    ids, num_experts, generator = draw_ids(data)
    limits = torch.randint(30, (num_experts,), generator=generator)
    priority = torch.randint(5, ids.shape, generator=generator)
    kept = torch.minimum(ids.flatten().bincount(minlength=num_experts), limits).sum()
    assert_same_plan(ids, num_experts, limits, priority, int(kept) + data.draw(st.integers(0, 9)))


def test_plan_of_many_experts():
    ids = torch.rand(40, 1024, generator=torch.Generator().manual_seed(0)).topk(8).indices
    for capacity in (None, 1):
        assert_same_plan(ids, 1024, capacity, None)


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_that_does_not_exist(expert):
    with pytest.raises(ValueError, match=r"below num_experts \(4\)"):
        make_plan(torch.tensor([[0], [expert]]), 4, None)


def test_ids_and_capacities_in_32_bits():
    ids, capacity = torch.randint(4, (30, 2)), torch.tensor([3, 0, 9, 2])
    expected = make_plan(ids, 4, capacity, kernels="torch", num_rows=20)
    found = make_plan(ids.int(), 4, capacity.int(), num_rows=20)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_any_strides():
    ids = torch.stack([torch.arange(40) % 4, torch.arange(40) % 3], 0).t()
    assert_same_plan(ids, 4, 9, torch.arange(80).remainder(7)[::2])


def test_fewer_rows_than_choices_that_are_kept():
    with pytest.raises(ValueError, match=r"num_rows \(1\) at least"):
        make_plan(torch.tensor([[0], [1]]), 4, torch.tensor([1, 1, 1, 1]), num_rows=1)


@pytest.mark.parametrize("capacity", [None, 2])
def test_opcheck(capacity):
    ids = torch.arange(14).view(7, 2) % 8
    limits = None if capacity is None else ids.new_full((8,), capacity)
    torch.library.opcheck(OPS.make_plan.default, (ids, 8, limits, torch.rand(7), 14, "plan.cpp"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [{"capacity_factor": 0.0}, {"top_k": 2, "batch_prioritized": True}], ids=str
)
def test_layer_equals_the_one_by_torch(config, dtype):
    outcomes = []
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for kernels in ("auto", "torch"):
        layer = make_layer(dtype=torch.float32, kernels=kernels, **config)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y, aux_loss = layer(x)
        gradients = torch.autograd.grad(
            y.float().square().sum() + aux_loss, [x, *layer.parameters()]
        )
        outcomes.append([y, aux_loss, *gradients, *layer.last_routing])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*outcomes, rtol=tolerance, atol=tolerance)


def test_which_form_runs(monkeypatch):
    def form(kernels: str, device: str) -> str:
        return select("plan", Request(kernels, device, torch.int64))

    assert form("auto", "cpu") == "plan.cpp"
    assert form("torch", "cpu") == "plan.reference"
    assert form("auto", "meta") == "plan.reference"
    with pytest.raises(ValueError, match=r"kernels \('cpp'\) must be one of auto, triton, torch"):
        form("cpp", "cpu")
    monkeypatch.setattr(library, "sets_of_cpu", list)
    library.chosen.cache_clear()
    try:
        assert form("auto", "cpu") == "plan.reference"
    finally:
        library.chosen.cache_clear()
