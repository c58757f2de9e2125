"""The time of a run: by phase (each moment belongs to one), waiting for data, training throughput,
and time to a target accuracy."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from swinv2_moe.data import Batch

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


class Batches:
    """Lists of `size` consecutive batches of a loader; an incomplete last list is omitted.

    The phase "data" is the time spent waiting for the loader, including the start and end of its
    workers.
    """

    def __init__(self, loader: Iterable[Batch], size: int, phases: PhaseTimes) -> None:
        self.loader = loader
        self.size = size
        self.phases = phases
        self._waited_before = phases.seconds()["data"]
        # values at the last call of `wait_share`
        self._share_time = time.perf_counter()
        self._share_waited = 0.0

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the loader."""
        return self.phases.seconds()["data"] - self._waited_before

    def __iter__(self) -> Iterator[list[Batch]]:
        with self.phases.phase("data"):
            batches = iter(self.loader)
        while True:
            with self.phases.phase("data"):
                group = list(islice(batches, self.size))
            if len(group) < self.size:
                return
            yield group

    def wait_share(self) -> float:
        """The share of the time since the last call that was spent waiting, 0 to 1."""
        now = time.perf_counter()
        waited = self.waited
        share = (waited - self._share_waited) / (now - self._share_time)
        self._share_time = now
        self._share_waited = waited
        return share


@dataclass
class Throughput:
    """Images and seconds of training steps in this process.

    Start-up, validation and the save at the end are not included.
    """

    images: int = 0  # over all ranks
    seconds: float = 0.0
    waited: float = 0.0  # seconds this rank waited for its loader

    def add(self, images: int, seconds: float, waited: float) -> None:
        self.images += images
        self.seconds += seconds
        self.waited += waited

    @property
    def images_per_second(self) -> float | None:
        if self.seconds:
            return self.images / self.seconds
        return None


class Validation(NamedTuple):
    """The result of one validation."""

    epoch: int
    step: int
    seconds: float  # time of the run at the end of the validation, without start-up
    top1: float  # percent
    phases: dict[str, float] | None = None  # seconds of each phase until then; None: not known
    joules: float | None = None  # energy until then; None: not known


class TimeToTarget:
    """The time of a run until the first validation that reaches `target`.

    All validations are kept, so that a run can be resumed with another target.
    """

    def __init__(self, target: float, phases: PhaseTimes) -> None:
        """Start without a validation.

        Args:
            target: top-1 accuracy in percent; 0: no target.
        """
        self.target = target
        self.phases = phases
        self.validations: list[Validation] = []

    @property
    def reached(self) -> Validation | None:
        """The first validation that reaches the target."""
        if not self.target:
            return None
        for validation in self.validations:
            if validation.top1 >= self.target:
                return validation
        return None

    def validated(self, epoch: int, step: int, top1: float, joules: float | None = None) -> bool:
        """Record a validation. Returns whether it is the first one that reaches the target."""
        phases = self.phases.seconds()
        seconds = sum(phases.values()) - phases["start"]
        self.validations.append(Validation(epoch, step, seconds, top1, phases, joules))
        return self.reached is self.validations[-1]

    def __str__(self) -> str:
        target = f"TRAIN.TARGET_TOP1 {self.target:g}%"
        validation = self.reached
        if validation is None:
            return f"{target} not reached"
        return (
            f"{target} reached after {validation.seconds:,.1f} s, in epoch {validation.epoch}"
            f" (step {validation.step})"
        )

    def state(self) -> dict:
        phases = self.phases.seconds()
        costs = [{"phases": done.phases, "joules": done.joules} for done in self.validations]
        return {
            "seconds": sum(phases.values()) - phases["start"],
            "phases": phases,
            "validations": [done[:4] for done in self.validations],
            "costs": costs,
        }

    def load(self, state: dict) -> None:
        """Continue from a state. Earlier versions have neither "phases" nor "costs"."""
        self.phases.load(state.get("phases", {"training": state["seconds"]}))
        validations = state["validations"]
        unknown = [{"phases": None, "joules": None}] * len(validations)
        costs = state.get("costs", unknown)
        self.validations = [
            Validation(*values, **cost) for values, cost in zip(validations, costs, strict=True)
        ]
