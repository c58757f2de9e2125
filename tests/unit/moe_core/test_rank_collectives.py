"""Collectives of one rank, the errors of those that fail, and the names of groups of ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moe_core.parallel import CollectiveError, Ranks
from moe_core.parallel.groups import _ranks_name

ALONE = Ranks(None, "rank 0 of 1", "within TIMEOUT")


def test_one_rank_needs_no_torch_distributed():
    values = torch.arange(3)
    assert ALONE.size == 1
    assert ALONE.all_reduce(values, "sum") is values
    assert ALONE.broadcast(values, "broadcast") is values
    assert ALONE.max(7, torch.device("cpu")) == 7
    assert ALONE.gather_objects("a", "gathering") == ["a"]
    (gathered,) = ALONE.gather_to_first(values, "gathering")
    assert gathered is values
    ALONE.barrier(torch.device("cpu"))
    ALONE.start_all_reduce(values, "sum")()
    assert values.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("reset"),
        RuntimeError("[gloo/pair.cc:1] timed out"),
        RuntimeError("Application timeout caused pair closure"),
    ],
)
def test_a_collective_that_fails_is_named(error):
    message = r"^the sum failed on rank 0 of 1: another process may have ended, or not"
    with pytest.raises(CollectiveError, match=message) as caught, ALONE.named_errors("the sum"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("gloo"), CollectiveError("gloo: named")]
)
def test_other_errors_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, ALONE.named_errors("the sum"):
        raise error
    assert caught.value is error


def test_ranks_are_named():
    for ranks, name in (
        ([3], "3"), ([0, 1, 2, 3], "0-3"), ([1, 9, 17, 25], "1-25 by 8"), ([4, 5], "4-5")
    ):  # fmt: skip
        assert _ranks_name(ranks) == name


def test_inside_of_join_the_error_names_the_way_out(monkeypatch):
    ranks = Ranks(None, "rank 0 of 1")
    for is_enabled in (True, False):
        parallel = SimpleNamespace(_join_config=SimpleNamespace(enable=is_enabled))
        monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", parallel)
        with pytest.raises(CollectiveError) as caught, ranks.named_errors("exchange"):
            raise dist.DistError("no answer")
        assert ("throw_on_early_termination=True" in str(caught.value)) == is_enabled
