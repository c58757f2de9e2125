"""The tuners of a run: checks of the strategies that they decided, and what they did."""

from torch import nn

from moe_core import strategy_tuners
from moe_core.parallel import TunerEvent

CHECK_STEPS = 10  # optimiser steps between two checks of the decided strategies' times


class Tuning:
    """The tuners of a model's layers: regular checks for a drift, and a record of decisions.

    There are none unless MODEL.MOE.STRATEGY is "auto" on several ranks. Each check is a collective.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tuners = strategy_tuners(model)

    def after_step(self, step: int) -> list[dict]:
        """Check the decided strategies every CHECK_STEPS steps, and return `take_events()`. Every
        rank calls this after each optimiser step."""
        if step % CHECK_STEPS == 0:
            for tuner in self.tuners:
                tuner.check()
        return self.take_events()

    def take_events(self) -> list[dict]:
        """The decisions and timings of the tuners since the last call, ready for JSON."""
        return [_as_record(event) for tuner in self.tuners for event in tuner.take_events()]


def _as_record(event: TunerEvent) -> dict:
    before = None
    if event.before is not None:
        before = str(event.before)
    return {
        "event": event.kind,
        "layers": event.key.describe(),
        "from": before,
        "to": str(event.after),
        "ms": _milliseconds(event.seconds),
        "ms_before": _milliseconds(event.seconds_before),
        "tried_ms": {str(tried): _milliseconds(time) for tried, time in event.tried.items()},
    }


def _milliseconds(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return round(1000 * seconds, 4)
