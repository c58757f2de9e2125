"""The tuners of a run, and what they decided."""

from torch import nn

from moe_core import strategy_tuners
from moe_core.parallel import TunerEvent


class Tuning:
    """The tuners of a model's layers. There are none unless MODEL.MOE.STRATEGY is "auto" on several
    ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.tuners = strategy_tuners(model)

    def take_events(self) -> list[dict]:
        """The decisions of the tuners since the last call, ready for JSON."""
        return [_as_record(event) for tuner in self.tuners for event in tuner.take_events()]


def _as_record(event: TunerEvent) -> dict:
    return {
        "event": "decided",
        "layers": event.key.describe(),
        "to": str(event.strategy),
        "ms": _milliseconds(event.seconds),
        "tried_ms": {str(tried): _milliseconds(time) for tried, time in event.tried.items()},
    }


def _milliseconds(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return round(1000 * seconds, 4)
