"""Channels between nodes, which are parts of one machine here: ports and two-level plans."""

# P ranks, g ranks per node

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from channel_cases import world
from ring_plans import ring_reduce_scatter

from moe_core.comm import ChannelGroup, Collectives, PlanRunner
from moe_core.comm.plans import two_level_all_to_all
from moe_core.parallel import CollectiveError


def puts_and_signals(rank: int, ranks_per_node: int) -> None:
    group = ChannelGroup(world(), 1000, ranks_per_node=ranks_per_node)
    ahead = group.channel((rank + 1) % group.size)
    behind = group.channel((rank - 1) % group.size)
    for turn in range(20):
        ahead.put(8, torch.full((3,), 100 * turn + rank), signal=False)
        ahead.put(32, torch.tensor(turn), signal=False)
        ahead.signal()
        behind.wait()
        ahead.flush()
        received = group.buffer[8:40].view(torch.int64)
        assert received.tolist() == [100 * turn + (rank - 1) % group.size] * 3 + [turn]
        group.barrier()
    for _ in range(5):  # signals that nobody waits for yet are counted
        ahead.signal()
    ahead.put(0, torch.tensor(-rank), signal=False)  # a barrier makes it visible
    group.barrier()
    assert group.buffer[:8].view(torch.int64).item() == -((rank - 1) % group.size)
    for _ in range(5):
        behind.wait()
    group.barrier()  # all have read
    for _ in range(3):  # more than one message can hold
        ahead.put(0, torch.arange(125), signal=False)
    ahead.signal()
    behind.wait()
    ahead.flush()
    assert torch.equal(group.buffer[:1000].view(torch.int64), torch.arange(125))


@pytest.mark.parametrize(("size", "ranks_per_node"), [(2, 1), (4, 2)])
def test_a_put_is_visible_after_the_wait(run_processes, size, ranks_per_node):
    run_processes(puts_and_signals, size, ranks_per_node)


def equals_torch(rank: int, ranks_per_node: int, num_cases: int) -> None:
    size = dist.get_world_size()
    collectives = Collectives(world(), ranks_per_node=ranks_per_node)
    shared = torch.Generator().manual_seed(0)  # of the splits, which all ranks know
    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    for case in range(num_cases):
        longest = [3, 40, 5000][case % 3]
        splits = torch.randint(0, longest, (size, size), generator=shared)
        splits *= torch.randint(0, 2, (size, size), generator=shared)  # some are empty
        send, receive = splits[rank].tolist(), splits[:, rank].tolist()
        rows = torch.randint(-99, 99, (sum(send), 7)).to(dtypes[case // 3 % 3])
        expected = rows.new_empty(sum(receive), 7)
        dist.all_to_all_single(expected, rows, receive, send)
        received, arrived = collectives.all_to_all_v(rows, send)
        assert arrived == receive
        assert torch.equal(received, expected)
        assert torch.equal(collectives.exchange(rows, send, receive), expected)
        gathered = torch.empty(size * 5, dtype=rows.dtype)
        part = torch.full((5,), rank, dtype=rows.dtype)
        dist.all_gather_into_tensor(gathered, part)
        assert torch.equal(collectives.all_gather(part), gathered)
        sums = collectives.reduce_scatter(gathered)
        assert torch.equal(sums, part * size)
        assert collectives.all_reduce(part).tolist() == [sum(range(size))] * 5


@pytest.mark.parametrize(("size", "ranks_per_node"), [(4, 2), (4, 1)])
def test_collectives_over_nodes_equal_torch(run_processes, size, ranks_per_node):
    run_processes(equals_torch, size, ranks_per_node, 9)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "ranks_per_node"), [(4, 2), (8, 4), (8, 2)])
def test_many_collectives_over_nodes_equal_torch(run_processes, size, ranks_per_node):
    run_processes(equals_torch, size, ranks_per_node, 300)


def other_plans(rank: int) -> None:
    """A ring, whose messages are passed on between nodes, in pieces."""
    size = dist.get_world_size()
    rows = torch.arange(1000 * size)
    own = rows.view(size, 1000)[rank]
    reduced = torch.empty_like(own)
    runner = PlanRunner(ring_reduce_scatter(size), world(), 512, ranks_per_node=2)
    runner.run(rows, [own.nbytes] * size, reduced, [own.nbytes])
    assert torch.equal(reduced, size * own)


def test_a_ring_over_nodes(run_processes):
    run_processes(other_plans, 4)


def refusals(rank: int) -> None:
    group = ChannelGroup(world(), 64, ranks_per_node=1)
    with pytest.raises(ValueError, match=rf"bytes 60 to 68 .* buffer of rank {1 - rank} \(64"):
        group.channel(1 - rank).put(60, torch.tensor(1))
    dist.barrier()
    if rank == 1:
        # a message that the other rank must not trust
        group.ports.put(0, 60, torch.zeros(8, dtype=torch.uint8))
        group.ports.signal(0)
        group.ports.flush(0)
    else:
        with pytest.raises(CollectiveError, match=r"rank 1 puts bytes 60 to 68 .*\(64 bytes\)"):
            group.channel(1).wait()
        with pytest.raises(CollectiveError, match="out of step"):
            group.barrier()
    dist.barrier()  # gloo remains usable


def test_a_put_that_does_not_fit_is_refused_by_both_sides(run_processes):
    run_processes(refusals, 2)


def different_nodes(rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank 0 asks for .* on nodes of 2 ranks and rank 2 for"):
        ChannelGroup(world(), 64, ranks_per_node=2 if rank < 2 else 4)
    plan = two_level_all_to_all(4, 2)
    with pytest.raises(ValueError, match="same plan"):
        PlanRunner(plan, world(), 64 if rank else 128, ranks_per_node=2)


def test_ranks_must_agree_on_the_nodes(run_processes):
    run_processes(different_nodes, 4)


def a_rank_stays_away(rank: int, directory: Path) -> None:
    group = ChannelGroup(world(), 64, timedelta(seconds=0.5), ranks_per_node=1)
    meet(directory / "made", rank)
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"rank 0 got no signal from rank 1.*out|Timed"):
            group.channel(1).wait()
        with pytest.raises(CollectiveError, match="out of step"):
            group.channel(1).signal()
    meet(directory / "waited", rank)


def meet(place: Path, rank: int) -> None:
    """A barrier without gloo, whose connection a wait that failed has closed."""
    place.with_suffix(f".{rank}").touch()
    while not all(place.with_suffix(f".{other}").exists() for other in range(2)):
        time.sleep(0.02)


def test_a_rank_that_does_not_come_is_named_within_the_timeout(run_processes, tmp_path):
    run_processes(a_rank_stays_away, 2, tmp_path)


def killed(rank: int) -> None:
    collectives = Collectives(world(), timedelta(seconds=2), ranks_per_node=1)
    rows = torch.zeros(2, 50_000)
    collectives.all_to_all(rows)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def exchange_for_ever() -> None:
        while True:
            collectives.all_to_all(rows)

    with pytest.raises(CollectiveError, match=r"rank 0 got no signal from rank 1; has it ended"):
        exchange_for_ever()


def test_a_killed_rank_of_another_node_is_named(run_processes):
    run_processes(killed, 2, ending=[1])
