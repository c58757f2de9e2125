"""A run that is told to stop: by SIGTERM (schedulers, `kill`), SIGUSR1 (`sbatch --signal=USR1@120`)
or Ctrl-C."""

import os
import signal
import threading
import time
from types import FrameType

_REPEATED = 0.1  # seconds: `timeout -s INT` and some launchers send one SIGINT twice


class Stopped(Exception):
    """Raised between two steps, on every rank, after one of them was told to stop."""


class StoppedElsewhere(Exception):
    """This rank has saved and ends since another one was told to, under a launcher that restarts
    ranks.

    torchrun takes a rank's exit status 0 for the end of the whole job. Here one node is about to
    leave: the ranks of the others have to start again.
    """


class StopSignal:
    """Remembers the first signal that told this rank to stop, inside its `with` block.

    More of them change nothing, since torchrun and a scheduler may both send one, except a second
    SIGINT: that ends the process at once, as if nothing handled it.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: str | None = None
        self._interrupted: float | None = None  # when SIGINT first came

    def __enter__(self) -> "StopSignal":
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # signals reach no other
            for number in self.SIGNALS:
                # as `nohup` and a shell's background jobs ask for
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def came_from_elsewhere(self, stopped_by: str | None) -> bool:
        """Whether the run stopped because of a SIGTERM that this rank has not received, and
        torchrun may restart it."""
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        return stopped_by == "SIGTERM" and self.received is None and restarts > 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
        elif now - self._interrupted > _REPEATED:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
