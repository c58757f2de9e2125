"""Run commands in separate processes, so that several can run at the same time."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from swinv2_moe.errors import UserError
from swinv2_moe.imports import import_arguments
from swinv2_moe.output import say

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Jobs:
    """Commands in separate processes, several of which can run at the same time."""

    def __init__(self, num_jobs: int) -> None:
        self.num_jobs = num_jobs
        self.environment = dict(os.environ)
        if num_jobs > 1:
            for variable in _THREAD_VARIABLES:
                self.environment[variable] = "1"
        self.processes: set[subprocess.Popen] = set()
        self.lock = Lock()
        self.stopping = False

    def run(self, log: Path, command: str, *arguments: object) -> None:
        """Run a command and append its output to the file `log`.

        Raises:
            UserError: the command failed, or `stop` was called.
        """
        words = import_arguments() + [str(argument) for argument in arguments]
        with log.open("a") as file:
            with self.lock:
                if self.stopping:
                    raise UserError("stopped")
                process = subprocess.Popen(
                    [sys.executable, "-m", "swinv2_moe", command] + words,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                )
                self.processes.add(process)
            status = process.wait()
        with self.lock:
            self.processes.discard(process)
        if status:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise UserError(f"{log}: {command} ended with status {status} ({lines[-1]})")

    def run_all(
        self,
        tasks: Mapping[str, Callable[[], None]],
        after_each: Callable[[], None] = lambda: None,
    ) -> None:
        """Call all tasks, which use `run`, `num_jobs` at the same time. Print how each one ended.

        A task that fails does not stop the others. A signal stops all of them.

        Args:
            tasks: by the names to print, in the order in which they start.
            after_each: called after each task, in this thread.

        Raises:
            UserError: tasks failed; the message is the first one's.
        """
        errors = []
        with ThreadPoolExecutor(self.num_jobs) as pool:
            futures = [pool.submit(task) for task in tasks.values()]
            try:
                for name, future in zip(tasks, futures, strict=True):
                    error = future.exception()
                    if isinstance(error, UserError):
                        errors.append(error)
                    elif error is not None:
                        raise error
                    say(f"{name}: {error or 'done'}", flush=True)
                    after_each()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise
        if errors:
            raise UserError(f"{len(errors)} of {len(tasks)} runs failed; the first: {errors[0]}")

    def stop(self) -> None:
        """Tell all commands to end, and wait until they have ended. Trainings save a checkpoint
        first."""
        with self.lock:
            self.stopping = True
            processes = list(self.processes)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()


def end_by_signal(number: int, frame: object) -> None:
    raise KeyboardInterrupt
