"""The pool of gloo processes: worlds are clean, failures are told, and what hangs is ended."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from gloo_processes import RankError, patches


def sums(rank: int) -> tuple[int, int]:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return int(total), os.getpid()


def test_all_ranks_meet_in_the_same_processes_with_their_results(run_processes):
    first, second = run_processes(sums, 3), run_processes(sums, 2)
    assert [total for total, _ in first + second] == [3, 3, 3, 1, 1]
    assert first[0][1] != first[1][1]
    assert [pid for _, pid in second] == [pid for _, pid in first[:2]]
    fresh = run_processes(sums, 2, fresh=True)
    assert not {pid for _, pid in fresh} & {pid for _, pid in first}


def changes_everything(rank: int) -> list:
    """What the process has at the start; all of it is changed."""
    pair = dist.new_group([0, 1])
    dist.barrier()  # or one rank leaves while the other still connects
    names = (pair.group_name, time.sleep.__name__, os.getcwd(), os.environ.get("LOCAL_WORLD_SIZE"))
    settings = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    found = [*names, *settings, torch.rand(()).item()]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    patches.setattr(time, "sleep", lambda seconds: None)
    if rank == 0:  # names of groups are counted
        dist.new_group([0], use_local_synchronization=True)
    return found


def test_the_next_call_finds_nothing_of_the_last(run_processes):
    assert run_processes(changes_everything, 2) == run_processes(changes_everything, 2)


def fails_alone(rank: int) -> None:
    if rank == 1:
        raise ValueError("a message from rank 1")
    dist.barrier()


def kills_itself(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        dist.barrier()
    return type(error.value).__name__


def hangs(rank: int) -> None:
    time.sleep(1000 * rank)


def test_a_failure_carries_the_traceback_and_does_not_wait_for_the_others(run_processes):
    with pytest.raises(RankError, match=r"(?s)in fails_alone.*a message from rank 1"):
        run_processes(fails_alone, 2)
    assert run_processes(sums, 2)[0][0] == 1  # by new processes


def test_a_killed_rank_is_an_error_unless_it_is_said_to_end(run_processes):
    with pytest.raises(RankError, match=r"^rank 1 ended with SIGKILL$"):
        run_processes(kills_itself, 2)
    assert run_processes(kills_itself, 2, ending=[1]) == ["RuntimeError", None]


def test_running_out_of_time_names_the_ranks(run_processes):
    with pytest.raises(TimeoutError, match=r"ranks \[.*1\] of 2 still run after 1 s"):
        run_processes(hangs, 2, seconds=1)
