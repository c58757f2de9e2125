"""Fixtures for every test: `run_processes` runs a function on several gloo processes."""

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# One server imports torch once and forks a clean child for every rank: a fraction of spawn's start-up time, and none of
# the trouble of forking this process, whose threads do not survive it.
multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "moe_core"])


def _run_rank(rank: int, function: Callable, num_processes: int, store: str, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=num_processes, timeout=timedelta(seconds=60)
    )
    function(rank, *args)
    dist.destroy_process_group()


@pytest.fixture
def run_processes(tmp_path_factory):
    """`run_processes(function, n, *args, seconds=60)`: `function(rank, *args)` in each of n processes of a gloo world.

    The function must be importable (at a module's top level). The first failure ends all processes and is raised here
    with the child's traceback; so does running out of time.
    """

    def run(function: Callable, num_processes: int, *args, seconds: float = 60) -> None:
        store = str(tmp_path_factory.mktemp("store") / "rendezvous")
        children = mp.start_processes(
            _run_rank,
            (function, num_processes, store, args),
            num_processes,
            join=False,
            start_method="forkserver",
        )
        deadline = time.monotonic() + seconds
        try:
            while not children.join(timeout=max(0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    alive = [rank for rank, process in enumerate(children.processes) if process.is_alive()]
                    pytest.fail(f"ranks {alive} of {num_processes} still run after {seconds} s")
        finally:
            for process in children.processes:
                if process.is_alive():
                    process.kill()
                process.join()

    return run
