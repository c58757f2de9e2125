"""What one rank finds wrong with the data, on its own disk perhaps, ends the run on all of them, at
once."""

import errno
import io
import multiprocessing
import signal
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from moe_core.parallel import CollectiveError
from swinv2_moe.commands.call import run_command
from swinv2_moe.commands.faults import explain_fault
from swinv2_moe.config import data_config
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.ranks.world import (
    World,
    _compare_sizes,
    _of_this_attempt,
    _why_not_joined,
)
from swinv2_moe.train.arrival import load_data


@dataclass(frozen=True)
class WithAnother(World):
    """Rank 0 of two, the second of which gives `others` in turn where ranks gather."""

    others: list = field(default_factory=list)

    def gather(self, value: object) -> list:
        return [value, self.others.pop(0)]


def world(*others: object) -> WithAnother:
    return WithAnother(0, 2, torch.device("cpu"), others=list(others))


def fail() -> None:
    raise UserError("no index")


def test_an_error_of_one_rank_is_every_ranks():
    assert world(None).on_every_rank(lambda: 3) == 3
    with pytest.raises(UserError, match=r"^no index \(rank 1\)$"):
        world("no index").on_every_rank(lambda: 3)
    with pytest.raises(UserError, match=r"^no index \(rank 0\)$"):
        world(None).on_every_rank(fail)
    with pytest.raises(UserError, match=r"^no index$"):
        world("no index").on_every_rank(fail)


def test_other_data_on_another_rank(make_config, tmp_path):
    config = data_config(make_config(tmp_path))
    sources = load_sources(config)
    message = r"rank 1 finds 24 \+ 6 images there, rank 0 160 \+ 40; their number and"
    with pytest.raises(UserError, match=message):
        load_data(config, sources, world(None, ("24 + 6", "names")), None, ExitStack())
    others = [("160 + 40", "other names"), ["0", "zero"]]
    with pytest.raises(UserError, match="class 1 is '1' on rank 0, 'zero' on rank 1"):
        load_data(config, sources, world(None, *others), None, ExitStack())


def test_ranks_that_were_told_different_sizes_say_so():
    store = HashStore()
    store.set("WORLD_SIZE/1", "3")
    message = r"^WORLD_SIZE is 2 on rank 0 \(.*\) and 3 on rank 1: start all ranks with the same$"
    with pytest.raises(CollectiveError, match=message):
        _compare_sizes(store, 0, 2)
    with pytest.raises(CollectiveError, match=r"WORLD_SIZE is 3 on rank 1 .* and 2 on rank 0"):
        _compare_sizes(store, 1, 3)
    store.set("WORLD_SIZE/1", "2")
    _compare_sizes(store, 0, 2)


@pytest.mark.parametrize(
    ("nodes", "agents_store", "is_shared"),
    [("1", "True", False), ("2", "True", True), ("1", "False", True)],
)
def test_restarted_ranks_do_not_read_the_addresses_of_those_before(
    nodes, agents_store, is_shared, monkeypatch
):
    """The store of torchrun on one node; over several nodes the counts may differ."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agents_store)
    kept = HashStore()
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        first, second = _of_this_attempt(kept), _of_this_attempt(kept)
        assert first.check(["address"]) == (is_shared and attempt == "1")
        first.set("address", attempt)
        assert second.get("address").decode() == attempt


def test_ranks_that_do_not_meet_after_a_restart_say_what_helps(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt, says in (("0", "a rank may have ended"), ("1", "_SHARE_RDZV_TCP_STORE=1 (refus")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert says in _why_not_joined(RuntimeError("refused"), "in time")


def test_a_rank_that_no_launcher_ends_prints_its_error(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        run_command(fail)
    assert capsys.readouterr().err == "error: no index (rank 1)\n"


def test_workers_that_ignore_signals_do_not_keep_a_failed_command(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    worker = multiprocessing.get_context("fork").Process(target=signal.sigwait, args=([40],))
    worker.start()
    with pytest.raises(SystemExit):
        run_command(Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL


def test_a_long_message_is_searched_at_its_ends():
    """With the square of the length a search of these 3 MB would take hours: the suite's
    timeout."""
    long = "DataLoader worker No space left " * 100_000
    assert explain_fault(ValueError(long)).startswith("the disk is full")
    assert explain_fault(ValueError(f"{'x' * 3_000_000} bad_alloc")).startswith("memory has run")
