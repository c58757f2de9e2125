"""The choice of experts: of equal logits the lowest expert comes first, in every form of the
router; NaN counts as infinity."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_core import MoEConfig, MoELayer, ops
from moe_core.ops.route.reference import route_and_sums
from moe_core.routing import route_by_tokens

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
    ids = route_by_tokens(logits, config, top_k, training=False).expert_ids
    keys = logits.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    assert torch.equal(ids, keys.sort(dim=1, descending=True, stable=True).indices[:, :top_k])


def test_probabilities_that_underflow_do_not_tie():
    logits = torch.tensor([[0.0, -900.0, -300.0, -600.0]])
    config = MoEConfig(1, 1, 4, kernels="torch")
    ids = route_by_tokens(logits, config, 4, training=False).expert_ids
    assert ids.tolist() == [[0, 2, 3, 1]]


def test_sigmoids_that_round_to_one_do_not_tie():
    logits = torch.tensor([[20.0, 21.0, 23.0, 22.0]])
    config = MoEConfig(1, 1, 4, kernels="torch", gate_activation="sigmoid")
    ids = route_by_tokens(logits, config, 2, training=False).expert_ids
    assert ids.tolist() == [[2, 3]]


def chosen(logits: torch.Tensor, top_k: int) -> list[list[int]]:
    settings = ops.RouteSettings(top_k, False, "none", 0.0, 0.0)
    return ops.route(logits, None, settings).ids.tolist()


def test_of_equal_logits_the_lowest_index_is_chosen():
    inf = torch.inf
    logits = torch.tensor([[0.0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [-inf, -inf, 0, -inf, 0]])
    orders = [[1, 2, 3, 0, 4], [0, 1, 2, 3, 4], [2, 4, 0, 1, 3]]
    for top_k in range(1, 6):
        assert chosen(logits, top_k) == [order[:top_k] for order in orders]


def test_nan_is_the_largest():
    logits = torch.tensor([[0.0, torch.nan, torch.inf, 5.0], [0.0, torch.inf, torch.nan, 5.0]])
    assert chosen(logits, 4) == [[1, 2, 3, 0], [1, 2, 3, 0]]


def test_logits_that_are_no_numbers_choose_experts_that_exist():
    for value in (float("nan"), float("inf"), -float("inf")):
        for first in (0, 2):
            logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
            logits[7, first:] = value
            ids = chosen(logits, 3)
            assert all(len(set(row)) == 3 for row in ids)
            assert all(0 <= e < 5 for row in ids for e in row)
            is_other = torch.arange(40) != 7
            assert ids[:7] + ids[8:] == chosen(logits[is_other], 3)


def test_importance_is_of_the_logits_without_noise():
    noisy, clean = torch.randn(2, 9, 4, dtype=torch.float64)
    _, _, sums = route_and_sums(noisy, clean, 2, False, "load_importance", 0.25)
    torch.testing.assert_close(sums[0], clean.softmax(1).sum(0))
