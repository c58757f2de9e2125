"""Finds the fastest strategy for each layer shape and capacity while the layers are used.

1. The key of a call contains the shape of the layer, the capacity rounded up to a power of two
   (rows of one rank for one expert), and whether a backward pass follows. Layers of equal shape
   over one group share the decisions.
2. The cost model ranks the strategies. In this order each strategy is used for one call and timed:
   forward and backward in training, forward in inference. Strategies that are much slower are
   removed. The others are tried again in further rounds, until one is left or after eight rounds.
3. A budget limits the time lost on slower strategies: the time of 10 calls of each layer, which is
   1% of 1,000 steps.
4. After the decision, calls of this key exchange and read nothing for the tuner.

A timed call is an ordinary call, because no strategy changes the result. Decisions depend only on
times that are averaged over the ranks, so the ranks agree without a broadcast.

Source: arXiv 2206.03382 (Tutel), section 3.2, which also keeps decisions by key. The search
differs.
"""

# W ranks of the group, E experts, M model dim, H hidden dim, d pipeline degree

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from moe_core.config import MoEConfig
from moe_core.parallel.calibration import calibrate
from moe_core.parallel.cost_model import ranked
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.machine import Machine
from moe_core.parallel.search import KEPT_WITHIN, Key, Purpose, Search, Trial
from moe_core.parallel.strategy import ParallelStrategy
from moe_core.registry import ALL_TO_ALLS

_log = logging.getLogger(__name__)

BUDGET = 10.0  # time that may be lost per layer (separately in training and in inference), in calls
_MOST_EVENTS = 10_000  # events that are kept until `take_events`


@dataclass(frozen=True)
class TunerEvent:
    """A decision of the tuner.

    Attributes:
        key: the shape of the call and its phase, for which one strategy is decided.
        strategy: the decision.
        seconds: the time of one call with it, in training with the backward pass. None: the budget
            did not allow a trial.
        tried: the seconds of each measured strategy.
    """

    key: Key
    strategy: ParallelStrategy
    seconds: float | None
    tried: dict[ParallelStrategy, float]


class Tuner:
    """Decides on strategies for all layers over one expert group.

    `MoELayer(strategy="auto")` uses `Tuner.of(group)`.

    Args:
        machine: the machine of the cost model. None: it is measured at the first timed call, in
            about a second.
        degrees: pipeline degrees to try.

    Attributes:
        available: the all-to-all algorithms to try: those that are registered when the tuner is
            created, and available to the group.
    """

    def __init__(
        self,
        group: ExpertGroup,
        machine: Machine | None = None,
        degrees: Sequence[int] = (1, 2, 4, 8),
    ) -> None:
        # Not the group, because a reference from its tuner would keep it alive.
        self.ranks = group.ranks
        self.machine = machine
        self.degrees = tuple(degrees)
        try:
            self.ranks_per_node = group.ranks_per_node()
        except ValueError as error:
            _log.info("hierarchical all-to-alls are not tried: %s", error)
            self.ranks_per_node = group.size
        self.available = [name for name, a in ALL_TO_ALLS.items() if a.is_available(group)]
        self.trials = 0
        # Time lost on slower strategies, in calls of the best one: {training: time}.
        self.lost = {True: 0.0, False: 0.0}
        self._searches: dict[Key, Search] = {}
        # The current trial of each layer: {training: {layer: trial}}.
        self._open: dict[bool, WeakKeyDictionary[nn.Module, Trial | None]] = {
            True: WeakKeyDictionary(),
            False: WeakKeyDictionary(),
        }
        self._warm: set[tuple] = set()
        self._events: deque[TunerEvent] = deque(maxlen=_MOST_EVENTS)

    @classmethod
    def of(cls, group: ExpertGroup) -> "Tuner":
        """The tuner of the group, which all its layers share. The first call creates it."""
        if group not in tuners:
            tuners[group] = cls(group)
        return tuners[group]

    def key(
        self,
        config: MoEConfig,
        top_k: int,
        element_size: int,
        built_in: bool,
        capacity: int,
        training: bool = True,
        has_capacity: bool = True,
    ) -> Key:
        """The key of a call. It is the same on all ranks.

        Args:
            capacity: the largest number of rows of one rank for one expert.
            training: whether a backward pass follows.
            has_capacity: True: `capacity` is a limit, so a static exchange is possible. False:
                `capacity` is the mean load of a dropless layer.
        """
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
            training=training,
            has_capacity=has_capacity,
            gated=config.gated,
        )

    def choose(
        self, layer: nn.Module, key: Key, explore: bool
    ) -> tuple[ParallelStrategy, Trial | None]:
        """The strategy of a call, and the trial that times the call or None.

        All ranks of the group call this. The next trial of a layer starts after the backward pass
        of its last trial, so gradient accumulation and recomputation keep the strategy. After the
        decision for a key, this is not a collective and does not wait for the device.
        """
        if not explore or _is_capturing():
            return self._known(key), None
        open_trials = self._open[key.training]
        trial = open_trials.get(layer)
        if trial is not None and trial.finished:
            if trial.purpose != "held":
                self._record(trial)
            trial = None
        if trial is None:
            trial = open_trials[layer] = self._next_trial(key)
        if trial is not None and trial.key == key:
            return trial.strategy, trial
        return self._known(key), None

    def take_events(self) -> list[TunerEvent]:
        """The decisions since the last call, oldest first. They are the same on every rank."""
        events = list(self._events)
        self._events.clear()
        return events

    def decisions(self) -> dict[Key, ParallelStrategy]:
        """The decided strategy of each key."""
        searches = self._searches.items()
        return {key: search.decided for key, search in searches if search.decided is not None}

    def state_dict(self) -> list[dict]:
        """The decisions as JSON values."""
        return [
            {"key": key._asdict(), "strategy": asdict(strategy)}
            for key, strategy in self.decisions().items()
        ]

    def load_state_dict(self, state: list[dict]) -> None:
        """Load decisions. Decisions for another group size or shape stay unused until it occurs.

        Strategies whose all-to-all is not available to this group are ignored. A key without
        `training`, from an earlier version, is for training.
        """
        for entry in state:
            strategy = ParallelStrategy(**entry["strategy"])
            if strategy.all_to_all not in self.available:
                continue
            self._searches[Key(**entry["key"])] = Search({strategy: 0.0}, strategy)

    def _known(self, key: Key) -> ParallelStrategy:
        """The best known strategy for this key.

        If there is none, it is the strategy of the nearest capacity, or else a strategy of the
        other mode (training or inference), or else the default strategy.
        """
        if key in self._searches:
            return self._searches[key].best()
        others = [
            other
            for other in self._searches
            if other._replace(bucket=key.bucket, training=key.training) == key
        ]
        if not others:
            return ParallelStrategy()

        def distance(other: Key) -> tuple[bool, int]:
            return other.training != key.training, abs(other.bucket - key.bucket)

        return self._searches[min(others, key=distance)].best()

    def _next_trial(self, key: Key) -> Trial | None:
        if key not in self._searches:
            self._searches[key] = self._begin(key)
        search = self._searches[key]
        budget = BUDGET * max(len(self._open[key.training]), 1)
        while search.queue:
            strategy = search.queue.pop(0)
            if self.lost[key.training] + search.loss(strategy) <= budget:
                # The first call creates communicators and buffers.
                setup = (replace(strategy, pipeline_degree=1), key.element_size)
                purpose: Purpose = "timed"
                if setup not in self._warm:
                    purpose = "warm-up"
                    self._warm.add(setup)
                    search.queue.insert(0, strategy)
                search.under_way += 1
                return Trial(key, strategy, purpose, has_backward=key.training)
        if search.decided is None and search.under_way == 0:
            self._decide(key, search)
        if search.decided is not None:
            return None
        # Trials of other layers have not finished. Their results may change the best strategy.
        return Trial(key, search.best(), "held", has_backward=key.training)

    def _begin(self, key: Key) -> Search:
        if self.machine is None:
            ranks = self.ranks
            self.machine = calibrate(ranks.process_group, self.ranks_per_node, ranks.device)
        predicted = self._predict(key)
        # A decision for another capacity is a better prediction than that of the cost model.
        near = self._known(key)
        order = sorted(predicted, key=lambda strategy: strategy != near)
        return Search(predicted, queue=order)

    def _predict(self, key: Key) -> dict[ParallelStrategy, float]:
        """The predicted seconds of all strategies that the key allows, best first."""
        assert self.machine is not None
        predicted = {}
        for strategy, seconds in ranked(
            self.machine,
            key.shape(),
            key.group_size,
            key.ranks_per_node,
            self.degrees,
            self.available,
        ):
            if key.built_in or strategy.r == 1:
                predicted[strategy] = seconds
        return predicted

    def _record(self, trial: Trial) -> None:
        """Record a finished trial, with its time averaged over the ranks so that they agree."""
        total = torch.tensor(trial.seconds, dtype=torch.float64, device=self.ranks.device)
        self.ranks.all_reduce(total, "mean of trial times")
        seconds = total.item() / self.ranks.size
        search = self._searches[trial.key]
        search.under_way -= 1
        if search.decided is not None:  # a decision was loaded in the meantime
            return
        self.trials += 1
        if trial.purpose == "timed":
            search.seconds.setdefault(trial.strategy, []).append(seconds)
        if search.seconds:
            self.lost[trial.key.training] += max(seconds / search.median(search.best()) - 1, 0.0)
        if not search.queue and search.under_way == 0:
            if search.seconds:
                self._end_round(trial.key, search)
            else:  # the budget ended the search after a warm-up
                self._decide(trial.key, search)

    def _end_round(self, key: Key, search: Search) -> None:
        best = search.median(search.best())
        limit = best * KEPT_WITHIN[search.rounds]
        search.rounds += 1
        tried_now = [s for s, seconds in search.seconds.items() if len(seconds) == search.rounds]
        search.survivors = [strategy for strategy in tried_now if search.median(strategy) <= limit]
        search.queue = list(search.survivors)
        if len(search.queue) < 2 or search.rounds == len(KEPT_WITHIN):
            self._decide(key, search)

    def _decide(self, key: Key, search: Search) -> None:
        search.decided, search.queue = search.best(), []
        predicted = next(iter(search.predicted))
        medians = search.medians()
        self._events.append(TunerEvent(key, search.decided, medians.get(search.decided), medians))
        _log.info(
            "%s: %s, %s; predicted %s, %s; %d tried in %d rounds",
            key.describe(),
            search.decided,
            _milliseconds(search, search.decided),
            predicted,
            _milliseconds(search, predicted),
            len(search.seconds),
            search.rounds,
        )


def _milliseconds(search: Search, strategy: ParallelStrategy) -> str:
    if strategy not in search.seconds:
        return "not tried"
    return f"{1000 * search.median(strategy):.2f} ms"


def _is_capturing() -> bool:
    """Whether this call is captured in a CUDA graph, where nothing can be timed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# The tuner of each group. `Tuner.of` fills this dictionary.
tuners: WeakKeyDictionary[ExpertGroup, Tuner] = WeakKeyDictionary()
