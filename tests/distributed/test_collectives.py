"""Which collectives a layer makes in a step."""

from dataclasses import asdict

import torch
from gloo_processes import recorded_calls
from moe_cases import make_layer

from moe_core import equal_tokens
from moe_core.parallel import PROFILES, ParallelStrategy, Tuner, make_expert_groups
from moe_core.parallel.tuner import tuners

COLLECTIVES = [
    "all_to_all_single",
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "barrier",
    "all_gather_object",
    "isend",
    "irecv",
]
# forward and backward, by strategy
EXPECTED = {
    # the choices of each rank; rows to their experts, and back
    ParallelStrategy(1): (["all_to_all_single"] * 3, ["all_to_all_single"] * 2),
    ParallelStrategy(1, 3): (["all_to_all_single"] * 7, ["all_to_all_single"] * 6),
    # the number of tokens; w1, b1, w2, b2
    ParallelStrategy(0): (
        ["all_reduce"] + ["all_gather_into_tensor"] * 4,
        ["reduce_scatter_tensor"] * 4,
    ),
    # the number of tokens; rows to their experts, and back
    ParallelStrategy(exchange="static"): (
        ["all_reduce"] + ["all_to_all_single"] * 2,
        ["all_to_all_single"] * 2,
    ),
}


def makes_these_alone(rank: int) -> None:
    calls = recorded_calls(COLLECTIVES)
    group = make_expert_groups(2)
    group.for_torch_tools = False  # without the averages of DistributedDataParallel
    layer = make_layer(group=group, capacity_factor=1.25)
    calls.clear()
    for strategy, expected in EXPECTED.items():
        for num_tokens in (6 + rank, 9):  # also where the number of tokens changes
            assert step(layer, num_tokens, strategy, calls) == expected, strategy
    without_all_reduce = {
        strategy: ([name for name in forward if name != "all_reduce"], backward)
        for strategy, (forward, backward) in EXPECTED.items()
    }
    with equal_tokens(layer):
        for strategy, expected in without_all_reduce.items():
            for num_tokens in (6, 9):
                assert step(layer, num_tokens, strategy, calls) == expected, strategy


def step(layer, num_tokens: int, strategy: ParallelStrategy, calls: list[str]):
    """The collectives of a forward and of a backward pass."""
    x = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    y, aux_loss = layer(x, strategy=strategy)
    forward = calls.copy()
    calls.clear()
    (y.sum() + aux_loss).backward()
    backward = calls.copy()
    calls.clear()
    return forward, backward


def test_a_step_makes_no_other_collective(run_processes):
    run_processes(makes_these_alone, 2)


def agrees_on_the_tokens_alone(rank: int) -> None:
    """A layer whose strategy the tuner has decided, dropless and not."""
    calls = recorded_calls(COLLECTIVES)
    group = make_expert_groups(2)
    group.for_torch_tools = False  # without the averages of DistributedDataParallel
    decided = ParallelStrategy(1, ranks_per_node=2)
    tuner = tuners[group] = Tuner(group, PROFILES["h100"])
    for capacity_factor in (0.0, 1.25):
        layer = make_layer(group=group, capacity_factor=capacity_factor, strategy="auto")
        x = torch.randn(6, 6, dtype=torch.float64)
        key = tuner.key(layer.config, 1, 8, True, 2, has_capacity=capacity_factor != 0)
        tuner.load_state_dict([{"key": key._asdict(), "strategy": asdict(decided)}])
        for _ in range(20):
            calls.clear()
            layer(x)
            assert calls == ["all_reduce"] + EXPECTED[ParallelStrategy(1)][0]
            calls.clear()
            with equal_tokens(layer):
                layer(x)
            assert calls == EXPECTED[ParallelStrategy(1)][0]


def test_a_decided_layer_makes_its_strategys(run_processes):
    run_processes(agrees_on_the_tokens_alone, 2)
