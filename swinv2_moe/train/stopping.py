"""Signals that stop a run.

SIGTERM comes from schedulers and `kill`, SIGUSR1 from `sbatch --signal=USR1@120`, SIGINT from
Ctrl-C.
"""

import os
import signal
import threading
import time
from types import FrameType

# `timeout -s INT` and some launchers send SIGINT twice, within this many seconds.
_DUPLICATE_SECONDS = 0.1


class Stopped(Exception):
    """Raised on every rank, between two steps, after any of them received a stop signal."""


class StopSignal:
    """Records the first stop signal that this process receives inside the `with` block.

    Further signals are ignored, since torchrun and a scheduler may both send one. The exception is
    a second SIGINT, which ends the process at once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: str | None = None
        self._first_interrupt: float | None = None  # time of the first SIGINT

    def __enter__(self) -> "StopSignal":
        self._previous_handlers = {}
        # Python delivers signals to the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self.SIGNALS:
            # `nohup` and a shell's background jobs set signals to be ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def came_from_elsewhere(self, stopped_by: str | None) -> bool:
        """True if another rank received the SIGTERM and torchrun may restart this rank."""
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        return stopped_by == "SIGTERM" and self.received is None and restarts > 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
        elif now - self._first_interrupt > _DUPLICATE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
