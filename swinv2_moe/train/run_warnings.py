"""Warnings about a run that will probably come to nothing. None of them stops it."""

import math
from collections import deque
from statistics import median

import numpy as np

from swinv2_moe.config import DataConfig, TrainConfig
from swinv2_moe.data import Data

# The highest learning rate of a schedule. Published recipes lie well within; 0 is taken for
# intended.
_USUAL_RATES = {"adamw": (1e-8, 0.1), "sgd": (1e-6, 10.0)}


def start_warnings(
    config: TrainConfig, images: DataConfig, data: Data, learning_rate: float
) -> list[str]:
    """What is odd about a run before its first step, one line each.

    Args:
        images: where `data` comes from.
        learning_rate: the highest of the schedule, scaled to the global batch.
    """
    lines = []
    low, high = _USUAL_RATES[config.optimizer.name]
    if learning_rate and not low <= learning_rate <= high:
        lines.append(
            f"the learning rate reaches {learning_rate:g} (TRAIN.BASE_LR is"
            f" {config.base_lr:g}, for 512 images a"
            f" step), {config.optimizer.name} usually trains with {low:g} to {high:g}"
        )
    targets = np.asarray(data.train_loader.dataset.source.targets)
    if (targets == targets[0]).all():
        lines.append(
            f"{_place(images)}: all {len(targets):,} training images are of one class"
            f" ({data.class_names[targets[0]]!r}), there is nothing to learn"
        )
    return lines


def _place(images: DataConfig) -> str:
    """The key that says where the training images are, and its value."""
    if images.dataset == "list":
        return f"DATA.TRAIN_LIST {images.train_list}"
    if images.path:
        return f"DATA.PATH {images.path}"
    return f"DATA.DATASET {images.dataset}"


class LossWatch:
    """Notices, once in a run, that the loss has been far above its start for a while.

    That is: the median of the last `RECENT` steps is at least twice that of the first `START` steps
    of the run, and at least 1 above it. Losses that are not finite do not count.
    """

    START, RECENT = 10, 20

    def __init__(self) -> None:
        self.start: list[float] = []
        self.recent: deque[float] = deque(maxlen=self.RECENT)
        self.has_warned = False

    def add(self, loss: float) -> str | None:
        """Take a step's loss; the warning if this step brings it about."""
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
            " the first"
            f" {self.START} ({start:,.2f}); a lower TRAIN.BASE_LR or more TRAIN.WARMUP_EPOCHS may"
            " help"
        )

    def state(self) -> dict:
        """For a checkpoint, ready for JSON; the recent losses are left out."""
        return {"start": self.start, "has_warned": self.has_warned}

    def load(self, state: dict) -> None:
        self.start, self.has_warned = list(state["start"]), state["has_warned"]
