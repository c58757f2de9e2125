"""The time of a run by phase. Each moment belongs to one phase."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# start: from the start of the program to the first step, including imports and building the model;
# data: training waits for its loader; saving: training waits for a checkpoint
PHASES = ("start", "data", "training", "validation", "saving", "other")


class PhaseTimes:
    """Seconds of each phase in this process, summed over the parts of a resumed run.

    The sums exclude the time between two parts, and steps that were lost and repeated. Any thread
    may read the sums; only one thread changes the phase.
    """

    def __init__(self, began: float | None = None) -> None:
        """The phase is "start" until `started` is called.

        Args:
            began: when the program began, in seconds since 1970; None: now.
        """
        now = time.time()
        self.began = now
        if began is not None:
            self.began = began
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._seconds["start"] = max(0.0, now - self.began)
        self._phase = "start"
        self._since = time.perf_counter()

    def started(self) -> None:
        """End the phase "start"."""
        self._change("other")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`. A nested phase interrupts the outer one."""
        before = self._change(name)
        try:
            yield
        finally:
            self._change(before)

    def _change(self, name: str) -> str:
        """Begin the phase `name` and return the previous phase."""
        now = time.perf_counter()
        with self._lock:
            before = self._phase
            self._seconds[before] += now - self._since
            self._phase = name
            self._since = now
        return before

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase until now."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._phase] += time.perf_counter() - self._since
        return seconds

    def load(self, earlier: Mapping[str, float]) -> None:
        """Add the seconds of the run's earlier parts."""
        with self._lock:
            for phase in PHASES:
                self._seconds[phase] += earlier.get(phase, 0.0)


def accounted_share(seconds: Mapping[str, float]) -> float:
    """The share of the time whose phase is known, 0 to 1."""
    total = sum(seconds.values())
    if not total:
        return 1.0
    return 1 - seconds.get("other", 0.0) / total
