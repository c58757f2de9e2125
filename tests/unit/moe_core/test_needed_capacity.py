"""The needed capacity factor, and what a call may set instead of the configuration."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_cases import make_layer

from moe_core.capacity import expert_capacity, needed_capacity_factor
from moe_core.export import StandardMoE

# counts that add up to T * K: each expert has at most T choices
tokens_and_top_k = st.tuples(st.integers(1, 300), st.integers(1, 4))


def dropped(counts: torch.Tensor, capacity: int) -> int:
    return int((counts - capacity).clamp(min=0).sum())


@given(tokens_and_top_k, st.integers(4, 12), st.sampled_from([0.0, 0.01, 0.1, 0.5]), st.data())
def test_the_smallest_that_drops_at_most_the_share(shape, num_experts, share, data):
    num_tokens, top_k = shape
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    skew = torch.linspace(0, data.draw(st.sampled_from([0, 3])), num_experts)
    logits = torch.randn(num_tokens, num_experts, generator=generator) + skew
    counts = logits.topk(top_k).indices.flatten().bincount(minlength=num_experts)
    factor = needed_capacity_factor(counts, top_k, share).float().item()  # as a step reads it
    capacity = expert_capacity(num_tokens, num_experts, top_k, factor)
    assert factor > 0
    allowed = share * num_tokens * top_k + 1e-6
    assert dropped(counts, capacity) <= allowed
    if capacity:  # capacities are multiples of K
        assert dropped(counts, capacity - top_k) > allowed


def test_by_hand():
    counts = torch.tensor([6, 2, 0, 0])  # S = 2
    assert needed_capacity_factor(counts, 1).item() == pytest.approx(6.25 / 2)
    assert needed_capacity_factor(counts, 1, 0.25).item() == pytest.approx(4.25 / 2)
    assert needed_capacity_factor(counts, 2).item() == pytest.approx(3.25 / 1)  # T = 4, S = 1
    assert needed_capacity_factor(counts, 1, 1.0).item() == pytest.approx(0.25 / 2)


@pytest.mark.parametrize("top_k", [1, 2])
def test_of_a_layer(top_k):
    layer = make_layer(top_k=top_k, capacity_factor=0.5)
    x = torch.randn(37, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer(x)
    assert layer.last_routing.dropped_share > 0
    needed = float(layer.last_routing.needed_factor)
    assert needed == float(layer.needed_capacity_factor())
    layer(x, capacity_factor=needed)
    assert layer.last_routing.dropped_share == 0
    layer(x, capacity_factor=float(layer.needed_capacity_factor(0.2)))
    assert 0 < layer.last_routing.dropped_share <= 0.2


@pytest.mark.parametrize("configured", [True, False])
def test_batch_prioritized_per_call(configured):
    options = {"capacity_factor": 0.5, "batch_prioritized": configured}
    layer = make_layer(**options)
    other = make_layer(capacity_factor=0.5, batch_prioritized=not configured)
    x = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = other(x)[0]
    assert not torch.equal(layer(x)[0], expected)
    assert torch.equal(layer(x, batch_prioritized=not configured)[0], expected)
    exported = StandardMoE(layer.eval(), 0.5, batch_prioritized=not configured)
    torch.testing.assert_close(exported(x), expected)


def test_a_factor_as_a_tensor():
    layer = make_layer()
    x = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for factor in (0.3, 1.25, -0.7):
        tensor = torch.tensor(factor, dtype=torch.float64)
        assert torch.equal(layer(x, capacity_factor=tensor)[0], layer(x, capacity_factor=factor)[0])
