"""Run commands in separate processes, so that several can run at the same time."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock

from swinv2_moe.errors import UserError
from swinv2_moe.imports import import_arguments

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Jobs:
    """Commands in separate processes, several of which can run at the same time."""

    def __init__(self, num_jobs: int) -> None:
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
