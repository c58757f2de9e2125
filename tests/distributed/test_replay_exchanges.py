"""Recorded exchanges of a step are made once more, whatever the strategy."""

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches, recorded_calls
from moe_cases import make_layer

from moe_core.parallel import (
    ParallelStrategy,
    count_traffic,
    make_expert_groups,
    record_exchanges,
    replay,
)

COLLECTIVES = ["all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"]
STRATEGIES = {
    4: [
        ParallelStrategy(),
        ParallelStrategy(0),
        ParallelStrategy(1, 3),
        ParallelStrategy(1, 2, "2dh", 2),
        ParallelStrategy(exchange="static"),
    ],
    2: [ParallelStrategy(1), ParallelStrategy(2)],  # two ranks share an expert
}


def made(function) -> list[str]:
    """The collectives that `function` makes on this rank, sorted."""
    calls = recorded_calls(COLLECTIVES)
    function()
    patches.undo()
    return sorted(calls)


def replays(rank: int, has_own_process_groups: bool) -> None:
    group = dist.group.WORLD
    if has_own_process_groups:
        group = make_expert_groups(4, ranks_per_node=2)
    for num_experts, strategies in STRATEGIES.items():
        layer = make_layer(
            group=group, num_experts=num_experts, hidden_dim=8, model_dim=4, capacity_factor=1.25
        )
        for strategy in strategies:
            if strategy.all_to_all == "2dh" and not has_own_process_groups:
                continue

            def step(layer=layer, strategy=strategy) -> None:
                x = torch.randn(9 + rank, 4, dtype=torch.float64)
                y, aux_loss = layer(x, strategy=strategy)
                (y.sum() + aux_loss).backward()

            with record_exchanges(layer.group) as calls, count_traffic(layer.group) as traffic:
                original = made(step)
            assert made(lambda calls=calls: replay(calls)) == original, strategy
            num_bytes = sum(call.sent_bytes for call in calls)
            rows_and_weights = 8 * sum(traffic.elements.values())
            assert num_bytes >= rows_and_weights > 0


@pytest.mark.parametrize("has_own_process_groups", [True, False])
def test_replays_what_a_step_exchanged(run_processes, has_own_process_groups):
    run_processes(replays, 4, has_own_process_groups)
