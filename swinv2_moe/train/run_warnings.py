"""Warnings about runs that will probably fail to learn. They do not stop a run."""

import math
from collections import deque
from statistics import median

import numpy as np

from swinv2_moe.config import DataConfig, TrainConfig
from swinv2_moe.data import Data

# Range of a schedule's highest learning rate. Published recipes are well within it. There is no
# warning for 0.
_USUAL_LEARNING_RATES = {
    "adamw": (1e-8, 0.1),
    "sgd": (1e-6, 10.0),
    "lamb": (1e-6, 1.0),
    "lars": (1e-4, 100.0),
}


def start_warnings(
    config: TrainConfig, data_config: DataConfig, data: Data, learning_rate: float
) -> list[str]:
    """Warnings before the first step of a run, one line each.

    Args:
        data_config: the section that `data` was built from.
        learning_rate: the highest rate of the schedule, scaled to the global batch.
    """
    lines = []
    low, high = _USUAL_LEARNING_RATES[config.optimizer.name]
    if learning_rate and not low <= learning_rate <= high:
        lines.append(
            f"the learning rate reaches {learning_rate:g} (TRAIN.BASE_LR is"
            f" {config.base_lr:g}, for 512 images a step), {config.optimizer.name} usually trains"
            f" with {low:g} to {high:g}"
        )
    targets = np.asarray(data.train_loader.dataset.source.targets)
    if (targets == targets[0]).all():
        lines.append(
            f"{_data_key(data_config)}: all {len(targets):,} training images are of one class"
            f" ({data.class_names[targets[0]]!r}), there is nothing to learn"
        )
    return lines


def _data_key(config: DataConfig) -> str:
    """The key that names the training images, and its value."""
    if config.dataset == "list":
        return f"DATA.TRAIN_LIST {config.train_list}"
    if config.path:
        return f"DATA.PATH {config.path}"
    return f"DATA.DATASET {config.dataset}"


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
