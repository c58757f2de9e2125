"""Plans between processes: messages of any length, in pieces, and one line where ranks disagree."""

from datetime import timedelta

import pytest
import torch
from channel_cases import world
from ring_plans import ring_reduce_scatter

from moe_core.comm.plans import (
    linear_all_gather,
    linear_all_to_all,
    linear_reduce_scatter,
)
from moe_core.comm.runner import PlanRunner
from moe_core.parallel import CollectiveError


def message(source: int, target: int, turn: int) -> torch.Tensor:
    """Of 0 to 700 numbers, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * turn + 100 * source + target)
    length = int(torch.randint(0, 700, (), generator=generator)) * (turn % 3)
    return torch.randint(0, 100, (length,), generator=generator)


def exchanges(rank: int) -> None:
    ranks = world()
    size = ranks.size
    runner = PlanRunner(linear_all_to_all(size), ranks, 512)  # pieces of 64 numbers
    for turn in range(9):
        sent = [message(rank, target, turn) for target in range(size)]
        expected = [message(source, rank, turn) for source in range(size)]
        source, inputs = torch.cat(sent), [part.nbytes for part in sent]
        outputs = [part.nbytes for part in expected]
        result = torch.full_like(torch.cat(expected), -1)
        runner.run(source, inputs, result, outputs)
        assert torch.equal(result, torch.cat(expected))


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_unequal_lengths_arrive(run_processes, size):
    run_processes(exchanges, size)


def sums(rank: int) -> None:
    ranks = world()
    size, n = ranks.size, 700
    own = torch.arange(size * n).view(size, n) * (rank + 1)
    total = torch.arange(size * n).view(size, n) * (size * (size + 1) // 2)
    for plan in (linear_reduce_scatter(size), ring_reduce_scatter(size)):
        runner = PlanRunner(plan, ranks, 512)
        for _ in range(3):
            result = torch.empty(n, dtype=torch.int64)
            runner.run(own, [8 * n] * size, result, [8 * n])
            assert torch.equal(result, total[rank])
    runner = PlanRunner(linear_all_gather(size), ranks, 512)
    for _ in range(3):
        result = torch.empty(size, n, dtype=torch.int64)
        runner.run(own[0], [8 * n], result, [8 * n] * size)
        assert torch.equal(result, own[0] // (rank + 1) * torch.arange(1, size + 1)[:, None])


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sums(run_processes, size):
    run_processes(sums, size)


def disagreement(rank: int) -> None:
    ranks = world()
    plan = linear_all_to_all(2) if rank else ring_reduce_scatter(2)
    with pytest.raises(ValueError, match=r"rank 0 asks for the plan ring .* and rank 1 for"):
        PlanRunner(plan, ranks, 512)
    with pytest.raises(ValueError, match="a plan of 3 ranks for a group of 2"):
        PlanRunner(linear_all_to_all(3), ranks, 512)
    with pytest.raises(ValueError, match=r"piece_bytes \(100\) must be a positive multiple of 64"):
        PlanRunner(plan, ranks, 100)
    runner = PlanRunner(linear_all_to_all(2), ranks, 512, timedelta(seconds=1))
    rows = torch.zeros(4)
    expected = [8, 8] if rank else [8, 4]
    if rank:
        runner.run(rows, [8, 8], rows.clone(), expected)
    else:
        with pytest.raises(CollectiveError, match=r"expects 4 bytes from rank 1, and 8 came"):
            runner.run(rows, [8, 8], rows.clone(), expected)


def bad_arguments(rank: int) -> None:
    ranks = world()
    runner = PlanRunner(linear_reduce_scatter(2), ranks, 512)
    rows, result = torch.zeros(4), torch.zeros(2)
    calls = [
        ((rows, [8, 16], result, [8]), r"source of 16 bytes does not hold 2 messages of \[8, 16\]"),
        ((rows, [8], result, [8]), r"source of 16 bytes does not hold 2 messages of \[8\]"),
        ((rows, [8, 8], result, [16]), r"result of 8 bytes does not hold 1 messages of \[16\]"),
        ((rows, [-8, 8], result, [8]), r"messages of \[-8, 8\]"),
        ((rows.view(2, 2).T, [8, 8], result, [8]), "source must be a contiguous CPU tensor"),
        ((rows.half(), [4, 4], result, [4]), r"sums of torch.float16 are not supported"),
    ]
    for arguments, message in calls:
        with pytest.raises(ValueError, match=message):
            runner.run(*arguments)
    runner.run(rows, [8, 8], result, [8])


def test_messages_that_do_not_fit_are_refused(run_processes):
    run_processes(bad_arguments, 2)


def test_ranks_that_disagree_get_one_line(run_processes):
    run_processes(disagreement, 2)
