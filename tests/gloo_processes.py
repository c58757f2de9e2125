"""Run a function on several gloo processes; `tests/conftest.py` makes it the fixture `run_processes`."""

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# One server imports torch once and forks a clean child for every rank: a fraction of spawn's start-up time, and none of
# the trouble of forking this process, whose threads do not survive it.
multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "moe_core"])


def run_on_processes(function: Callable, num_processes: int, store: Path, *args, seconds: float) -> None:
    """`function(rank, *args)` on every rank of a gloo world that meets at the file `store`.

    Raises:
        ProcessRaisedException: the first failure, with the child's traceback; the others are ended.
        TimeoutError: ranks that still run after so many seconds; they are ended.
    """
    arguments = (function, num_processes, store, args)
    children = mp.start_processes(_run_rank, arguments, num_processes, join=False, start_method="forkserver")
    deadline = time.monotonic() + seconds
    try:
        while not children.join(timeout=max(0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                alive = [rank for rank, process in enumerate(children.processes) if process.is_alive()]
                raise TimeoutError(f"ranks {alive} of {num_processes} still run after {seconds} s")
    finally:
        for process in children.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _run_rank(rank: int, function: Callable, num_processes: int, store: Path, args: tuple) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=240)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_processes, timeout=timeout)
    function(rank, *args)
    dist.destroy_process_group()
