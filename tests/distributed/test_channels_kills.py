"""A killed rank: the others end long before the timeout, and no shared memory stays."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_core.comm import ChannelGroup, Collectives
from moe_core.parallel import CollectiveError, Ranks

SIZE, LOST, TIMEOUT = 3, 1, 600
SLACK = 60  # seconds that a busy machine may take


def world() -> Ranks:
    process_group = dist.group.WORLD
    return Ranks(process_group, f"rank {process_group.rank()} of {process_group.size()}")


def put_for_ever(rank: int, ready: Path) -> None:
    """The lost rank is killed in a put of 16 MiB."""
    group = ChannelGroup(world(), 2**24, timedelta(seconds=TIMEOUT))
    ready.touch()
    source = torch.zeros(2**24, dtype=torch.uint8)
    while rank == LOST:
        group.channel(0).put(0, source)
    group.channel(LOST).wait()
    while True:
        group.barrier()


def wait_for_ever(rank: int, ready: Path) -> None:
    """The lost rank is killed while it waits."""
    group = ChannelGroup(world(), 64, timedelta(seconds=TIMEOUT))
    if rank == LOST:
        ready.touch()
        group.channel(0).wait()
    group.barrier()


def exchange_for_ever(rank: int, ready: Path) -> None:
    """The lost rank is killed somewhere in an exchange of several pieces, or between two."""
    collectives = Collectives(world(), timedelta(seconds=TIMEOUT))
    rows = torch.zeros(SIZE * 300_000)
    while True:
        collectives.all_to_all(rows)
        ready.touch()


def meet_for_ever(rank: int, ready: Path) -> None:
    """The lost rank is killed while groups are made."""
    for _ in range(10**9):
        group = ChannelGroup(world(), 64, timedelta(seconds=TIMEOUT))
        ready.touch()
        group.barrier()


SCENARIOS = [put_for_ever, wait_for_ever, exchange_for_ever, meet_for_ever]


def run_rank(rank: int, scenario, directory: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store, rank=rank, world_size=SIZE, timeout=limit)
    start = time.monotonic()
    try:
        scenario(rank, directory / f"ready {rank}")
    except CollectiveError as error:
        (directory / f"{rank}").write_text(f"{time.monotonic() - start} {error}")


def kill_one(scenario, directory: Path, delay: float) -> tuple[list[str], int]:
    """Kill the lost rank `delay` seconds after its start.

    Returns:
        The others' messages, and the process id of rank 0.
    """
    processes = mp.start_processes(
        run_rank, (scenario, directory), SIZE, join=False, start_method="forkserver"
    ).processes
    try:
        deadline = time.monotonic() + 60
        while not (directory / f"ready {LOST}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(delay)
        os.kill(processes[LOST].pid, signal.SIGKILL)
        killed = time.monotonic()
        for process in processes:
            process.join(max(0, killed + SLACK - time.monotonic()))
        assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    others = [rank for rank in range(SIZE) if rank != LOST]
    return [(directory / str(rank)).read_text() for rank in others], processes[0].pid


def processes_with_memory_of(pid: int) -> list[str]:
    """The processes that still map the anonymous files that a process made."""
    mapped = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"moe_core.comm.{pid} " in (process / "maps").read_text():
                mapped.append(process.name)
        except OSError:  # ended, or of another user
            continue
    return mapped


def check_kill(scenario, directory: Path, delay: float) -> None:
    names = set(os.listdir("/dev/shm"))
    messages, pid = kill_one(scenario, directory, delay)
    for message in messages:
        assert "\n" not in message
        assert "has ended" in message or "has another one ended" in message, message
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "moe" in name]
    assert processes_with_memory_of(pid) == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_others_end_with_one_line_and_nothing_stays(scenario, tmp_path):
    check_kill(scenario, tmp_path, 0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_hundred_kills(scenario, tmp_path):
    for number in range(25):
        directory = tmp_path / str(number)
        directory.mkdir()
        check_kill(scenario, directory, 0.01 * number)
