"""The choice of experts: ties, and logits that are no numbers."""

import pytest
import torch

from moe_core.ops import route


def chosen(logits: torch.Tensor, top_k: int) -> list[list[int]]:
    _, ids, _, _ = route(logits, logits, top_k, False, "none", 0.0)
    return ids.tolist()


def test_of_equal_logits_the_lowest_index_is_chosen():
    inf = torch.inf
    logits = torch.tensor([[0.0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [-inf, -inf, 0, -inf, 0]])
    orders = [[1, 2, 3, 0, 4], [0, 1, 2, 3, 4], [2, 4, 0, 1, 3]]
    for top_k in range(1, 6):
        assert chosen(logits, top_k) == [order[:top_k] for order in orders]


def test_nan_is_the_largest():
    logits = torch.tensor([[0.0, torch.nan, torch.inf, 5.0], [0.0, torch.inf, torch.nan, 5.0]])
    assert chosen(logits, 4) == [[1, 2, 3, 0], [1, 2, 3, 0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("first", [0, 2])
def test_logits_that_are_no_numbers_choose_experts_that_exist(first, value):
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    logits[7, first:] = value
    ids = chosen(logits, 3)
    assert all(len(set(row)) == 3 for row in ids)
    assert all(0 <= e < 5 for row in ids for e in row)
    is_other = torch.arange(40) != 7
    others = [row for t, row in enumerate(ids) if t != 7]
    assert others == chosen(logits[is_other], 3)
