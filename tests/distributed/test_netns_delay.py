"""The delay of the benchmarks' links: a round trip takes two of them, data stays right, and no
process stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import netns
from delay_switch import DelaySwitch
from netns import Cluster

from moe_core.parallel import calibrate

BENCHMARKS = str(Path(netns.__file__).parent)
LARGE = 2**20  # floats: frames of 64 KiB
ABANDON = f"""
import sys, time
sys.path.append({BENCHMARKS!r})
from netns import Cluster

from moe_core.parallel import calibrate

with Cluster(2, 1, delay_ms=1) as cluster:
    print(cluster._delay_switch._process.pid, flush=True)
    time.sleep(100)
"""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """2 nodes of 1 rank."""
    reason = netns.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(2, 1, rate_mbit=2000) as cluster:
        yield cluster


def round_trip(rank: int, world_size: int) -> tuple[float, bool]:
    """Milliseconds of the fastest of 30 round trips, and whether large data arrives unchanged."""
    ping = torch.zeros(1)
    fastest = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        if rank == 0:
            dist.send(ping, 1)
        dist.recv(ping, 1 - rank)
        if rank == 1:
            dist.send(ping, 0)
        fastest = min(fastest, 1e3 * (time.perf_counter() - start))
    sent = torch.arange(float(LARGE)) + rank
    received = [torch.empty(LARGE) for _ in range(world_size)]
    dist.all_gather(received, sent)
    return fastest, torch.equal(received[1 - rank], torch.arange(float(LARGE)) + 1 - rank)


def test_a_round_trip_takes_two_delays(cluster):
    milliseconds = {}
    for delay in (0, 5, 20):
        cluster.set_delay(delay)
        results = cluster.run(round_trip)
        assert all(is_equal for _, is_equal in results)
        milliseconds[delay] = results[0][0]
        assert milliseconds[delay] >= 2 * delay
    cluster.set_delay(None)
    assert cluster.run(round_trip)[0][1]


def calibrated_delay(rank: int, world_size: int) -> float:
    return calibrate(dist.group.WORLD, 2, "cpu").inter.delay


def test_calibration_finds_the_delay():
    with Cluster(2, 2, delay_ms=40) as cluster:
        assert cluster.run(calibrated_delay)[0] >= 0.04  # at least the data waits


def test_a_delay_that_no_link_has(cluster):
    with pytest.raises(ValueError, match=r"delay_ms \(-1\)"):
        cluster.set_delay(-1)


def test_a_switch_without_its_interface_names_it(cluster):
    with pytest.raises(RuntimeError, match="does not start: delay_switch: absent"):
        DelaySwitch(cluster._switch, ["absent"])


def test_close_ends_the_program():
    with Cluster(2, 1, delay_ms=1) as cluster:
        process = cluster._delay_switch._process
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL


def test_the_program_of_a_killed_owner_ends():
    owner = subprocess.Popen(
        [sys.executable, "-c", ABANDON], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    switch = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{switch}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{switch}").exists()
    netns.remove_abandoned()
    assert not list(netns.NAMESPACES.glob(f"{netns.PREFIX}-{owner.pid}-*"))
