"""Staging on several nodes: each process is a node with a directory of its own."""

import functools
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from gloo_processes import Processes, patches

from moe_core.parallel import Ranks
from swinv2_moe import tables
from swinv2_moe.commands import run
from swinv2_moe.data.prepare import shard_exchange
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.prepare.shard_exchange import ShardExchange
from swinv2_moe.data.prepare.staging import stage
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import ImageArrays, Sources
from swinv2_moe.errors import UserError

CHUNK = 7001  # bytes: shards take several steps, and the last one of each is a part


@pytest.fixture
def made(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tables.TransferBar, "start", lambda self: None)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 16, 16, 3), dtype=np.uint8)
    source = ImageArrays("noise", pixels, np.arange(60) % 4)
    sources = Sources(source, source, list("abcd"))
    make_shards(sources, str(tmp_path / "shards"), ShardOptions(shard_mb=0.02), 1)
    return tmp_path / "shards"


def exchange_of(rank: int) -> ShardExchange:
    shard_exchange._CHUNK = CHUNK
    tables.TransferBar.start = lambda self: None
    return ShardExchange(Ranks(dist.group.WORLD, f"node {rank} of {dist.get_world_size()}"))


def content(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "staging.json"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def size_of(content: dict[str, bytes]) -> int:
    return sum(len(data) for name, data in content.items() if name != "index.json")


def stage_at_nodes(rank: int, made: Path, locals_: Path) -> None:
    exchange = exchange_of(rank)
    target = locals_ / str(rank)
    done = stage(str(made), str(target), 2, exchange=exchange)
    whole = content(made)
    assert content(target) == whole
    assert len(load_shards(str(target)).train) == 60
    size = size_of(whole)
    assert done.bytes == size
    from_source = exchange.gather(done.source_bytes)
    assert sum(from_source) == size
    # shards are equal but for the last, so that the parts differ by about one
    assert max(from_source) - min(from_source) < 3 * 20_000, from_source
    again = stage(str(made), str(target), 2, exchange=exchange)
    assert (again.bytes, again.source_bytes, again.kept) == (0, 0, len(whole) - 1)


@pytest.mark.parametrize("nodes", [2, 4])
def test_each_node_has_all_and_the_source_is_read_once(run_processes, made, tmp_path, nodes):
    run_processes(stage_at_nodes, nodes, made, tmp_path / "local")


def stage_what_is_missing(rank: int, made: Path, locals_: Path) -> None:
    exchange = exchange_of(rank)
    whole = content(made)
    names = sorted(set(whole) - {"index.json"})
    for trial in range(6):
        # what the nodes have, some of it damaged; each node draws all
        drawn = random.Random(trial)
        share = drawn.choice([0.2, 0.5, 0.9])
        had: list[set[str]] = []
        for node in range(dist.get_world_size()):
            target = locals_ / f"{trial}-{node}"
            intact = set()
            for name in names:
                if drawn.random() > share:
                    continue
                damaged = drawn.random() < 0.2
                if not damaged:
                    intact.add(name)
                if node == rank:
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    last = bytes([(whole[name][-1] + damaged) % 256])
                    (target / name).write_bytes(whole[name][:-1] + last)
            had.append(intact)
        target = locals_ / f"{trial}-{rank}"
        done = stage(str(made), str(target), 2, exchange=exchange)
        assert content(target) == whole
        assert done.bytes == sum(len(whole[name]) for name in set(names) - had[rank])
        nowhere = set(names) - set().union(*had)
        assert sum(exchange.gather(done.source_bytes)) == sum(len(whole[n]) for n in nowhere)


def test_what_a_node_has_is_not_read_from_the_source(run_processes, made, tmp_path):
    run_processes(stage_what_is_missing, 3, made, tmp_path / "local")


def stage_and_fail(rank: int, made: Path, locals_: Path, how: str) -> None:
    exchange = exchange_of(rank)
    target = locals_ / str(rank)
    source = made
    if how == "other" and rank == 1:
        target.mkdir(parents=True)
        (target / "index.json").write_text("{}")
    if how == "another source" and rank == 1:
        source = locals_ / "another"
        shutil.copytree(made, source)
        index = source / "index.json"
        index.write_text(index.read_text().replace('"seed": 0', '"seed": 1'))
    if how == "full" and rank == 1:
        usage = shutil.disk_usage(made)
        patches.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    if how == "locked" and rank == 1:
        (target / "train").mkdir(parents=True)
        (target / "train/000002.tar").mkdir()  # cannot be replaced by a file
    with pytest.raises(UserError) as caught:
        stage(str(source), str(target), 2, exchange=exchange)
    message = str(caught.value)
    if how != "another source":  # whose path is in the message
        assert exchange.gather(message) == [message] * dist.get_world_size()
    expected = {
        "damaged": "shards/train/000001.tar: is damaged: its size or checksum is not the one that"
        " index.json records (node ",
        "other": "it holds other shards than",
        "another source": "node 1 sees other shards there than node 0",
        "full": "0 MB are free (node 1)",
        "locked": "train/000002.tar",
    }
    assert expected[how] in message, message
    assert not (target / "index.json").exists() or how == "other"
    assert not [name for name in content(target) if name.endswith(".tmp")]


@pytest.mark.parametrize("how", ["damaged", "other", "another source", "full", "locked"])
def test_a_problem_of_one_node_is_raised_on_all(run_processes, made, tmp_path, how):
    if how == "damaged":
        bad = made / "train/000001.tar"
        whole = bad.read_bytes()
        bad.write_bytes(whole[:-600] + bytes([1]) + whole[-599:])
    run_processes(stage_and_fail, 2, made, tmp_path / "local", how)


def receive_damaged(rank: int, made: Path, locals_: Path) -> None:
    exchange = exchange_of(rank)
    target = locals_ / str(rank)
    if rank == 0:
        # of the right size: --trust sends it, and the other node compares
        (target / "val").mkdir(parents=True)
        shutil.copy(made / "val/000001.tar", target / "val/000000.tar")
    with pytest.raises(UserError, match=r"arrived damaged from node 0.* \(node 1\)$"):
        stage(str(made), str(target), 2, trust=True, exchange=exchange)
    assert not (locals_ / "1/val/000000.tar").exists()


def test_what_a_neighbour_sends_is_compared(run_processes, made, tmp_path):
    assert (made / "val/000000.tar").stat().st_size == (made / "val/000001.tar").stat().st_size
    run_processes(receive_damaged, 2, made, tmp_path / "local")


def stage_command(made: Path, locals_: Path, per_node: str) -> None:
    """Each process takes its own directory, as each node has its own disk."""
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    sys.argv = ["stage", str(made), str(locals_ / os.environ["RANK"])]
    run("stage")


@pytest.mark.parametrize("per_node", ["1", "2"])
def test_the_command(made, tmp_path, per_node):
    function = functools.partial(stage_command, made, tmp_path / "local", per_node)
    outcomes = Processes(2, tmp_path, function).wait()
    if per_node == "2":
        assert [outcome.status for outcome in outcomes] == [2, 2]
        message = "--nproc-per-node is 2, it must be 1: stage has one process on each node"
        assert all(message in outcome.err for outcome in outcomes)
        return
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert all(f"of them from {made}" in outcome.out for outcome in outcomes)
    assert content(tmp_path / "local" / "1") == content(made)
