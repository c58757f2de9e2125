"""The launcher of distributed tests shows a child's failure and ends what hangs."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException


def sums(rank: int, expected: int) -> None:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    assert total == expected


def fails_alone(rank: int) -> None:
    if rank == 1:
        raise ValueError("a message from rank 1")
    dist.barrier()


def hangs(rank: int) -> None:
    time.sleep(100 * rank)


def test_all_ranks_meet(run_processes):
    run_processes(sums, 3, 0 + 1 + 2)


def test_a_failure_carries_the_traceback_and_does_not_wait_for_the_others(run_processes):
    with pytest.raises(ProcessRaisedException, match=r"(?s)in fails_alone.*a message from rank 1"):
        run_processes(fails_alone, 2)


def test_running_out_of_time_names_the_ranks(run_processes):
    with pytest.raises(TimeoutError, match=r"ranks \[.*1\] of 2 still run after 1 s"):
        run_processes(hangs, 2, seconds=1)
