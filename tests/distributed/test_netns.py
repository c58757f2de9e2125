"""The benchmarks' cluster of network namespaces: what crosses nodes is counted and slowed, and
nothing stays behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import netns
from netns import Cluster, node_bytes_sent

MIB = 2**20
PAYLOAD = 2 * MIB  # of a rank, to all ranks
HEADERS = 1.25  # and what TCP sends twice
SET_UP = 100_000  # bytes of store and connections


def ours() -> list[Path]:
    return list(netns.NAMESPACES.glob(f"{netns.PREFIX}-{os.getpid()}-*"))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """2 nodes of 2 ranks."""
    reason = netns.unavailable()
    if reason is not None:
        pytest.skip(reason)
    links = os.listdir("/sys/class/net")
    with Cluster(2, 2) as cluster:
        assert len(ours()) == 3  # with the switch
        yield cluster
    assert not ours()
    assert os.listdir("/sys/class/net") == links


def exchange(rank: int, world_size: int) -> tuple[float, int, bool]:
    """Seconds of an exchange among all ranks, what this node sent meanwhile, and whether the right
    data came."""
    x = torch.full((world_size, PAYLOAD // world_size // 4), float(rank))
    y = torch.empty_like(x)
    dist.all_to_all_single(torch.empty(world_size), torch.zeros(world_size))
    sent = node_bytes_sent()
    dist.barrier()
    start = time.perf_counter()
    dist.all_to_all_single(y, x)
    dist.barrier()
    seconds = time.perf_counter() - start
    return seconds, node_bytes_sent() - sent, torch.equal(y[:, 0], torch.arange(float(world_size)))


def exchange_inside(rank: int, world_size: int) -> float:
    """Seconds of an exchange among the ranks of each node."""
    x = torch.full((2 * PAYLOAD // 4,), float(rank))
    y = torch.empty_like(x)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[int(os.environ["GROUP_RANK"])]
    dist.barrier(group=group)
    start = time.perf_counter()
    dist.all_to_all_single(y, x, group=group)
    assert y[-1] == rank - rank % 2 + 1  # the second half is from the second rank of this node
    return time.perf_counter() - start


def torchruns_variables(rank: int, world_size: int) -> str:
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return "".join(os.environ[name] for name in names)


def fails_alone(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("a message from rank 1")
    dist.barrier()


def is_killed(rank: int, world_size: int) -> None:
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs(rank: int, world_size: int) -> None:
    time.sleep(100 * (rank == 2))


def test_ranks_are_numbered_node_by_node(cluster):
    assert cluster.run(torchruns_variables) == ["04002", "14012", "24102", "34112"]


def test_what_crosses_nodes_is_counted_and_its_rate_limited(cluster):
    across = 2 * PAYLOAD // 2  # from either node: two ranks send half of their payload to the other
    cluster.set_rate(20)
    before = cluster.bytes_sent()
    results = cluster.run(exchange)
    assert all(right for _, _, right in results)
    assert all(0.9 * across < sent < HEADERS * across for _, sent, _ in results)
    for start, end in zip(before, cluster.bytes_sent(), strict=True):
        assert across < end - start < HEADERS * across + SET_UP
    assert max(seconds for seconds, _, _ in results) > 0.7 * 8 * across / 20e6


def test_what_stays_inside_a_node_is_not_counted(cluster):
    cluster.set_rate(10)
    before = cluster.bytes_sent()
    cluster.run(exchange_inside)
    assert (
        max(end - start for start, end in zip(before, cluster.bytes_sent(), strict=True)) < SET_UP
    )
    cluster.set_rate(None)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (fails_alone, r"(?s)rank 1 of 4 failed.*in fails_alone.*a message from rank 1"),
        (is_killed, "rank 3 of 4 failed: its process ended without a result"),
    ],
)
def test_the_first_failure_is_told_and_nobody_waits_for_the_others(cluster, function, error):
    with pytest.raises(RuntimeError, match=error):
        cluster.run(function, timeout=600)  # longer than a test may take


def test_a_killed_rank_is_named_though_another_tells_of_it_first():
    pipes, ends = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(3)), strict=True)
    ends[0].send((time.monotonic(), "connection reset by peer", None))
    killed = threading.Timer(0.2, ends[2].close)
    killed.start()
    with pytest.raises(RuntimeError, match="rank 2 of 3 failed: its process ended"):
        netns._collect(list(pipes), time.monotonic() + 30)
    killed.join()


def test_running_out_of_time_names_the_ranks(cluster):
    with pytest.raises(TimeoutError, match=r"ranks \[.*2.*\] of 4 still run"):
        cluster.run(hangs, timeout=2)


def test_the_next_cluster_removes_what_a_killed_one_left():
    owner = subprocess.Popen(["true"])
    owner.wait()
    name = f"{netns.PREFIX}-{owner.pid}-000000-node0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    left = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "100"])
    time.sleep(0.2)  # for the sleep to be in there
    netns.remove_abandoned()
    assert left.wait(timeout=5) == -signal.SIGKILL
    assert not (netns.NAMESPACES / name).exists()


def test_an_exception_or_a_wrong_argument_leaves_nothing():
    before = set(ours())
    with pytest.raises(KeyboardInterrupt), Cluster(2, 1):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"rate_mbit \(-1\)"), Cluster(2, 1, rate_mbit=-1):
        pass  # found out once the links are there
    with pytest.raises(ValueError, match=r"nodes \(0\)"):
        Cluster(0, 2)
    assert set(ours()) == before


def test_a_script_without_the_means_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(netns.shutil, "which", lambda tool: None)
    with pytest.raises(SystemExit) as stop:
        netns.require()
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
