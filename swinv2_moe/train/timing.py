"""The time of a run: waiting for data, training throughput, and time to a target accuracy."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from swinv2_moe.data import Batch


class Batches:
    """Lists of `size` consecutive batches of a loader; an incomplete last list is left out.

    Attributes:
        waited: seconds spent waiting for the loader, including the start and end of its workers.
    """

    def __init__(self, loader: Iterable[Batch], size: int) -> None:
        self.loader = loader
        self.size = size
        self.waited = 0.0
        # of the last call of `wait_share`
        self._share_time = time.perf_counter()
        self._share_waited = 0.0

    def __iter__(self) -> Iterator[list[Batch]]:
        group = []
        wait_start = time.perf_counter()
        for batch in self.loader:
            group.append(batch)
            if len(group) == self.size:
                self.waited += time.perf_counter() - wait_start
                yield group
                group = []
                wait_start = time.perf_counter()
        self.waited += time.perf_counter() - wait_start

    def wait_share(self) -> float:
        """The share of the time since the last call that was spent waiting, 0 to 1."""
        now = time.perf_counter()
        share = (self.waited - self._share_waited) / (now - self._share_time)
        self._share_time = now
        self._share_waited = self.waited
        return share


@dataclass
class Throughput:
    """Images and seconds of training steps in this process.

    Start-up, validation and the save at the end are not included.
    """

    images: int = 0  # of all ranks
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
    seconds: float  # of the run, at the validation's end
    top1: float  # percent


class TimeToTarget:
    """The time of training and validation until the first validation that reaches `target`.

    The time is summed over all parts of a resumed run. All validations are kept, so the result is
    right also for a run that is resumed with another target.
    """

    def __init__(self, target: float) -> None:
        """`target`: top-1 accuracy in percent; 0: none."""
        self.target = target
        self.validations: list[Validation] = []
        self._earlier_seconds = 0.0  # of the parts before this one
        self._start_time: float | None = None

    def start(self) -> None:
        self._start_time = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the run began.

        The time between its parts is left out, and so is that of steps which were lost and
        repeated.
        """
        if self._start_time is None:
            return self._earlier_seconds
        return self._earlier_seconds + time.perf_counter() - self._start_time

    @property
    def reached(self) -> Validation | None:
        """The first validation that reaches the target."""
        if not self.target:
            return None
        for validation in self.validations:
            if validation.top1 >= self.target:
                return validation
        return None

    def validated(self, epoch: int, step: int, top1: float) -> bool:
        """Record a validation; True if it is the first that reaches the target."""
        self.validations.append(Validation(epoch, step, self.seconds, top1))
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
        return {"seconds": self.seconds, "validations": self.validations}

    def load(self, state: dict) -> None:
        self._earlier_seconds = state["seconds"]
        self.validations = [Validation(*values) for values in state["validations"]]
