"""The time of a run: waiting for data, training throughput, and time to a target accuracy."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from swinv2_moe.data import Batch
from swinv2_moe.train.phase_times import PhaseTimes


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
