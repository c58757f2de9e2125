"""The tuner over ranks: they agree, results are those of training without it, decisions are kept,
evaluation is searched too."""

# T tokens of a rank

import json

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches
from moe_cases import make_layer
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_core.parallel import PROFILES, ExpertGroup, ParallelStrategy, Tuner, make_expert_groups
from moe_core.parallel import tuner as tuner_module
from moe_core.parallel.tuner import tuners

SHAPE = {"model_dim": 8, "hidden_dim": 16}


def tuned_group(ranks_per_node: int = 2, degrees=(1, 2)) -> ExpertGroup:
    group = make_expert_groups(dist.get_world_size(), ranks_per_node=ranks_per_node)
    tuners[group] = Tuner(group, PROFILES["a100-hdr"], degrees)
    return group


def same_everywhere(value: object) -> bool:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def step(layers, x: torch.Tensor, wrap=lambda layer, x: layer(x), **call) -> torch.Tensor:
    y, total = x.detach().requires_grad_(), 0
    for layer in layers:
        y, aux_loss = wrap(layer, y, **call) if call else wrap(layer, y)
        total = total + aux_loss
    loss = y.square().sum() + total
    loss.backward()
    return loss.detach()


def finds_the_fastest(rank: int) -> None:
    """Seconds are replaced by a function of the strategy, with a little noise: the best of them has
    to win."""
    group = tuned_group()
    fastest = ParallelStrategy(2, 2, "2dh", 2)
    noise = torch.Generator().manual_seed(rank)

    def seconds(trial) -> float:
        distance = abs(trial.strategy.r - 2) + abs(trial.strategy.pipeline_degree - 2)
        distance += trial.strategy.all_to_all != "2dh"
        return 1 + 0.2 * distance + 0.02 * torch.rand((), generator=noise).item()

    patches.setattr(tuner_module.Trial, "seconds", property(seconds))
    layer = make_layer(group=group, num_experts=2, strategy="auto", **SHAPE)
    expected = make_layer(group=ExpertGroup(dist.group.WORLD), num_experts=2, **SHAPE)
    x = torch.randn(6, 8, dtype=torch.float64)
    for _ in range(40):
        torch.testing.assert_close(step([layer], x), step([expected], x))
        assert same_everywhere(str(tuners[group].state_dict()))
    assert list(tuners[group].decisions().values()) == [fastest]
    assert tuners[group].lost[True] < tuner_module.BUDGET
    for name, parameter in layer.named_parameters():  # all steps' gradients, whatever was tried
        torch.testing.assert_close(parameter.grad, expected.get_parameter(name).grad)
    check_state(tuners[group], layer, x, fastest)


def check_state(tuner: Tuner, layer: nn.Module, x: torch.Tensor, fastest: ParallelStrategy) -> None:
    state = json.loads(json.dumps(tuner.state_dict()))
    fresh = tuners[layer.group] = Tuner(layer.group, PROFILES["h100"])
    fresh.load_state_dict(state)
    trials = tuner.trials
    step([layer], x)
    step([layer], x)
    assert fresh.state_dict() == state
    assert fresh.trials == 0
    assert tuner.trials == trials


def test_finds_the_fastest_and_keeps_it(run_processes):
    run_processes(finds_the_fastest, 4)


def respects_its_limits(rank: int) -> None:
    group = tuned_group()
    layers = nn.ModuleList(
        make_layer(seed, group=group, num_experts=4, capacity_factor=0.0, strategy="auto", **SHAPE)
        for seed in (0, 1)
    )
    tuner = tuners[group]
    x = torch.randn(9, 8, dtype=torch.float64)
    # evaluation with gradients, and training without, leave it alone
    layers.eval()
    step(layers, x)
    layers.train()
    with torch.no_grad():
        layers[0](x)
    assert tuner.trials == 0
    assert not tuner._searches

    # recomputed activations and accumulated gradients repeat a trial's strategy
    def recomputed(layer, x):
        return checkpoint(layer, x, use_reentrant=False)

    for _ in range(5):
        step(layers, x, recomputed)
    assert 0 < tuner.trials <= 2 * 5
    # fluctuating capacity: a search for each bucket
    for i in range(24):
        rows = torch.randn((3, 9, 40, 130)[i % 4] + rank, 8, dtype=torch.float64)
        step(layers, rows)
    buckets = {key.bucket for key in tuner._searches}
    assert len(buckets) >= 3
    assert same_everywhere([str(key) for key in tuner._searches])
    assert same_everywhere(tuner.lost)
    assert same_everywhere(tuner.trials)
    # a capacity never seen takes the nearest one's
    layers.eval()
    searches = len(tuner._searches)
    layers[0](torch.randn(4000, 8, dtype=torch.float64))
    assert len(tuner._searches) == searches
    with pytest.raises(
        ValueError, match="strategy \\('fast'\\) must be a ParallelStrategy or 'auto'"
    ):
        layers[0](x, strategy="fast")


def without_budget(rank: int) -> None:
    """Spent in the middle of the first warm-up: the prediction stays."""
    group = tuned_group()
    layers = [
        make_layer(seed, group=group, num_experts=4, strategy="auto", **SHAPE) for seed in (0, 1)
    ]
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    y, _ = layers[0](x)
    tuners[group].lost[True] = 1e9
    layers[1](y)[0].sum().backward()
    for _ in range(3):
        step(layers, x)
    (search,) = tuners[group]._searches.values()
    assert search.decided == next(iter(search.predicted))
    assert search.seconds == {}
    assert tuners[group].trials == 1


def test_a_spent_budget_leaves_the_prediction(run_processes):
    run_processes(without_budget, 2)


def test_respects_its_limits(run_processes):
    run_processes(respects_its_limits, 4)


def spends_little(rank: int) -> None:
    """Strategies that are much slower than the best cost no more than the budget."""
    group = tuned_group(degrees=(1, 2, 4, 8))
    patches.setattr(
        tuner_module.Trial,
        "seconds",
        property(lambda trial: 1.0 + 9 * (trial.strategy != ParallelStrategy(0, ranks_per_node=2))),
    )
    layer = make_layer(group=group, num_experts=2, strategy="auto", **SHAPE)
    for _ in range(40):
        step([layer], torch.randn(6, 8, dtype=torch.float64))
    assert tuners[group].lost[True] <= tuner_module.BUDGET + 9
    assert list(tuners[group].decisions().values()) == [ParallelStrategy(0, ranks_per_node=2)]


def test_spends_no_more_than_its_budget(run_processes):
    run_processes(spends_little, 4)


def calibrates(rank: int) -> None:
    group = make_expert_groups(2)  # no node shape: 2dh is left out
    layer = make_layer(group=group, num_experts=4, strategy="auto", **SHAPE)
    for _ in range(30):
        step([layer], torch.randn(6, 8, dtype=torch.float64))
    assert same_everywhere(str(tuners[group].machine))
    assert {
        s.all_to_all for search in tuners[group]._searches.values() for s in search.predicted
    } == {"linear"}


def test_measures_the_machine_when_none_is_named(run_processes):
    run_processes(calibrates, 2)


# --- evaluation

FASTEST = ParallelStrategy(1, ranks_per_node=2)


class Times:
    """Seconds by strategy, in place of measured ones; each rank adds noise of its own."""

    def __init__(self, rank: int) -> None:
        self.noise = torch.Generator().manual_seed(rank)

    def seconds(self, trial) -> float:
        seconds = 1.0 + 0.5 * (trial.strategy != FASTEST)
        return seconds * (1 + 0.02 * torch.rand((), generator=self.noise).item())


def evaluate_and_train(rank: int) -> None:
    group = tuned_group()
    tuner, times = tuners[group], Times(rank)
    patches.setattr(tuner_module.Trial, "seconds", property(times.seconds))
    config = {**SHAPE, "num_experts": 4, "capacity_factor": 0.0}
    layer = make_layer(group=group, strategy="auto", **config)
    expected = make_layer(group=ExpertGroup(dist.group.WORLD), **config)
    x = torch.randn(12, 8, dtype=torch.float64)

    def evaluate() -> None:
        layer.eval()
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), expected.eval()(x))

    def train() -> None:
        layer.train()
        y, aux_loss = layer(x)
        (y.sum() + aux_loss).backward()

    for _ in range(30):
        evaluate()
    assert [key.training for key in tuner.decisions()] == [False]
    for _ in range(30):
        train()
    assert [key.training for key in tuner.decisions()] == [False, True]
    assert set(tuner.decisions().values()) == {FASTEST}
    assert same_everywhere(str(tuner.state_dict()))
    assert same_everywhere([str(event) for event in tuner.take_events()])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluation_is_searched_and_ranks_agree(run_processes, ranks):
    run_processes(evaluate_and_train, ranks)
