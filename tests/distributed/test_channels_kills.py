"""A killed rank: the others end long before the timeout, and no shared memory stays."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from channel_cases import world

from moe_core.comm import ChannelGroup, Collectives
from moe_core.parallel import CollectiveError

SIZE, LOST, TIMEOUT = 3, 1, timedelta(seconds=600)


class Killer:
    """Kills the lost rank some time after its first call of `start`, wherever it is then."""

    def __init__(self, rank: int, delay: float) -> None:
        self.is_lost, self.delay = rank == LOST, delay
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process as SIGKILL does

    def start(self) -> None:
        if self.is_lost and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, self.delay)


def put_for_ever(rank: int, killer: Killer) -> None:
    """The lost rank is killed in a put of 16 MiB."""
    group = ChannelGroup(world(), 2**24, TIMEOUT)
    killer.start()
    source = torch.zeros(2**24, dtype=torch.uint8)
    while rank == LOST:
        group.channel(0).put(0, source)
    group.channel(LOST).wait()
    while True:
        group.barrier()


def wait_for_ever(rank: int, killer: Killer) -> None:
    """The lost rank is killed while it waits."""
    group = ChannelGroup(world(), 64, TIMEOUT)
    killer.start()
    if rank == LOST:
        group.channel(0).wait()
    group.barrier()


def exchange_for_ever(rank: int, killer: Killer) -> None:
    """The lost rank is killed somewhere in an exchange of several pieces, or between two."""
    collectives = Collectives(world(), TIMEOUT)
    rows = torch.zeros(SIZE * 300_000)
    while True:
        collectives.all_to_all(rows)
        killer.start()


def meet_for_ever(rank: int, killer: Killer) -> None:
    """The lost rank is killed while groups are made."""
    while True:
        group = ChannelGroup(world(), 64, TIMEOUT)
        killer.start()
        group.barrier()


SCENARIOS = [put_for_ever, wait_for_ever, exchange_for_ever, meet_for_ever]


def run_scenario(rank: int, scenario, delay: float) -> tuple[str, int]:
    """The error, and the id of the process."""
    with pytest.raises(CollectiveError) as error:
        scenario(rank, Killer(rank, delay))
    return str(error.value), os.getpid()


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


def check_kill(run_processes, scenario, delay: float) -> None:
    names = set(os.listdir("/dev/shm"))
    # the others have to be told long before their timeout, and have to end
    results = run_processes(run_scenario, SIZE, scenario, delay, ending=[LOST], seconds=240)
    for message, _ in (results[0], results[2]):
        assert "\n" not in message
        assert "has ended" in message or "may have ended" in message, message
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "moe" in name]
    assert processes_with_memory_of(results[0][1]) == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_others_end_with_one_line_and_nothing_stays(run_processes, scenario):
    check_kill(run_processes, scenario, 0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_many_kills(run_processes, scenario):
    for number in range(25):
        check_kill(run_processes, scenario, 0.001 + 0.01 * number)
