"""The search for one key: what it is about, what it has measured, and when it begins again."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from moe_core.parallel.cost_model import LayerShape
from moe_core.parallel.strategy import ParallelStrategy
from moe_core.parallel.trial import Trial

# After each round a strategy stays if its median is within this factor of the best.
KEPT_WITHIN = (1.6, 1.3, 1.2, 1.15, 1.1, 1.1, 1.1, 1.1)
# A decided strategy has drifted if its time is this factor above or below that of its first window.
DRIFT = 1.3
SHORTEST_WINDOW = 8  # calls
LONGEST_WINDOW = 64  # calls; the newest of them
# A search that confirms the decision doubles the windows until a drift counts again, up to these.
MOST_PATIENCE = 16
NEIGHBOURS = 6  # that a new search tries, besides the decided strategy and the predicted one


class Key(NamedTuple):
    """All that a decision depends on, besides the machine."""

    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    element_size: int  # bytes of a row's elements
    group_size: int
    ranks_per_node: int
    built_in: bool  # whether the experts' weights may travel
    bucket: int  # 2**bucket is the capacity's upper bound
    training: bool = True  # forward and backward; False: forward alone
    has_capacity: bool = False  # False: dropless, and the bucket is that of the mean load

    def shape(self) -> LayerShape:
        rows = 2**self.bucket
        tokens = max(rows * self.num_experts // self.top_k, 1)
        capacity = None
        if self.has_capacity:
            capacity = rows
        return LayerShape(
            tokens,
            self.model_dim,
            self.hidden_dim,
            self.num_experts,
            self.top_k,
            rows,
            self.element_size,
            self.training,
            capacity=capacity,
        )

    def describe(self) -> str:
        text = (
            f"M={self.model_dim} H={self.hidden_dim} E={self.num_experts} K={self.top_k}"
            f" over {self.group_size} ranks, capacity up to {2**self.bucket}"
        )
        if not self.training:
            text += ", inference"
        return text


@dataclass
class Watch:
    """Forward times of a decided strategy. A window is what comes between two checks."""

    patience: int = 1  # windows before a drift counts
    windows: int = 0
    first: float | None = None  # seconds of a call in the first window
    trials: deque[Trial] = field(default_factory=lambda: deque(maxlen=LONGEST_WINDOW))

    def median(self) -> float | None:
        """Seconds of a call in this window; None: too few calls. Does not wait for the device."""
        seconds = [trial.seconds for trial in self.trials if trial.ready]
        if len(seconds) < SHORTEST_WINDOW:
            return None
        return statistics.median(seconds)

    def has_drifted(self, seconds: float) -> bool:
        """End the window, whose calls took `seconds` on average over the ranks."""
        self.trials.clear()
        self.windows += 1
        if self.first is None:
            self.first = seconds
        is_far = seconds > DRIFT * self.first or self.first > DRIFT * seconds
        return is_far and self.windows > self.patience


@dataclass
class Search:
    """The state of the search for one key.

    Args:
        predicted: seconds of the strategies to try; the first is used before any is measured.
        previous: the decision before a drift; None in the first search.
    """

    predicted: dict[ParallelStrategy, float]
    decided: ParallelStrategy | None = None
    previous: ParallelStrategy | None = None
    watch: Watch = field(default_factory=Watch)
    seconds: dict[ParallelStrategy, list[float]] = field(default_factory=dict)
    queue: list[ParallelStrategy] = field(default_factory=list)  # of this round
    survivors: list[ParallelStrategy] = field(default_factory=list)
    under_way: int = 0
    rounds: int = 0
    most_rounds: int = len(KEPT_WITHIN)

    def median(self, strategy: ParallelStrategy) -> float:
        return statistics.median(self.seconds[strategy])

    def medians(self) -> dict[ParallelStrategy, float]:
        """Seconds by strategy, of all that were measured."""
        return {strategy: self.median(strategy) for strategy in self.seconds}

    def best(self) -> ParallelStrategy:
        """The fastest one measured, else the one predicted."""
        if self.decided is not None:
            return self.decided
        rivals = self.survivors or list(self.seconds) or [next(iter(self.predicted))]
        if not self.seconds:
            return rivals[0]
        return min(rivals, key=self.median)

    def loss(self, strategy: ParallelStrategy) -> float:
        """Expected cost of one more trial over a call of the best strategy, in such calls."""
        if not self.seconds:
            return 0.0
        if strategy in self.seconds:
            return self.median(strategy) / self.median(self.best()) - 1
        return max(self.predicted[strategy] / self.predicted.get(self.best(), 1.0) - 1, 0.0)

    def next_patience(self) -> int:
        """Of the watch after this search."""
        if self.decided != self.previous:
            return 1
        return min(2 * self.watch.patience, MOST_PATIENCE)


def neighbourhood(
    decided: ParallelStrategy, predicted: dict[ParallelStrategy, float]
) -> dict[ParallelStrategy, float]:
    """What a new search tries: the decided strategy, those that differ in one property, best first,
    and the best prediction.

    Args:
        predicted: seconds of all candidates, best first.
    """
    near = [strategy for strategy in predicted if _num_differences(strategy, decided) == 1]
    tried = [decided] + near[:NEIGHBOURS] + list(predicted)[:1]
    slowest = max(predicted.values())  # for a loaded strategy that is no candidate here
    return {strategy: predicted.get(strategy, slowest) for strategy in tried}


def _num_differences(a: ParallelStrategy, b: ParallelStrategy) -> int:
    """The number of properties in which two strategies differ. With r = 0 no other applies."""
    names: Sequence[str] = [f.name for f in fields(ParallelStrategy) if f.name != "ranks_per_node"]
    if a.r == 0 or b.r == 0:
        names = ["r"]
    return sum(getattr(a, name) != getattr(b, name) for name in names)
