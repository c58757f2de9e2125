"""A run that is told to stop: by SIGTERM (schedulers, torchrun, `kill`) or SIGUSR1 (`sbatch --signal=USR1@120`)."""

import os
import signal
import threading
from types import FrameType


class Stopped(Exception):
    """Raised between two steps, on every rank, after one of them was told to stop."""


class StoppedElsewhere(Exception):
    """This rank has saved and ends since another one was told to, under a launcher that restarts ranks.

    torchrun takes a rank's exit status 0 for the end of the whole job. Here one node is about to leave: the ranks of
    the others have to start again.
    """


class StopSignal:
    """Remembers that a signal came, inside its `with` block; torchrun and a scheduler may both send one."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> "StopSignal":
        in_main_thread = threading.current_thread() is threading.main_thread()  # signals reach no other
        self._before = {number: signal.signal(number, self._receive) for number in self.SIGNALS if in_main_thread}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def came_from_elsewhere(self, stopped_by: str | None) -> bool:
        """Whether the run stopped because of a SIGTERM that this rank has not received, and torchrun may restart it."""
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        return stopped_by == "SIGTERM" and self.received is None and restarts > 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
