"""Remaining time of a run. Imports no torch."""

import math
from typing import Protocol


class Position(Protocol):
    """The position in a run. `swinv2_moe.train.progress.Progress` implements this protocol."""

    epochs: int  # TRAIN.EPOCHS
    max_steps: int  # TRAIN.MAX_STEPS; 0: no limit
    steps_per_epoch: int
    epoch: int  # complete epochs
    epoch_step: int  # steps of the current epoch
    step: int  # steps in all


def steps_left(position: Position) -> int:
    """The number of steps until the end of the run."""
    left = (position.epochs - position.epoch) * position.steps_per_epoch - position.epoch_step
    if position.max_steps:
        left = min(left, position.max_steps - position.step)
    return max(left, 0)


def seconds_left(
    position: Position, seconds_per_step: float, seconds_per_validation: float = 0.0
) -> float:
    """Seconds until the end of the run, with a validation after each epoch and after the last step.

    Args:
        seconds_per_step: seconds per step, at the recent speed.
        seconds_per_validation: duration of the last validation; 0 before the first one, which makes
            the result too small.
    """
    steps = steps_left(position)
    validations = math.ceil((position.epoch_step + steps) / position.steps_per_epoch)
    return steps * seconds_per_step + validations * seconds_per_validation


def in_words(seconds: float) -> str:
    """A duration in one or two units: 40 s, 12 min, 3 h 05 min, 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min"
