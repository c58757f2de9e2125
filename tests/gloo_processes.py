"""Functions and commands on several gloo processes; conftest files make them fixtures."""

import contextlib
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

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
_PRELOADED += ["sklearn.datasets", "swinv2_moe.train.run", "hypothesis", "pytest"]
multiprocessing.set_forkserver_preload(_PRELOADED)


# For functions of `Pool.run`: what they patch with it is undone when they return.
patches = pytest.MonkeyPatch()


def recorded_calls(names: Iterable[str]) -> list[str]:
    """A list that grows with each call of these functions of torch.distributed, until `patches` are
    undone."""
    calls = []
    for name in names:
        original = getattr(dist, name)

        def record(*args, original=original, name=name, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        patches.setattr(dist, name, record)
    return calls


class RankError(RuntimeError):
    """A rank raised or ended: its traceback or how it ended, and those of others soon after."""


class Pool:
    """Processes that live until `close`; the first n of them are the ranks of each call.

    Every call has a gloo world of its own, which meets at a new file in `directory`, and finds
    seeds, environment, working directory and torch's settings as the first call did. Modules that
    a function changes other than by `patches` stay changed.
    """

    def __init__(self, directory: Path, calls: int | None = None) -> None:
        """`calls`: after so many the processes end by themselves."""
        self.directory, self.calls = directory, calls
        self.workers: list[_Worker] = []

    def run(
        self,
        function: Callable,
        num_processes: int,
        *args,
        seconds: float = DEADLINE * 2,
        ending: Collection[int] = (),
        fresh: bool = False,
    ) -> list:
        """`function(rank, *args)` on every rank.

        Args:
            ending: ranks that `function` ends, or that are killed when the others have returned.
            fresh: in processes of their own, for what stays in a process, such as variables that
                are read at an import.

        Returns:
            What the function returned on each rank (None for ranks in `ending`).

        Raises:
            RankError: the first rank that raised or ended, with its traceback. All are killed.
            TimeoutError: ranks that still run after so many seconds. All are killed.
        """
        if not fresh and not ending:
            return self._run(function, num_processes, args, seconds, ())
        pool = Pool(self.directory, calls=1)
        results = pool._run(function, num_processes, args, seconds, ending)
        pool.close()
        return results

    def _run(self, function, num_processes: int, args, seconds: float, ending) -> list:
        while len(self.workers) < num_processes:
            self.workers.append(_Worker(self.calls))
        store = Path(tempfile.mkdtemp(dir=self.directory)) / "store"
        workers = self.workers[:num_processes]
        try:
            for rank, worker in enumerate(workers):
                call = (function, rank, num_processes, store, args)
                worker.pipe.send_bytes(pickle.dumps(call))
            results = _collect(workers, time.monotonic() + seconds, seconds, ending)
        except BaseException:
            self.kill(self.workers)
            raise
        self.kill([workers[rank] for rank in ending])
        return results

    def kill(self, workers: list["_Worker"]) -> None:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()
        self.workers = [worker for worker in self.workers if worker not in workers]

    def close(self) -> None:
        """End the processes.

        Raises:
            RankError: one does not end, or not with status 0.
        """
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(DEADLINE)
        status = [worker.process.exitcode for worker in self.workers]
        self.kill(self.workers)
        if any(code != 0 for code in status):
            raise RankError(f"the processes ended with {status}; None: not in {DEADLINE} s")


class _Worker:
    def __init__(self, calls: int | None) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=_serve, args=(end, calls), daemon=True)
        self.process.start()
        end.close()

    def outcome(self, rank: int) -> tuple[bool, object]:
        """Whether the function returned, and what; else the traceback or how the process ended."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            status = self.process.exitcode
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            return False, f"rank {rank} ended with {how}"


def _collect(workers: list[_Worker], deadline: float, seconds: float, ending) -> list:
    ranks = {worker.pipe: rank for rank, worker in enumerate(workers)}
    results, errors = [None] * len(workers), []
    while set(ranks.values()) - set(ending):
        ready = multiprocessing.connection.wait(list(ranks), max(0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = ranks.pop(pipe)
            is_result, value = workers[rank].outcome(rank)
            if is_result:
                results[rank] = value
            elif rank not in ending:
                errors.append(value)
        if errors:  # the others learn of it, maybe before this process: wait for what they say
            deadline = min(deadline, time.monotonic() + 0.5)
    if errors:
        # One that was killed is the cause of what the others report.
        raise RankError("\n".join(sorted(errors, key=lambda error: "Traceback" in error)))
    waiting = sorted(set(ranks.values()) - set(ending))
    if waiting:
        raise TimeoutError(f"ranks {waiting} of {len(workers)} still run after {seconds} s")
    return results


def _serve(pipe, calls: int | None) -> None:
    """The life of a process of the pool: it calls what comes through the pipe."""
    torch.set_num_threads(1)
    reset_signals()
    gc.freeze()  # the collections below look at what calls left, not at what was imported
    for _ in itertools.count() if calls is None else range(calls):
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        try:
            outcome = (True, _run_rank(*pickle.loads(call)))
        except BaseException:
            outcome = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))


def _run_rank(function: Callable, rank: int, num_processes: int, store: Path, args: tuple):
    with _restored_state():
        dist.init_process_group(
            "gloo",
            f"file://{store}",
            rank=rank,
            world_size=num_processes,
            timeout=timedelta(seconds=DEADLINE * 2),
        )
        dist.barrier()  # or a rank whose function ends at once leaves while another still connects
        result = function(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
    return result


@contextlib.contextmanager
def _restored_state() -> Iterator[None]:
    """The same seeds at each start; what a function may leave behind is undone at the end."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    environment, directory, arguments = dict(os.environ), os.getcwd(), sys.argv[:]
    yield
    patches.undo()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv[:] = arguments
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    reset_signals()
    gc.collect()  # process groups and shared memory end with their last reference


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
                # It may end in between, and the fork server reaps it.
                with contextlib.suppress(ProcessLookupError):
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


# Below the ports that systems give to connections, so that none of these takes one before a test
# does. Each process begins elsewhere, as tests run side by side.
_ports = itertools.count(20_000 + os.getpid() * 997 % 10_000)


def free_port() -> int:
    return next(filter(_is_free, _ports))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
