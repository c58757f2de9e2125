"""Where a training run stands: its counters and times, and their form in a checkpoint.

Each moment belongs to one phase.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import NamedTuple

from swinv2_moe.data.datasets import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.train.step import StepResult

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


class LossWatch:
    """Warns once in a run if the loss has diverged.

    The condition: the median of the last `RECENT` losses is at least twice the median of the
    first `START`, and at least 1 above it. Losses that are not finite are ignored.
    """

    START, RECENT = 10, 20

    def __init__(self) -> None:
        self.start: list[float] = []
        self.recent: deque[float] = deque(maxlen=self.RECENT)
        self.has_warned = False

    def add(self, loss: float) -> str | None:
        """Add the loss of a step; return the warning if it is due now."""
        if not math.isfinite(loss):
            return None
        if len(self.start) < self.START:
            self.start.append(loss)
            return None
        self.recent.append(loss)
        if self.has_warned or len(self.recent) < self.RECENT:
            return None
        start, recent = median(self.start), median(self.recent)
        if recent < max(2 * start, start + 1):
            return None
        self.has_warned = True
        return (
            f"the loss of the last {self.RECENT} steps (median {recent:,.2f}) is far above that of"
            f" the first {self.START} ({start:,.2f}); a lower TRAIN.BASE_LR or more"
            " TRAIN.WARMUP_EPOCHS may help"
        )

    def state(self) -> dict:
        """JSON values for a checkpoint, without the recent losses."""
        return {"start": self.start, "has_warned": self.has_warned}

    def load(self, state: dict) -> None:
        self.start = list(state["start"])
        self.has_warned = state["has_warned"]


# fields of Progress in a checkpoint
_STATE: tuple[str, ...] = ("epoch", "epoch_step", "epoch_loss", "epoch_losses", "epoch_seconds")
_STATE += ("validated_step", "steps_per_epoch", "global_batch", "best_top1", "best_by")
_STATE += ("best_score", "best_epoch", "ended", "last_top1", "skipped")


@dataclass
class Progress:
    """The counters of a run. The first four fields are its configuration, as are `best_by` and
    `patience`."""

    epochs: int  # TRAIN.EPOCHS
    max_steps: int  # TRAIN.MAX_STEPS; 0: no limit
    steps_per_epoch: int
    global_batch: int  # images of a step, over all ranks
    to_target: TimeToTarget
    epoch: int = 0  # complete epochs
    epoch_step: int = 0  # steps of the current epoch
    step: int = 0  # steps in all
    validated_step: int = 0  # the step of the last validation
    epoch_loss: float = 0.0  # sum of the finite losses of the current epoch, on this rank
    epoch_losses: float = 0  # their number; a fraction after a resume with another global batch
    epoch_seconds: float = 0.0  # of the current epoch, in earlier parts of a resumed run
    skipped: int = 0  # steps whose loss or gradient was not finite
    best_top1: float = -1.0  # percent, of the best validation; negative: none yet
    best_by: str = "top1"  # TRAIN.BEST_BY
    best_score: float = 0.0  # of the best validation, in the measure of `best_by`
    last_top1: float | None = None
    patience: int = 0  # TRAIN.PATIENCE
    best_epoch: int = 0  # complete epochs at the best validation
    ended: str = ""  # why training has ended before its last epoch
    loss_watch: LossWatch = field(default_factory=LossWatch)

    @property
    def steps_done(self) -> bool:
        """Whether the last step is done."""
        has_limit = self.max_steps > 0
        at_limit = has_limit and self.step >= self.max_steps
        return self.epoch >= self.epochs or at_limit or bool(self.ended)

    @property
    def is_last_step(self) -> bool:
        """Whether the current step, which is done, is the last one."""
        is_end = self.epoch_step == self.steps_per_epoch and self.epoch + 1 >= self.epochs
        return is_end or self.steps_done

    @property
    def finished(self) -> bool:
        """Whether the last step is done and validated."""
        return self.steps_done and self.validated_step == self.step

    @property
    def schedule_step(self) -> int:
        """The argument of the learning-rate schedule.

        It counts in epochs: the number of steps per epoch may differ between numbers of ranks.
        """
        return self.epoch * self.steps_per_epoch + self.epoch_step

    @property
    def epochs_done(self) -> float:
        """Complete epochs and the fraction of the current epoch."""
        return self.schedule_step / self.steps_per_epoch

    def count_step(self, result: StepResult) -> None:
        """Count a completed step."""
        self.step += 1
        self.epoch_step += 1
        self.skipped += result.was_skipped
        if result.has_finite_loss:
            self.epoch_loss += result.loss
            self.epoch_losses += 1

    def count_validation(self, top1: float, score: float | None = None) -> bool:
        """Count a validation, and the epoch if it is complete.

        Args:
            top1: accuracy in percent.
            score: the measure of TRAIN.BEST_BY, higher for a better model; None: `top1`.

        Returns:
            Whether no validation so far is better.
        """
        self.validated_step = self.step
        self.count_epoch()
        if score is None:
            score = top1
        # of equals the later one, with a lower learning rate
        is_best = self.best_top1 < 0 or score >= self.best_score
        if is_best:
            self.best_top1, self.best_score = top1, score
            self.best_epoch = self.epoch
        elif 0 < self.patience <= self.epoch - self.best_epoch and self.epoch < self.epochs:
            self.ended = f"no better validation in {self.epoch - self.best_epoch} epochs"
        self.last_top1 = top1
        return is_best

    def count_epoch(self) -> None:
        """Count the current epoch if all of its steps are done."""
        if self.epoch_step == self.steps_per_epoch:
            self.epoch += 1
            self.epoch_step = 0
            self.epoch_loss = 0.0
            self.epoch_losses = 0

    def forget_validations(self) -> None:
        """Forget all validations: they are of another run, whose state this run continues."""
        self.best_top1 = -1.0
        self.best_epoch = self.epoch
        self.last_top1 = None
        self.to_target.validations.clear()

    def state(self) -> dict:
        """The state for a checkpoint, ready for JSON, without `step`. `epoch_loss` is the value of
        this rank."""
        state = {name: getattr(self, name) for name in _STATE}
        return state | {
            "time_to_target": self.to_target.state(),
            "loss_watch": self.loss_watch.state(),
        }

    def load(self, step: int, state: dict) -> None:
        """Continue from a state, perhaps with another global batch.

        The position in the epoch is the number of steps of the new size that fit into the images
        seen so far. A few images may therefore be seen again.

        Args:
            step: number of steps before the state was taken.
            state: as `state()` returns it. Earlier versions lack "time_to_target", "loss_watch",
                "epoch_losses", "epoch_seconds", "best_by", "best_score", "best_epoch" and "ended".
                After a change of TRAIN.BEST_BY the next validation is the best one; after the last
                step none follows.
        """
        self.step = step
        self.epoch = state["epoch"]
        self.validated_step = state["validated_step"]
        self.last_top1 = state["last_top1"]
        self.skipped = state["skipped"]
        self.epoch_seconds = state.get("epoch_seconds", 0.0)
        if "time_to_target" in state:
            self.to_target.load(state["time_to_target"])
        if "loss_watch" in state:
            self.loss_watch.load(state["loss_watch"])
        self.ended = state.get("ended", "")
        self.best_epoch = state.get("best_epoch", self.epoch)
        images_seen = state["epoch_step"] * state["global_batch"]
        self.epoch_step = min(images_seen // self.global_batch, self.steps_per_epoch)
        share = self.epoch_step / max(state["epoch_step"], 1)
        self.epoch_loss = state["epoch_loss"] * share
        self.epoch_losses = state.get("epoch_losses", state["epoch_step"]) * share
        if self.finished or state.get("best_by", "top1") == self.best_by:
            self.best_top1 = state["best_top1"]
            self.best_score = state.get("best_score", self.best_top1)


def steps_per_epoch(accumulation_steps: int, num_batches: int) -> int:
    """The number of whole steps in an epoch of `num_batches` batches.

    Raises:
        UserError: the epoch has no whole step.
    """
    steps = num_batches // accumulation_steps
    if steps == 0:
        raise UserError(
            f"TRAIN.ACCUMULATION_STEPS is {accumulation_steps}, an epoch has only"
            f" {num_batches} batches"
        )
    return steps
