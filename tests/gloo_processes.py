"""Functions and commands on several gloo processes; conftest files make them fixtures."""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
DEADLINE = 120  # seconds for processes to end; they take a few, on a busy machine more
# One server imports all this once and forks a clean child for every rank: a fraction of spawn's
# start-up time, and none of the trouble of forking this process, whose threads do not survive it.
# The modules of tests need the last two.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "torchvision",
]
_PRELOADED += ["sklearn.datasets", "swinv2_moe.train", "hypothesis", "pytest"]
multiprocessing.set_forkserver_preload(_PRELOADED)


def run_on_processes(
    function: Callable, num_processes: int, store: Path, *args, seconds: float
) -> None:
    """`function(rank, *args)` on every rank of a gloo world that meets at the file `store`.

    Raises:
        ProcessRaisedException: the first failure, with the child's traceback; the others are ended.
        TimeoutError: ranks that still run after so many seconds; they are ended.
    """
    arguments = (function, num_processes, store, args)
    children = mp.start_processes(
        _run_rank, arguments, num_processes, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + seconds
    try:
        while not children.join(timeout=max(0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                alive = [
                    rank for rank, process in enumerate(children.processes) if process.is_alive()
                ]
                raise TimeoutError(f"ranks {alive} of {num_processes} still run after {seconds} s")
    finally:
        for process in children.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _run_rank(rank: int, function: Callable, num_processes: int, store: Path, args: tuple) -> None:
    torch.set_num_threads(1)
    reset_signals()
    timeout = timedelta(seconds=240)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=num_processes, timeout=timeout
    )
    dist.barrier()  # or a rank whose function ends at once leaves while another still connects
    function(rank, *args)
    dist.destroy_process_group()


def reset_signals() -> None:
    """Signals as a shell's command has them; the server of processes hands on those that were
    blocked or ignored where and when it started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Outcome(NamedTuple):
    """How a rank ended: its exit status (-9 for SIGKILL; None if it did not end in time) and what
    it printed."""

    status: int | None
    out: str
    err: str


class Processes:
    """`function()` in each of `size` processes with torchrun's variables, started at once.

    Args:
        logs: a directory; what the processes print is kept in a new one below it.
    """

    def __init__(self, size: int, logs: Path, function: Callable[[], None]) -> None:
        self.logs = Path(tempfile.mkdtemp(prefix="logs-", dir=logs))
        context, arguments = (
            multiprocessing.get_context("forkserver"),
            (size, free_port(), self.logs, function),
        )
        self.processes = [
            context.Process(target=_run_as_rank, args=(rank, *arguments), daemon=True)
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            if self.processes[rank].exitcode is None:
                os.kill(self.processes[rank].pid, number)

    def wait(self, seconds: float = DEADLINE) -> list[Outcome]:
        """How the ranks ended; those that did not in so many seconds are killed."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        status = [process.exitcode for process in self.processes]
        self.kill()
        return [
            Outcome(code, *map(self._read, (f"{rank}.out", f"{rank}.err")))
            for rank, code in enumerate(status)
        ]

    def _read(self, log: str) -> str:
        """ "" if the rank was killed before it could open it."""
        return (self.logs / log).read_text() if (self.logs / log).exists() else ""

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def wait_for(self, condition: Callable[[], object], seconds: float = DEADLINE) -> None:
        """Until `condition()` holds.

        Raises:
            TimeoutError: it does not in so many seconds, or a rank ended before it did.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or any(
                process.exitcode is not None for process in self.processes
            ):
                raise TimeoutError([outcome[::2] for outcome in self.wait(0)])
            time.sleep(0.002)


def _run_as_rank(rank: int, size: int, port: int, logs: Path, function: Callable[[], None]) -> None:
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(logs / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    torch.set_num_threads(1)
    reset_signals()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    function()


def run_script(script: str, arguments: list[str]) -> None:
    """A script of the repository as `python script arguments...` runs it, from the repository's
    root."""
    os.chdir(ROOT)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
