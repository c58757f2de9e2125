"""The tuner over simulated ranks with a simulated clock: it follows a link whose rate changes."""

# W ranks, in one thread each

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from moe_core import MoEConfig
from moe_core.parallel import PROFILES, ParallelStrategy, Tuner
from moe_core.parallel import search as search_module
from moe_core.parallel import tuner as tuner_module
from moe_core.parallel.cost_model import candidates, layer_time
from moe_core.parallel.search import MOST_PATIENCE, Key, Trial, Watch, neighbourhood

W, RANKS_PER_NODE = 4, 2
CHECK_STEPS = 10
FAST = PROFILES["a100-hdr"]
SLOW = replace(FAST, inter=replace(FAST.inter, bandwidth=FAST.inter.bandwidth / 2))
VERY_SLOW = replace(FAST, inter=replace(FAST.inter, bandwidth=FAST.inter.bandwidth / 20))


class SimulatedRanks:
    """One rank's view of W threads."""

    process_group = None
    device = torch.device("cpu")
    size = W

    def __init__(self, shared: "Shared") -> None:
        self.shared = shared

    def all_reduce(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        self.shared.collectives.append(operation)
        total = self.shared.sum(values)
        return values.copy_(total)


class Shared:
    """What the threads exchange."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(W, timeout=240)
        self.values: list[torch.Tensor] = []
        self.collectives: list[str] = []
        self.lock = threading.Lock()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.values.append(values.clone())
        self.barrier.wait()
        total = torch.stack(self.values).sum(0)
        if self.barrier.wait() == 0:
            self.values.clear()
        self.barrier.wait()
        return total


class SimulatedGroup:
    size = W

    def __init__(self, shared: Shared) -> None:
        self.ranks = SimulatedRanks(shared)

    def ranks_per_node(self) -> int:
        return RANKS_PER_NODE


class Clock(threading.local):
    now = 0.0


class Run:
    """One rank's calls of layers of one shape."""

    def __init__(self, rank: int, shared: Shared, training: bool, capacity: int = 4096) -> None:
        self.shared, self.training = shared, training
        self.machine = FAST
        self.tuner = Tuner(SimulatedGroup(shared))
        config = MoEConfig(model_dim=1024, hidden_dim=4096, num_experts=4)
        self.key = self.tuner.key(config, 1, 2, True, capacity, training)
        self.layers = [nn.Identity(), nn.Identity()]
        self.noise = torch.Generator().manual_seed(rank)
        self.steps = 0

    def seconds(self, strategy: ParallelStrategy) -> float:
        return layer_time(self.machine, self.key.shape(), W, strategy).total

    def best(self) -> float:
        return min(map(self.seconds, candidates(4, W, W // RANKS_PER_NODE)))

    def decided(self) -> ParallelStrategy | None:
        return self.tuner.decisions().get(self.key)

    def step(self, noise: float = 0.02) -> float:
        """A call of each layer, and a check now and then; seconds over those of the best strategy
        without noise."""
        total = 0.0
        for layer in self.layers:
            strategy, trial = self.tuner.choose(layer, self.key, explore=True)
            seconds = self.seconds(strategy)
            total += seconds
            factor = 1 + noise * torch.rand((), generator=self.noise).item()
            call(trial, seconds * factor, self.training)
        self.steps += 1
        if self.steps % CHECK_STEPS == 0:
            self.tuner.check()
        return total / len(self.layers) / self.best()


def call(trial: Trial | None, seconds: float, training: bool) -> None:
    """Forward and, in training, backward of a layer; half of the time each."""
    assert trial is not None

    def spend(share: float) -> None:
        CLOCK.now += share * seconds

    x = torch.ones(1, requires_grad=training)
    x = trial.begin(x)
    y = x * 1
    spend(0.5)
    if training:
        y.register_hook(lambda _: spend(0.5))
    y = trial.end(y)
    if training:
        y.sum().backward()


CLOCK = Clock()


@pytest.fixture
def simulate(monkeypatch):
    """`simulate(function)` in W threads: what `function(rank, shared)` returns on each rank."""
    monkeypatch.setattr(search_module.time, "perf_counter", lambda: CLOCK.now)

    def run(function: Callable) -> list:
        shared = Shared()
        monkeypatch.setattr(tuner_module, "calibrate", lambda *_: MEASURED[0])
        with ThreadPoolExecutor(W) as pool:
            futures = [pool.submit(function, rank, shared) for rank in range(W)]
            return [future.result() for future in futures]

    return run


MEASURED = [FAST]


@pytest.mark.parametrize(
    ("training", "capacity", "after"),
    [(True, 64, VERY_SLOW), (True, 16384, SLOW), (False, 1024, VERY_SLOW)],
)
def test_follows_a_slower_link_within_50_steps(simulate, training, capacity, after):
    def follow(rank: int, shared: Shared) -> tuple:
        MEASURED[0] = FAST
        run = Run(rank, shared, training, capacity)
        for _ in range(83):
            ratio = run.step()
        assert run.decided() is not None
        assert ratio < 1.1
        before = run.seconds(run.decided())
        run.machine = MEASURED[0] = after
        is_drift = run.seconds(run.decided()) > 1.3 * before
        ratios = [run.step() for _ in range(100)]
        if is_drift:
            assert max(ratios[50:]) < 1.1, ratios
        else:
            assert len(set(ratios)) == 1
        return run.tuner.state_dict(), run.tuner.take_events()

    first, *others = simulate(follow)
    assert all(other == first for other in others)


def test_calls_after_the_decision_are_watched(simulate):
    """Layers do not measure forms of kernels in timed calls."""

    def purposes(rank: int, shared: Shared) -> list[str]:
        MEASURED[0] = FAST
        run = Run(rank, shared, training=True)
        found = []
        choose = run.tuner.choose

        def recorded(*arguments, **options):
            strategy, trial = choose(*arguments, **options)
            found.append(trial.purpose)
            return strategy, trial

        run.tuner.choose = recorded
        for _ in range(83):
            run.step()
        return found

    for found in simulate(purposes):
        assert found[0] == "warm-up"
        assert "timed" in found
        assert set(found[-20:]) == {"watched"}


def test_no_collective_once_decided(simulate):
    def count(rank: int, shared: Shared) -> list[str]:
        MEASURED[0] = FAST
        run = Run(rank, shared, training=True)
        while run.decided() is None or run.steps % CHECK_STEPS:
            run.step()
        shared.barrier.wait()
        before = len(shared.collectives)
        for _ in range(CHECK_STEPS - 1):
            run.step()
        shared.barrier.wait()
        return shared.collectives[before:]

    assert simulate(count) == [[]] * W


def test_noise_is_no_drift(simulate):
    def calm(rank: int, shared: Shared) -> list[str]:
        MEASURED[0] = FAST
        run = Run(rank, shared, training=True)
        for _ in range(120):
            run.step(noise=0.25)
        return [event.kind for event in run.tuner.take_events() if event.kind != "time"]

    assert simulate(calm) == [["decided"]] * W


def test_a_time_line(simulate):
    def tell(rank: int, shared: Shared) -> list:
        MEASURED[0] = FAST
        run = Run(rank, shared, training=True)
        for _ in range(80):
            run.step()
        run.machine = MEASURED[0] = VERY_SLOW
        for _ in range(80):
            run.step()
        return run.tuner.take_events()

    for events in simulate(tell):
        decided, drift, again = [event for event in events if event.kind != "time"]
        assert (decided.kind, drift.kind, again.kind) == ("decided", "drift", "decided")
        assert decided.before is None
        assert drift.before == drift.after == decided.after == again.before
        assert drift.seconds > 1.3 * drift.seconds_before
        assert again.seconds == min(again.tried.values()) == again.tried[again.after]
        assert again.before in again.tried
        assert sum(event.kind == "time" for event in events) >= 5


def test_a_confirmed_decision_makes_patient():
    watch = Watch(patience=2)
    drifted = [watch.has_drifted(seconds) for seconds in (1.0, 2.0, 2.0, 1.2, 0.7)]
    assert drifted == [False, False, True, False, True]
    search = tuner_module.Search({}, ParallelStrategy(), ParallelStrategy(), Watch(4))
    assert search.next_patience() == 8
    search.watch.patience = MOST_PATIENCE
    assert search.next_patience() == MOST_PATIENCE
    search.previous = ParallelStrategy(0)
    assert search.next_patience() == 1


def test_a_window_needs_calls():
    watch = Watch()
    key = Key(8, 8, 4, 1, 4, 4, 2, True, 3)
    for i in range(9):
        assert watch.median() is None
        trial = Trial(key, ParallelStrategy())
        watch.trials.append(trial)
        if i:  # the first one has broken off, as recomputed calls do
            trial.end(trial.begin(torch.ones(1)))
    assert watch.median() is not None


class Event:
    """In place of a CUDA event, which a device has passed or not."""

    passed: ClassVar[set["Event"]] = set()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def query(self) -> bool:
        return self in self.passed

    def synchronize(self) -> None:
        assert self.query(), "the host would wait"

    def elapsed_time(self, end: "Event") -> float:
        assert end.query()
        return 2.0


def test_a_window_does_not_wait_for_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Watch()
    tensor = SimpleNamespace(is_cuda=True)
    for _ in range(8):
        assert watch.median() is None
        trial = Trial(Key(8, 8, 4, 1, 4, 4, 2, True, 3), ParallelStrategy())
        watch.trials.append(trial)
        trial.end(trial.begin(tensor))
    assert watch.median() is None
    for trial in watch.trials:
        Event.passed.update(trial._forward)
    assert watch.median() == 0.002


def test_neighbours_differ_in_one_property():
    predicted = {strategy: float(i) for i, strategy in enumerate(candidates(1, 4, 2, (1, 2)))}
    decided = ParallelStrategy(2, 2, "2dh", 2)
    tried = list(neighbourhood(decided, predicted))
    assert tried[0] == decided
    best = next(iter(predicted))
    for strategy in tried[1:]:
        same = (strategy.r == 2) + (strategy.pipeline_degree == 2) + (strategy.all_to_all == "2dh")
        assert same == 2 or strategy.r == 0 or strategy == best
    # the weights are gathered: no other property applies
    assert len(neighbourhood(ParallelStrategy(0, ranks_per_node=2), predicted)) == 7


def test_a_key_of_an_earlier_version_is_one_of_training():
    tuner = Tuner(SimulatedGroup(Shared()), FAST)
    key = Key(8, 16, 4, 1, 4, W, 2, True, 3)
    old = key._asdict()
    del old["training"]
    tuner.load_state_dict([{"key": old, "strategy": {"r": 0, "ranks_per_node": 2}}])
    assert tuner.decisions() == {key: ParallelStrategy(0, ranks_per_node=2)}
    # inference begins with what training has
    inference = key._replace(training=False)
    assert tuner.choose(nn.Identity(), inference, explore=False)[0].r == 0


def test_keys_round_the_capacity_up_to_a_power_of_two():
    tuner = Tuner(SimulatedGroup(Shared()), FAST)
    buckets = [tuner.key(MoEConfig(8, 16, 4), 1, 4, True, n).bucket for n in (0, 1, 2, 7, 8, 9)]
    assert buckets == [0, 0, 1, 3, 3, 4]
