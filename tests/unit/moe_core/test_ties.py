"""Of equal logits the lowest expert is chosen first, in every form of the router."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_core import MoEConfig, MoELayer
from moe_core.router import route

VALUES = st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf, math.nan])


@st.composite
def logits_and_top_k(draw) -> tuple[torch.Tensor, int]:
    num_tokens, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    rows = [[draw(VALUES) for _ in range(num_experts)] for _ in range(num_tokens)]
    return torch.tensor(rows), draw(st.integers(1, num_experts))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(17, 2), (17, 1), (64, 5), (3, 3)])
def test_equal_logits_go_to_the_experts_of_the_lowest_numbers(num_experts, top_k, kernels):
    layer = MoELayer(
        MoEConfig(32, 8, num_experts, top_k=top_k, kernels=kernels, capacity_factor=0.0)
    )
    layer(torch.zeros(4, 32))
    assert layer.last_routing.counts.tolist() == [4] * top_k + [0] * (num_experts - top_k)


@given(logits_and_top_k())
def test_torch_s_form_chooses_as_a_stable_sort_whatever_the_logits_are(drawn):
    """NaN counts as infinity; each expert comes once."""
    logits, top_k = drawn
    config = MoEConfig(1, 1, logits.shape[1], kernels="torch")
    ids = route(logits, config, top_k, training=False).expert_ids
    keys = logits.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    assert torch.equal(ids, keys.sort(dim=1, descending=True, stable=True).indices[:, :top_k])


def test_probabilities_that_underflow_do_not_tie():
    logits = torch.tensor([[0.0, -900.0, -300.0, -600.0]])
    config = MoEConfig(1, 1, 4, kernels="torch")
    ids = route(logits, config, 4, training=False).expert_ids
    assert ids.tolist() == [[0, 2, 3, 1]]


def test_sigmoids_that_round_to_one_do_not_tie():
    logits = torch.tensor([[20.0, 21.0, 23.0, 22.0]])
    config = MoEConfig(1, 1, 4, kernels="torch", gate_activation="sigmoid")
    ids = route(logits, config, 2, training=False).expert_ids
    assert ids.tolist() == [[2, 3]]
