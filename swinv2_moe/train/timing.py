"""Where a run's time goes: waiting for data, and the way to a target accuracy."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from swinv2_moe.data import Batch


class Batches:
    """Lists of `size` consecutive batches of a loader; a shorter rest is left out.

    `waited` is how many seconds the loader has taken, the start and end of its workers included.
    """

    def __init__(self, loader: Iterable[Batch], size: int) -> None:
        self.loader, self.size = loader, size
        self.waited = 0.0
        self._last = time.perf_counter(), 0.0

    def __iter__(self) -> Iterator[list[Batch]]:
        group, asked = [], time.perf_counter()
        for batch in self.loader:
            group.append(batch)
            if len(group) == self.size:
                self.waited += time.perf_counter() - asked
                yield group
                group, asked = [], time.perf_counter()
        self.waited += time.perf_counter() - asked

    def wait_share(self) -> float:
        """What the loader took of the time since this was last asked, 0 to 1."""
        (then, before), self._last = self._last, (time.perf_counter(), self.waited)
        return (self.waited - before) / (self._last[0] - then)


@dataclass
class Throughput:
    """Training proper in this process: without validation, saving at its end and start-up."""

    images: int = 0  # of all ranks
    seconds: float = 0.0
    waited: float = 0.0  # seconds that this rank waited for its loader

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
    """`seconds` of the run had passed at its end; `top1` in percent."""

    epoch: int
    step: int
    seconds: float
    top1: float


class TimeToTarget:
    """How long a run trains and validates, over all its parts, until the first validation that
    reaches `target`.

    All validations are kept, so that the answer is right for another target, too, when the run is
    resumed with one.
    """

    def __init__(self, target: float) -> None:
        """`target`: top-1 accuracy in percent; 0: none."""
        self.target = target
        self.validations: list[Validation] = []
        self._earlier, self._started = 0.0, None  # seconds of the parts before; when this one began

    def start(self) -> None:
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the run began, without the time between its parts and that of steps that were lost
        and done again."""
        return self._earlier + (
            0.0 if self._started is None else time.perf_counter() - self._started
        )

    @property
    def reached(self) -> Validation | None:
        return next(
            (found for found in self.validations if self.target and found.top1 >= self.target), None
        )

    def validated(self, epoch: int, step: int, top1: float) -> bool:
        """Whether the validation that has just ended is the one that reaches the target."""
        self.validations.append(Validation(epoch, step, self.seconds, top1))
        return self.reached is self.validations[-1]

    def __str__(self) -> str:
        found, target = self.reached, f"TRAIN.TARGET_TOP1 {self.target:g}%"
        if found is None:
            return f"{target} not reached"
        return (
            f"{target} reached after {found.seconds:,.1f} s, in epoch {found.epoch} (step"
            f" {found.step})"
        )

    def state(self) -> dict:
        return {"seconds": self.seconds, "validations": self.validations}

    def load(self, state: dict) -> None:
        self._earlier = state["seconds"]
        self.validations = [Validation(*values) for values in state["validations"]]
