"""The tuner over gloo: evaluation is searched too, and ranks agree on a drift."""

# T tokens of a rank

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches
from moe_cases import make_layer

from moe_core.parallel import PROFILES, ExpertGroup, ParallelStrategy, Tuner, make_expert_groups
from moe_core.parallel import tuner as tuner_module
from moe_core.parallel.tuner import tuners

SHAPE = {"model_dim": 8, "hidden_dim": 16, "num_experts": 4}
FIRST, SECOND = ParallelStrategy(1, ranks_per_node=2), ParallelStrategy(0, ranks_per_node=2)


class Times:
    """Seconds by strategy, in place of measured ones; each rank adds noise of its own."""

    def __init__(self, rank: int) -> None:
        self.noise = torch.Generator().manual_seed(rank)
        self.fastest = FIRST

    def seconds(self, trial) -> float:
        seconds = 1.0 + 0.5 * (trial.strategy != self.fastest)
        return seconds * (1 + 0.02 * torch.rand((), generator=self.noise).item())


def same_everywhere(value: object) -> bool:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def evaluate_and_train(rank: int) -> None:
    group = make_expert_groups(dist.get_world_size(), ranks_per_node=2)
    tuner = tuners[group] = Tuner(group, PROFILES["a100-hdr"], degrees=(1, 2))
    times = Times(rank)
    patches.setattr(tuner_module.Trial, "seconds", property(times.seconds))
    layer = make_layer(group=group, strategy="auto", capacity_factor=0.0, **SHAPE)
    expected = make_layer(group=ExpertGroup(dist.group.WORLD), capacity_factor=0.0, **SHAPE)
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
    assert set(tuner.decisions().values()) == {FIRST}

    for _ in range(10):
        train()
        evaluate()
    tuner.check()  # of the first window

    times.fastest = SECOND  # and the first is slower by half
    for step in range(1, 51):
        train()
        evaluate()
        if step % 10 == 0:
            tuner.check()
        assert same_everywhere(str(tuner.state_dict()))
    assert set(tuner.decisions().values()) == {SECOND}
    events = tuner.take_events()
    assert [event.kind for event in events].count("drift") == 2
    assert same_everywhere([str(event) for event in events])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluation_is_searched_and_ranks_agree(run_processes, ranks):
    run_processes(evaluate_and_train, ranks)
