"""Finds the fastest strategy for each layer shape and capacity while training runs.

1. A call's key is its layer's shape and the bucket of the capacity it needs now: rows of one rank
   for one expert, up to the next power of two. Layers of equal shape over one group share what is
   found.
2. The cost model ranks the strategies. In that order each is used for one training call, forward
   and backward, and timed; what is far behind goes, and the rest is tried again, interleaved, until
   one is left or eight rounds are over.
3. A budget bounds the time lost on strategies that turn out slower: 10 calls' worth of each layer,
   1% of 1,000 steps.

A timed call is an ordinary step of training: no strategy changes the result. Times are averaged
over the ranks before anyone looks at them, and everything else is a function of those, so the ranks
agree without asking.

Source: arXiv 2206.03382 (Tutel), section 3.2, which keeps such a dictionary; the search differs.
"""

# W ranks of the group, E experts, M model dim, H hidden dim, d pipeline degree

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moe_core.config import MoEConfig
from moe_core.parallel.calibration import calibrate
from moe_core.parallel.cost_model import LayerShape, ranked
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.machine import Machine
from moe_core.parallel.strategy import ParallelStrategy

_log = logging.getLogger(__name__)

# After each round a strategy stays if its median is within this factor of the best.
KEPT_WITHIN = (1.6, 1.3, 1.2, 1.15, 1.1, 1.1, 1.1, 1.1)
BUDGET = 10.0  # time lost per layer, in calls of the best strategy


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

    def shape(self) -> LayerShape:
        rows = 2**self.bucket
        tokens = max(rows * self.num_experts // self.top_k, 1)
        return LayerShape(
            tokens,
            self.model_dim,
            self.hidden_dim,
            self.num_experts,
            self.top_k,
            rows,
            self.element_size,
        )


Time = float | torch.cuda.Event  # of a CPU, of a GPU


class Trial:
    """One timed call: `begin` and `end` enclose what the strategy affects, forward and backward."""

    def __init__(self, key: Key, strategy: ParallelStrategy, is_warm_up: bool) -> None:
        self.key, self.strategy, self.is_warm_up = key, strategy, is_warm_up
        self._start: Time | None = None
        self._gradient_start: Time | None = None
        # Functions that return seconds.
        self._forward: Callable[[], float] | None = None
        self._backward: Callable[[], float] | None = None

    @property
    def finished(self) -> bool:
        return self._backward is not None

    @property
    def seconds(self) -> float:
        """Of the forward and of the backward part."""
        assert self._forward is not None
        assert self._backward is not None
        return self._forward() + self._backward()

    def begin(self, tokens: Tensor) -> Tensor:
        self._start = _now(tokens)
        return _Mark.apply(tokens, self._gradient_ends)

    def end(self, y: Tensor) -> Tensor:
        # Set at the end: where activations are recomputed, a forward pass may begin again and break
        # off.
        self._forward = _between(self._start, _now(y))
        return _Mark.apply(y, self._gradient_begins)

    def _gradient_begins(self, grad: Tensor) -> None:
        self._gradient_start = _now(grad)

    def _gradient_ends(self, grad: Tensor) -> None:
        self._backward = _between(self._gradient_start, _now(grad))


def _now(tensor: Tensor) -> Time:
    if not tensor.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start, end) -> Callable[[], float]:
    if isinstance(start, float):
        return lambda: end - start

    def seconds() -> float:
        end.synchronize()  # recorded in an earlier step, so it does not block
        return start.elapsed_time(end) / 1000

    return seconds


class _Mark(torch.autograd.Function):
    """The identity; calls `passed` with the gradient."""

    @staticmethod
    def forward(ctx, x, passed):
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.passed(grad)
        return grad, None


@dataclass
class _Search:
    """The state of the search for one key."""

    predicted: dict[ParallelStrategy, float]  # seconds, best first
    decided: ParallelStrategy | None = None
    seconds: dict[ParallelStrategy, list[float]] = field(default_factory=dict)
    queue: list[ParallelStrategy] = field(default_factory=list)  # of this round
    survivors: list[ParallelStrategy] = field(default_factory=list)
    under_way: int = 0
    rounds: int = 0

    def median(self, strategy: ParallelStrategy) -> float:
        return statistics.median(self.seconds[strategy])

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


class Tuner:
    """The decisions for all layers over one expert group; `MoELayer(strategy="auto")` asks
    `Tuner.of(group)`.

    Args:
        machine: for the cost model; None: measured at the first training call, in less than a
            second.
        degrees: pipeline degrees to try.
    """

    def __init__(
        self,
        group: ExpertGroup,
        machine: Machine | None = None,
        degrees: Sequence[int] = (1, 2, 4, 8),
    ) -> None:
        # not the group itself: a reference from its tuner would keep it alive
        self.ranks = group.ranks
        self.machine = machine
        self.degrees = tuple(degrees)
        try:
            self.ranks_per_node = group.ranks_per_node()
        except ValueError as error:
            _log.info("no all-to-all by node is tried: %s", error)
            self.ranks_per_node = group.size
        self.trials = 0
        self.lost = 0.0  # time spent on slower strategies, in calls of the best one
        self._searches: dict[Key, _Search] = {}
        self._open: WeakKeyDictionary[nn.Module, Trial | None] = WeakKeyDictionary()
        self._warm: set[tuple] = set()

    @classmethod
    def of(cls, group: ExpertGroup) -> "Tuner":
        """The group's tuner, which its layers share; made when first asked for."""
        if group not in tuners:
            tuners[group] = cls(group)
        return tuners[group]

    def key(
        self, config: MoEConfig, top_k: int, element_size: int, built_in: bool, capacity: int
    ) -> Key:
        """The key of a call with at most `capacity` rows of one rank for one expert; the same on
        all ranks."""
        return Key(
            config.model_dim,
            config.hidden_dim,
            config.num_experts,
            top_k,
            element_size,
            self.ranks.size,
            self.ranks_per_node,
            built_in,
            bucket=max(capacity - 1, 0).bit_length(),
        )

    def choose(
        self, layer: nn.Module, key: Key, explore: bool
    ) -> tuple[ParallelStrategy, Trial | None]:
        """The strategy of a call, and its trial if the call is one. All ranks of the group call
        this.

        The layer's last trial has to finish its backward pass before the next begins: gradient
        accumulation and recomputed activations repeat a strategy.
        """
        if not explore:
            return self._known(key), None
        trial = self._open.get(layer)
        if trial is not None and trial.finished:
            self._record(trial)
            trial = None
        if trial is None:
            trial = self._open[layer] = self._next_trial(key)
        if trial is not None and trial.key == key:
            return trial.strategy, trial
        return self._known(key), None

    def decisions(self) -> dict[Key, ParallelStrategy]:
        """The decided strategies, by key."""
        searches = self._searches.items()
        return {key: search.decided for key, search in searches if search.decided is not None}

    def state_dict(self) -> list[dict]:
        """The decisions as JSON values."""
        return [
            {"key": key._asdict(), "strategy": asdict(strategy)}
            for key, strategy in self.decisions().items()
        ]

    def load_state_dict(self, state: list[dict]) -> None:
        """Take over decisions; those of another group size or shape stay unused until it comes
        back."""
        for entry in state:
            strategy = ParallelStrategy(**entry["strategy"])
            self._searches[Key(**entry["key"])] = _Search({strategy: 0.0}, strategy)

    def _known(self, key: Key) -> ParallelStrategy:
        """The best strategy so far for this key, else for the nearest capacity, else the
        default."""
        if key in self._searches:
            return self._searches[key].best()
        others = [other for other in self._searches if other._replace(bucket=key.bucket) == key]
        if not others:
            return ParallelStrategy()
        nearest = min(others, key=lambda other: abs(other.bucket - key.bucket))
        return self._searches[nearest].best()

    def _next_trial(self, key: Key) -> Trial | None:
        if key not in self._searches:
            self._searches[key] = self._begin(key)
        search = self._searches[key]
        while search.queue:
            strategy = search.queue.pop(0)
            if self.lost + search.loss(strategy) <= BUDGET * max(len(self._open), 1):
                setup = (strategy.r, strategy.all_to_all, key.element_size)
                # communicators and buffers are made by the first call
                is_warm_up = setup not in self._warm
                if is_warm_up:
                    self._warm.add(setup)
                    search.queue.insert(0, strategy)
                search.under_way += 1
                return Trial(key, strategy, is_warm_up)
        if search.decided is None and search.under_way == 0:
            self._decide(key, search)
        return None

    def _begin(self, key: Key) -> _Search:
        if self.machine is None:
            ranks = self.ranks
            self.machine = calibrate(ranks.process_group, key.ranks_per_node, ranks.device)
        strategies = ranked(
            self.machine, key.shape(), key.group_size, key.ranks_per_node, self.degrees
        )
        predicted = {}
        for strategy, seconds in strategies:
            if key.built_in or strategy.r == 1:
                predicted[strategy] = seconds
        # a decision for another capacity predicts better than the cost model
        near = self._known(key)
        order = sorted(predicted, key=lambda strategy: strategy != near)
        return _Search(predicted, queue=order)

    def _record(self, trial: Trial) -> None:
        """Take in a finished trial; the ranks' mean, so that all of them go on alike."""
        total = torch.tensor(trial.seconds, dtype=torch.float64, device=self.ranks.device)
        self.ranks.all_reduce(total, "mean of trial times")
        seconds = total.item() / self.ranks.size
        search = self._searches[trial.key]
        search.under_way -= 1
        if search.decided is not None:  # loaded in the meantime
            return
        self.trials += 1
        if not trial.is_warm_up:
            search.seconds.setdefault(trial.strategy, []).append(seconds)
        if search.seconds:
            self.lost += max(seconds / search.median(search.best()) - 1, 0.0)
        if not search.queue and search.under_way == 0:
            if search.seconds:
                self._end_round(trial.key, search)
            else:  # the budget ended the search after a warm-up
                self._decide(trial.key, search)

    def _end_round(self, key: Key, search: _Search) -> None:
        best = search.median(search.best())
        limit = best * KEPT_WITHIN[search.rounds]
        search.rounds += 1
        tried_now = [s for s, seconds in search.seconds.items() if len(seconds) == search.rounds]
        search.survivors = [strategy for strategy in tried_now if search.median(strategy) <= limit]
        search.queue = list(search.survivors)
        if len(search.queue) < 2 or search.rounds == len(KEPT_WITHIN):
            self._decide(key, search)

    def _decide(self, key: Key, search: _Search) -> None:
        search.decided, search.queue = search.best(), []
        predicted = next(iter(search.predicted))
        _log.info(
            "M=%d H=%d E=%d K=%d over %d ranks, capacity up to %d: %s, %s; predicted %s, %s; %d"
            " tried in %d rounds",
            key.model_dim,
            key.hidden_dim,
            key.num_experts,
            key.top_k,
            key.group_size,
            2**key.bucket,
            search.decided,
            _milliseconds(search, search.decided),
            predicted,
            _milliseconds(search, predicted),
            len(search.seconds),
            search.rounds,
        )


def _milliseconds(search: _Search, strategy: ParallelStrategy) -> str:
    if strategy not in search.seconds:
        return "not tried"
    return f"{1000 * search.median(strategy):.2f} ms"


# by group; `Tuner.of` fills it
tuners: WeakKeyDictionary[ExpertGroup, Tuner] = WeakKeyDictionary()
