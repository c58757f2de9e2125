"""What changes in the MoE layers from step to step of a run: top-k, capacity factor, and the
tuners' strategies.

A schedule depends only on the position in the run. The automatic capacity depends on the last
steps, which are stored in checkpoints. So a resumed run repeats the values of an uninterrupted run.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_core import strategy_tuners
from moe_core.parallel import TunerEvent
from swinv2_moe.config import parse_schedule
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEMlp
from swinv2_moe.models.section import ExpertsConfig

STEPS = 16  # number of last steps that the automatic capacity considers
CHECK_STEPS = 10  # optimiser steps between two checks of the decided strategies' times


class RoutingSchedule:
    """MODEL.MOE.TOP_K_SCHEDULE and CAPACITY_AUTO of a model.

    With CAPACITY_AUTO, the capacity factor of a layer is the largest needed factor of the last
    STEPS steps, over all ranks. The needed factor of a step is the smallest factor that drops at
    most 1% of a rank's choices. Before the first measurement, CAPACITY_FACTOR is used.

    Frozen layers and evaluation are not affected.

    Args:
        keeps_steps: steps are compiled (COMPILE) or captured (TRAIN.GRAPH). Each new top-k then
            needs another one; a new capacity factor does not.
    """

    def __init__(self, config: ExpertsConfig, model: nn.Module, keeps_steps: bool = False) -> None:
        modules = model.modules()
        self.layers = [m for m in modules if isinstance(m, MoEMlp) and not m.frozen]
        self.top_k_schedule = parse_schedule(config.top_k_schedule)
        self.is_automatic = config.capacity_auto
        # the needed factor of each layer in the last steps; empty without CAPACITY_AUTO
        self.needed: deque[list[float]] = deque(maxlen=STEPS)
        self.keeps_steps = keeps_steps
        self.current: dict[str, float] = {}  # scheduled values, for the log

    def apply(self, epoch: float, step: int) -> None:
        """Set the values for the step after `epoch` epochs and `step` steps."""
        if not self.layers:
            return
        if self.top_k_schedule:
            top_k = math.floor(self.top_k_schedule.value(epoch, step) + 0.5)
            for layer in self.layers:
                layer.top_k = top_k
            self.current["moe/top_k"] = top_k
        factors = self._capacity_factors()
        if factors:
            for layer, factor in zip(self.layers, factors, strict=True):
                layer.capacity_factor = self._for_layer(layer, factor)
            self.current["moe/capacity_factor"] = max(factors)

    def observe(self, needed_factors: Sequence[float]) -> None:
        """Count a step. `needed_factors` are the needed factors of its layers; none without
        CAPACITY_AUTO."""
        if needed_factors:
            self.needed.append(list(needed_factors))

    def state(self) -> list[list[float]]:
        """The state for a checkpoint, ready for JSON."""
        return list(self.needed)

    def load(self, state: list[list[float]], source: str) -> None:
        """Restore a state. Without CAPACITY_AUTO it is ignored.

        Args:
            source: the beginning of messages.

        Raises:
            UserError: the state has another number of layers; nothing changes.
        """
        if not self.is_automatic:
            return
        for factors in state:
            if len(factors) != len(self.layers):
                raise UserError(
                    f"{source}: needed_capacity has {len(factors)} layers, the model has"
                    f" {len(self.layers)}"
                )
        self.needed.clear()
        self.needed.extend(state)

    def _capacity_factors(self) -> list[float]:
        """The capacity factor of each layer; empty if the layers use the configured one."""
        if self.needed:
            return [max(factors) for factors in zip(*self.needed, strict=True)]
        return []

    def _for_layer(self, layer: MoEMlp, factor: float) -> float | Tensor:
        """The factor, as the layer's own tensor if each number would need another step."""
        moe = layer.moe
        if not self.keeps_steps or factor == 0 or moe.group.size > 1:
            return factor
        tensor = layer.capacity_factor
        if not isinstance(tensor, Tensor):
            device = next(moe.parameters()).device
            tensor = torch.empty((), dtype=torch.float64, device=device)
        return tensor.fill_(factor)


class Tuning:
    """The tuners of a model's layers: regular checks for a drift, and a record of decisions.

    There are none unless MODEL.MOE.STRATEGY is "auto" on several ranks. Each check is a collective.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tuners = strategy_tuners(model)

    def after_step(self, step: int) -> list[dict]:
        """Check the decided strategies every CHECK_STEPS steps, and return `take_events()`. Every
        rank calls this after each optimiser step."""
        if step % CHECK_STEPS == 0:
            for tuner in self._tuners:
                tuner.check()
        return self.take_events()

    def take_events(self) -> list[dict]:
        """The decisions and timings of the tuners since the last call, ready for JSON."""
        return [_as_record(event) for tuner in self._tuners for event in tuner.take_events()]


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
