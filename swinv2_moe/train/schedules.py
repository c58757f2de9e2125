"""Top-k, capacity factor and share of random choices of the MoE layers at each training step.

A schedule depends on the position in the run alone. The automatic capacity depends on the last
steps, which a checkpoint holds. So a resumed run repeats what an uninterrupted one would have done.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swinv2_moe.config import ExpertsConfig, parse_schedule
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEMlp

STEPS = 16  # that the automatic capacity looks back


class RoutingSchedule:
    """MODEL.MOE.TOP_K_SCHEDULE, CAPACITY_SCHEDULE, CAPACITY_AUTO and RANDOM_CHOICE_SCHEDULE of a
    model.

    With CAPACITY_AUTO, the capacity factor of a layer is the largest that it needed in the last
    STEPS steps, on any rank. A needed factor is the smallest that drops at most the given share of
    a rank's choices. Before the first measurement, CAPACITY_FACTOR holds.

    Frozen layers and evaluation are not affected.

    Args:
        is_compiled: COMPILE; a new top-k is compiled once, a new capacity factor is not. The model
            is compiled once more when the share of random choices reaches 0.
    """

    def __init__(self, config: ExpertsConfig, model: nn.Module, is_compiled: bool = False) -> None:
        modules = model.modules()
        self.layers = [m for m in modules if isinstance(m, MoEMlp) and not m.frozen]
        self.top_k_schedule = parse_schedule(config.top_k_schedule)
        self.capacity_schedule = parse_schedule(config.capacity_schedule)
        self.random_schedule = parse_schedule(config.random_choice_schedule, may_reach_zero=True)
        self.is_automatic = config.capacity_auto
        # of the last steps, the factor that each layer needed; empty without CAPACITY_AUTO
        self.needed: deque[list[float]] = deque(maxlen=STEPS)
        self.is_compiled = is_compiled
        self.current: dict[str, float] = {}  # what changes during training, for the log

    def apply(self, epoch: float, step: int) -> None:
        """Set what the layers use in the step after so many epochs and steps."""
        if not self.layers:
            return
        if self.top_k_schedule:
            top_k = math.floor(self.top_k_schedule.value(epoch, step) + 0.5)
            for layer in self.layers:
                layer.top_k = top_k
            self.current["moe/top_k"] = top_k
        factors = self._capacity_factors(epoch, step)
        if factors:
            for layer, factor in zip(self.layers, factors, strict=True):
                layer.capacity_factor = self._for_layer(layer, factor)
            self.current["moe/capacity_factor"] = max(factors)
        if self.random_schedule:
            share = self.random_schedule.value(epoch, step)
            self._set_random_share(share)
            self.current["moe/random_share"] = share

    def observe(self, needed_factors: Sequence[float]) -> None:
        """Count a step, in which each layer needed these factors; none without CAPACITY_AUTO."""
        if needed_factors:
            self.needed.append(list(needed_factors))

    def state(self) -> list[list[float]]:
        """For a checkpoint, ready for JSON."""
        return list(self.needed)

    def load(self, state: list[list[float]], source: str) -> None:
        """Go on from a state; without CAPACITY_AUTO it is ignored.

        Args:
            source: the beginning of messages.

        Raises:
            UserError: it is of another number of layers; nothing changes.
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

    def _capacity_factors(self, epoch: float, step: int) -> list[float]:
        """Of each layer; empty where they are as configured."""
        if self.capacity_schedule:
            return [self.capacity_schedule.value(epoch, step)] * len(self.layers)
        if self.needed:
            return [max(factors) for factors in zip(*self.needed, strict=True)]
        return []

    def _set_random_share(self, share: float) -> None:
        """As one tensor for all layers, since a number would be compiled anew for each value; as
        the number 0 when there are no random choices any more."""
        value: float | Tensor = share
        if share > 0:
            # a fill; a copy would wait for the GPU
            device = next(self.layers[0].parameters()).device
            value = torch.full((), share, device=device)
        for layer in self.layers:
            layer.random_share = value

    def _for_layer(self, layer: MoEMlp, factor: float) -> float | Tensor:
        """The factor as a tensor where a number would be compiled anew for each value."""
        moe = layer.moe
        if not self.is_compiled or factor == 0 or moe.group.size > 1 or moe.config.round_to:
            return factor
        device = next(moe.parameters()).device
        return torch.full((), factor, dtype=torch.float64, device=device)
