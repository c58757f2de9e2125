"""Memory channels between processes: order, bounds, timeouts, and nothing that stays behind."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from channel_cases import world
from gloo_processes import patches

from moe_core.comm import memory
from moe_core.comm.channel import ChannelGroup
from moe_core.parallel import CollectiveError


def puts_and_signals(rank: int) -> None:
    group = ChannelGroup(world(), 1000)
    assert group.buffer.shape == (1024,)
    ahead = group.channel((rank + 1) % group.size)
    behind = group.channel((rank - 1) % group.size)
    for turn in range(50):
        ahead.put(8, torch.full((3,), 100 * turn + rank), signal=False)
        ahead.signal()
        behind.wait()
        received = group.buffer[8:32].view(torch.int64)
        assert received.tolist() == [100 * turn + (rank - 1) % group.size] * 3
        group.barrier()
    for _ in range(5):  # signals that nobody waits for yet are counted
        ahead.signal()
    group.barrier()
    for _ in range(5):
        behind.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_a_put_is_visible_after_the_wait(run_processes, size):
    run_processes(puts_and_signals, size)


def bounds(rank: int) -> None:
    group = ChannelGroup(world(), 64)
    channel = group.channel(1 - rank)
    for offset in (-1, 57, 10**12):
        with pytest.raises(
            ValueError, match=rf"bytes {offset} to .* buffer of rank {1 - rank} \(64"
        ):
            channel.put(offset, torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous CPU tensor"):
        channel.put(0, torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match=r"peer \(2\) must be another rank"):
        group.channel(2)
    channel.put(56, torch.ones(8, dtype=torch.uint8))
    channel.wait()
    assert group.buffer.tolist() == [0] * 56 + [1] * 8


def test_a_put_outside_of_the_buffer_is_refused(run_processes):
    run_processes(bounds, 2)


def a_rank_stays_away(rank: int) -> None:
    group = ChannelGroup(world(), 64, timeout=timedelta(seconds=0.3))
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"rank 0 got no signal from rank 2 within 0.3 s"):
            group.channel(2).wait()
        with pytest.raises(CollectiveError, match="out of step"):
            group.barrier()
    if rank == 1:
        start = time.monotonic()
        with pytest.raises(CollectiveError, match=r"rank 1 heard nothing from rank \d within 0.3"):
            group.barrier()
        assert time.monotonic() - start >= 0.3
    torch.distributed.barrier()  # a rank that has ended would be noticed at once


def test_a_wait_ends_within_the_timeout_and_names_both_ranks(run_processes):
    run_processes(a_rank_stays_away, 3)


def shared_files() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]


def no_name(rank: int) -> None:
    before = set(os.listdir("/dev/shm"))
    group = ChannelGroup(world(), 64)
    assert set(os.listdir("/dev/shm")) - before == set()
    assert len(shared_files()) == 1
    assert "memfd:moe_core.comm." in shared_files()[0]
    group.barrier()
    buffer = group.buffer
    del group
    assert buffer.sum() == 0  # a tensor keeps its memory
    del buffer
    assert shared_files() == []


def test_the_memory_has_no_name_and_goes_with_its_last_tensor(run_processes):
    run_processes(no_name, 2)


def bad_input(rank: int) -> None:
    with pytest.raises(
        ValueError, match=r"rank 0 asks for buffers of 64 bytes and rank 1 for .*128"
    ):
        ChannelGroup(world(), 64 * (1 + rank))
    patches.setattr(memory, "available_bytes", lambda: 2**20)
    with pytest.raises(RuntimeError, match=r"rank 0 of 2: 4.0 MiB of .*: 1.0 MiB of memory are"):
        ChannelGroup(world(), 2**21)
    patches.setattr(memory, "machine_identity", lambda: f"machine {rank}")
    with pytest.raises(ValueError, match=r"ranks 0 to 1 of .* one machine and in one container"):
        ChannelGroup(world(), 64)


def test_bad_input_is_refused_on_every_rank(run_processes):
    run_processes(bad_input, 2)


def without_a_compiler(rank: int) -> None:
    if rank == 1:
        os.environ["CXX"] = "/nonexistent/compiler"
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2: channels need their C\+\+ library: .*/compiler"
    ):
        ChannelGroup(world(), 64)
    torch.distributed.barrier()  # gloo remains usable


def test_no_compiler_is_one_line_on_every_rank(run_processes):
    run_processes(without_a_compiler, 2, fresh=True)  # the library is loaded once


def many_signals(rank: int, number: int) -> None:
    group = ChannelGroup(world(), 64)
    channel = group.channel(1 - rank)
    for turn in range(number):
        if rank == 0:
            channel.put(0, torch.tensor(turn))
            channel.wait()
        else:
            channel.wait()
            assert group.buffer[:8].view(torch.int64).item() == turn
            channel.signal()


def test_no_signal_is_lost(run_processes):
    run_processes(many_signals, 2, 2000)


@pytest.mark.slow
def test_no_signal_of_a_million_is_lost(run_processes):
    run_processes(many_signals, 2, 500_000, seconds=1200)  # also on a busy machine
