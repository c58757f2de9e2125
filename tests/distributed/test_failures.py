"""A rank that dies or does not come, and wrong arguments: an error in time, on every rank, that
names what is wrong."""

# All scenarios of lost ranks run side by side, each in a world of its own: what they do is wait.

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo_processes import recorded_calls
from moe_cases import make_layer
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer, average_expert_gradients, clip_gradients
from moe_core.parallel import ExpertGroup, ParallelStrategy, all_to_all, make_expert_groups

TIMEOUT = 4  # seconds, of the expert group
LOST = 2  # the rank that goes missing
LINEAR, HIERARCHICAL = ParallelStrategy(1, 2), ParallelStrategy(1, 2, "2dh", 2)
WEIGHTS = ParallelStrategy(0)


class Scenario(NamedTuple):
    """Where rank 2 goes missing, what the group does then, and which ranks share it.

    `alone`: the group is one of a process group alone, without what make_expert_groups adds.
    """

    moment: str
    strategy: ParallelStrategy = LINEAR
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    alone: bool = False
    capacity_factor: float = 0.0
    dies: bool = True

    def __str__(self) -> str:
        end = "dies" if self.dies else "does not come"
        group = f"ranks {list(self.ranks)}{' alone' if self.alone else ''}"
        return f"{end} {self.moment} {self.strategy} {group} f={self.capacity_factor}"


SCENARIOS = [
    *(Scenario("among the experts", strategy) for strategy in (LINEAR, HIERARCHICAL, WEIGHTS)),
    *(Scenario("before backward", strategy, dies=False) for strategy in (HIERARCHICAL, WEIGHTS)),
    *(Scenario("before the first forward", strategy, dies=False) for strategy in (LINEAR, WEIGHTS)),
    Scenario("before the second forward", capacity_factor=1.0, dies=False),
    Scenario("before backward", ranks=(0, 2), alone=True),
    *(Scenario("among the experts", strategy, alone=True) for strategy in (HIERARCHICAL, WEIGHTS)),
    Scenario("before the first forward", alone=True, dies=False),
    Scenario("before the groups are made", dies=False),
    Scenario("before all_to_all", dies=False),
    Scenario("before averaging", dies=False),
    Scenario("before the norm", dies=False),
]


def goes_missing(rank: int, scenario: Scenario, *args) -> None:
    if rank == LOST and scenario.dies:
        os._exit(3)
    if rank == LOST:
        time.sleep(1000)


def act(rank: int, scenario: Scenario) -> None:
    """One step and a half, up to the moment."""
    moment, timeout = scenario.moment, timedelta(seconds=TIMEOUT)
    replicated = moment in ("before averaging", "before the norm")
    if scenario.alone:
        process_group = dist.new_group(list(scenario.ranks), timeout=timeout)
        if rank not in scenario.ranks:
            return
        group = ExpertGroup(process_group)
    else:
        if moment == "before the groups are made":
            goes_missing(rank, scenario)
        group = make_expert_groups(2 if replicated else 4, timeout, ranks_per_node=2)
    group.for_torch_tools = False  # `average_expert_gradients` sums over the replicas
    config = {"model_dim": 8, "hidden_dim": 16, "capacity_factor": scenario.capacity_factor}
    layer = make_layer(group=group, strategy=LINEAR if replicated else scenario.strategy, **config)
    x = torch.ones(5, 8).double().requires_grad_()
    if moment == "before the first forward":
        goes_missing(rank, scenario)
    if moment == "among the experts":
        layer.experts.register_forward_pre_hook(lambda *args: goes_missing(rank, scenario))
    y, aux_loss = layer(x)
    if moment == "before the second forward":
        goes_missing(rank, scenario)
        layer(x)
    if moment == "before all_to_all":
        goes_missing(rank, scenario)
        all_to_all(torch.ones(4), group)
    if moment == "before backward":
        goes_missing(rank, scenario)
    (y.sum() + aux_loss).backward()
    if moment == "before averaging":
        goes_missing(rank, scenario)
    average_expert_gradients(layer)
    goes_missing(rank, scenario)
    clip_gradients(layer, 1.0)


def error_of(rank: int, scenario: Scenario) -> str:
    """What this rank raised; "" if it raised nothing."""
    try:
        act(rank, scenario)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def messages(run_processes) -> dict[Scenario, list[str]]:
    """The errors of each scenario by rank.

    The world's process group waits for 240 s, so that what ends the wait in 200 s is the
    timeout of the expert group's process groups.
    """
    run = functools.partial(run_processes, error_of, 4, ending=[LOST], seconds=200)
    with ThreadPoolExecutor(len(SCENARIOS)) as threads:
        return dict(zip(SCENARIOS, threads.map(run, SCENARIOS), strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_others_name_the_group_in_time_and_can_end(messages, scenario):
    members, groups = scenario.ranks, [list(scenario.ranks)]
    if scenario.moment in ("before averaging", "before the norm"):
        members, groups = [0, 2], [[0, 1], [2, 3]]
    named = [f"expert group of ranks {ranks}" for ranks in groups]
    if scenario.moment == "before the groups are made":
        named = ["making the process groups of experts failed on rank"]
    waiting = [rank for rank in members if rank != LOST]
    if scenario.moment == "before the norm":
        waiting = [3]
    for rank in waiting:
        message = messages[scenario][rank]
        assert any(name in message for name in named), (rank, messages[scenario])


# Wrong arguments: a ValueError on every rank, before any of them waits for another

COLLECTIVES = (
    *(
        "all_reduce",
        "all_to_all_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_gather_object",
    ),
    *("broadcast", "barrier", "new_group", "new_subgroups_by_enumeration"),
)
CONFIG = {"model_dim": 8, "hidden_dim": 16}


class Wrong(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return self.change(rows)


def wrong_layers(group: ExpertGroup) -> list[tuple[Callable, str]]:
    def layer(num_experts: int, strategy=LINEAR, experts=None, **config) -> Callable:
        config = MoEConfig(num_experts=num_experts, **{**CONFIG, **config})
        return lambda: MoELayer(config, group, strategy=strategy, experts=experts)

    odd = ParallelStrategy(1, 1, "2dh", 3)
    return [
        (layer(6), r"num_experts \(6\) .*size \(4\)"),
        (layer(3), r"num_experts \(3\) .*size \(4\)"),
        (layer(1, hidden_dim=10), r"hidden_dim \(10\) .* 4 ranks"),
        (layer(2, model_dim=7), r"model_dim \(7\) .* 2 ranks"),
        (
            layer(2, ParallelStrategy(3)),
            r"r \(3\).*num_experts \(2\).* 4: it must be one of 0, 1, 2$",
        ),
        (layer(4, ParallelStrategy(2)), r"r \(2\).*num_experts \(4\).* 4: it must be one of 0, 1$"),
        (layer(4, odd), r"ranks_per_node \(3\) .*size \(4\)"),
        (layer(4, ParallelStrategy(1, 1, "2dh")), r"ranks_per_node .*LOCAL_WORLD_SIZE"),
        (layer(2, experts=Wrong(torch.clone)), r"num_experts \(2\) .*size \(4\)"),
        (layer(4, ParallelStrategy(0), Wrong(torch.clone)), r"r \(0\)"),
        (lambda: make_expert_groups(3), r"expert_parallel_size \(3\) .*ranks \(4\)"),
        (lambda: make_expert_groups(0), r"expert_parallel_size \(0\) .*ranks \(4\)"),
        *(
            (lambda v=v: ParallelStrategy(**v), r"\(-?\w+\.?\w*\) must be")
            for v in ({"r": -1}, {"r": True}, {"r": 1.0})
        ),
        (lambda: ParallelStrategy(pipeline_degree=0), r"pipeline_degree \(0\)"),
        (lambda: ParallelStrategy(ranks_per_node=0), r"ranks_per_node \(0\)"),
        (lambda: ParallelStrategy(all_to_all="3dh"), r"all_to_all \('3dh'\).*linear, 2dh"),
    ]


def wrong_calls(group: ExpertGroup) -> list[tuple[Callable, str]]:
    layer, x = MoELayer(MoEConfig(num_experts=2, **CONFIG), group), torch.ones(5, 8)
    changes = (
        (lambda rows: rows[:, :3], r"\(2, 3\) for rows of shape \(2, 8\)"),
        (lambda rows: rows.sum(0), r"\(8,\) for rows of shape \(2, 8\)"),
        (lambda rows: rows[:-1], r"\(1, 8\) for rows of shape \(2, 8\)"),
    )
    own = [
        MoELayer(MoEConfig(num_experts=8, **CONFIG), group, experts=Wrong(change))
        for change, _ in changes
    ]
    strategies = [
        (ParallelStrategy(4), r"r \(4\).*num_experts \(2\).* 4: it must be one of 0, 1, 2$"),
        (ParallelStrategy(1, 1, "2dh", 3), r"ranks_per_node \(3\) .*size \(4\)"),
        (ParallelStrategy(1, 2, "2dh"), r"LOCAL_WORLD_SIZE"),
    ]
    return [
        (lambda: layer(x.to("meta")), r"x is on meta, .* on cpu"),
        (lambda: layer(torch.ones(5, 7)), r"7 channels.* 8"),
        (lambda: layer(x, top_k=0), r"top_k \(0\)"),
        (lambda: layer(x, capacity_factor=float("inf")), r"capacity_factor \(inf\)"),
        (lambda: layer(x, capacity_factor=float("nan")), r"capacity_factor \(nan\)"),
        (lambda: layer(x, router=1), r"router \(1\) .*routers \(1\)"),
        (lambda: layer(x, router=-1), r"router \(-1\) .*routers \(1\)"),
        *((lambda s=s: layer(x, strategy=s), message) for s, message in strategies),
        *(
            (lambda wrong=wrong: wrong(x), message)
            for wrong, (_, message) in zip(own, changes, strict=True)
        ),
    ]


def wrong_arguments(rank: int) -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    group = make_expert_groups(4)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"):
        group.ranks_per_node()  # here alone ranks compare what they know first, once
    names = recorded_calls(COLLECTIVES)
    for call, message in wrong_layers(group) + wrong_calls(group):
        with pytest.raises(ValueError, match=message):
            call()
        assert names == [], message
    layer = make_layer(group=group, capacity_factor=1.0, **CONFIG)
    for strategy in (LINEAR, WEIGHTS):  # and what is right does enter them
        layer(torch.ones(5, 8).double(), strategy=strategy)[0].sum().backward()
    assert {
        "all_reduce",
        "all_to_all_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    } <= set(names)


def test_wrong_arguments_are_refused_before_any_collective(run_processes):
    run_processes(wrong_arguments, 4, seconds=30)
