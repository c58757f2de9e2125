"""A run that is told to stop: by SIGTERM (schedulers, torchrun, `kill`) or SIGUSR1 (`sbatch --signal=USR1@120`)."""

import signal
import threading
from types import FrameType


class Stopped(Exception):
    """Raised between two steps, on every rank, after one of them was told to stop."""


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

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
