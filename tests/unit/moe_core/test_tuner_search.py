"""The tuner over simulated ranks with a simulated clock: it finds the fastest strategy."""

# W ranks, in one thread each

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from moe_core import MoEConfig
from moe_core.parallel import PROFILES, ParallelStrategy, Tuner
from moe_core.parallel import search as search_module
from moe_core.parallel.cost_model import candidates, layer_time
from moe_core.parallel.search import Key, Trial

W, RANKS_PER_NODE = 4, 2
FAST = PROFILES["a100-hdr"]
SLOW = replace(FAST, inter=replace(FAST.inter, bandwidth=FAST.inter.bandwidth / 20))


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

    def __init__(self, rank: int, shared: Shared, training: bool, capacity: int, machine) -> None:
        self.training, self.machine = training, machine
        self.tuner = Tuner(SimulatedGroup(shared), FAST)  # which is not the machine
        config = MoEConfig(model_dim=1024, hidden_dim=4096, num_experts=4)
        self.key = self.tuner.key(config, 1, 2, True, capacity, training)
        self.layers = [nn.Identity(), nn.Identity()]
        self.noise = torch.Generator().manual_seed(rank)

    def seconds(self, strategy: ParallelStrategy) -> float:
        return layer_time(self.machine, self.key.shape(), W, strategy).total

    def best(self) -> float:
        return min(map(self.seconds, candidates(4, W, W // RANKS_PER_NODE)))

    def decided(self) -> ParallelStrategy | None:
        return self.tuner.decisions().get(self.key)

    def step(self, noise: float) -> float:
        """A call of each layer; seconds over those of the best strategy without noise."""
        total = 0.0
        for layer in self.layers:
            strategy, trial = self.tuner.choose(layer, self.key, explore=True)
            seconds = self.seconds(strategy)
            total += seconds
            factor = 1 + noise * torch.rand((), generator=self.noise).item()
            if trial is not None:
                call(trial, seconds * factor, self.training)
        return total / len(self.layers) / self.best()


def call(trial: Trial, seconds: float, training: bool) -> None:
    """Forward and, in training, backward of a layer; half of the time each."""

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
        with ThreadPoolExecutor(W) as pool:
            futures = [pool.submit(function, rank, shared) for rank in range(W)]
            return [future.result() for future in futures]

    return run


@pytest.mark.parametrize("noise", [0.02, 0.25])
@pytest.mark.parametrize("machine", [FAST, SLOW])
@pytest.mark.parametrize(("training", "capacity"), [(True, 64), (True, 16384), (False, 1024)])
def test_finds_the_fastest_and_is_silent_then(simulate, training, capacity, machine, noise):
    def find(rank: int, shared: Shared) -> tuple:
        run = Run(rank, shared, training, capacity, machine)
        for _ in range(83):
            ratio = run.step(noise)
        assert run.decided() is not None
        assert ratio < 1.1 + noise
        shared.barrier.wait()
        before = len(shared.collectives)
        assert len({run.step(noise) for _ in range(9)}) == 1
        shared.barrier.wait()
        assert len(shared.collectives) == before
        (event,) = run.tuner.take_events()
        assert event.strategy == run.decided()
        assert event.seconds == min(event.tried.values()) == event.tried[event.strategy]
        return run.tuner.state_dict(), event

    first, *others = simulate(find)
    assert all(other == first for other in others)


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
