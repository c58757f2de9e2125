"""Every strategy, pipeline degree and all-to-all algorithm gives what one process gives, on the
same parameters."""

# T tokens of a rank, W ranks, E experts

import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from gloo_processes import recorded_calls
from moe_cases import all_gradients, make_layer, owned, plain_forward
from torch import Tensor

from moe_core import MoELayer, average_expert_gradients
from moe_core.parallel import ExpertGroup, ParallelStrategy, make_expert_groups, valid_r

SHAPE = {"model_dim": 8, "hidden_dim": 16}  # divides over up to 8 ranks of one expert
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
ROUTINGS = [{"top_k": k, "capacity_factor": f} for k in (1, 2) for f in (1.0, 0.0, -1.0)]


def strategies(num_experts: int, world_size: int) -> list[ParallelStrategy]:
    per_node = {2: [1], 4: [2], 8: [2, 4]}[world_size]
    algorithms = [("linear", None), *(("2dh", g) for g in per_node)]
    return [
        ParallelStrategy(r, d, name, g)
        for r in valid_r(num_experts, world_size)
        for d in (1, 2, 4)
        for name, g in algorithms
        if r or (d, name) == (1, "linear")
    ]


def tokens_of(rank: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, weight = (
        torch.randn(num_tokens, 8, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    return x.requires_grad_(), weight


def expected_of(single: MoELayer, counts: list[int], rank: int, **call) -> tuple:
    """This rank's output, aux loss and input gradient, and every parameter's gradient of the mean
    loss of all ranks."""
    mean_loss, mine = 0, None
    for r, num_tokens in enumerate(counts):
        x, weight = tokens_of(r, num_tokens)
        y, aux_loss = (
            plain_forward(single, x, most_tokens=max(counts), **call)
            if num_tokens
            else (x * 1, x.sum())
        )
        mean_loss = mean_loss + ((y * weight).sum() + 0.1 * aux_loss) / len(counts)
        mine = (x, y.detach(), aux_loss.detach()) if r == rank else mine
    return *mine[1:], all_gradients(mean_loss, mine[0], single)


def check(layer: MoELayer, expected: tuple, num_tokens: int, **call) -> None:
    group, rank = layer.group.process_group, layer.group.rank
    y, aux_loss, gradients = expected
    layer.zero_grad()
    x, weight = tokens_of(rank, num_tokens)
    outcome = layer(x, **call)
    torch.testing.assert_close(outcome, (y, aux_loss), **CLOSE)
    ((outcome[0] * weight).sum() + 0.1 * outcome[1]).backward()
    average_expert_gradients(layer)
    dist.all_reduce(layer.router.weight.grad, group=group)  # as DistributedDataParallel does
    layer.router.weight.grad /= layer.group.size
    torch.testing.assert_close(x.grad / layer.group.size, gradients["x"], **CLOSE)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(
            parameter.grad, owned(gradients[name], layer, name), **CLOSE, msg=name
        )


def equal_one_process(rank: int, world_size: int, num_experts: int, pairs: bool) -> None:
    check_strategies(
        make_expert_groups(world_size, ranks_per_node=min(2, world_size // 2)), num_experts, pairs
    )


def equal_one_process_over_one_process_group(rank: int, world_size: int, num_experts: int) -> None:
    check_strategies(ExpertGroup(dist.group.WORLD), num_experts, pairs=True)


def check_strategies(group: ExpertGroup, num_experts: int, pairs: bool) -> None:
    rank, world_size = group.rank, group.size
    counts = [6] * world_size
    layer, single = (make_layer(group=g, num_experts=num_experts, **SHAPE) for g in (group, None))
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, owned(single.get_parameter(name), layer, name))
    expected = [expected_of(single, counts, rank, **routing) for routing in ROUTINGS]
    for i, strategy in enumerate(strategies(num_experts, world_size)):
        chosen: Iterable[int] = range(len(ROUTINGS)) if not pairs else (i % len(ROUTINGS),)
        for j in chosen:
            check(layer, expected[j], counts[rank], strategy=strategy, **ROUTINGS[j])


CASES = list(itertools.product([2, 4, 8], [2, 4, 8, 16]))
# Ranks that share experts, have one each, and have several; nodes of other numbers than ranks.
SOME_CASES = [(2, 4), (4, 1), (4, 2), (4, 4), (4, 8), (8, 8)]


@pytest.mark.parametrize(("world_size", "num_experts"), SOME_CASES)
def test_every_strategy_with_one_of_the_routings(run_processes, world_size, num_experts):
    run_processes(equal_one_process, world_size, world_size, num_experts, True)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_experts"), CASES)
def test_every_strategy_with_every_routing(run_processes, world_size, num_experts):
    run_processes(equal_one_process, world_size, world_size, num_experts, False)


@pytest.mark.parametrize(("world_size", "num_experts"), [(4, 2), (4, 8)])
def test_every_strategy_over_one_process_group(run_processes, world_size, num_experts):
    run_processes(equal_one_process_over_one_process_group, world_size, world_size, num_experts)


# Process groups


GROUP_MAKERS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group")


def makes_no_process_group(rank: int) -> None:
    made = make_expert_groups(2, ranks_per_node=1)
    process_group = dist.new_group([0, 1])
    names = recorded_calls(GROUP_MAKERS)
    groups = [made, ExpertGroup(process_group)] if rank < 2 else [made]
    for group, num_experts in itertools.product(groups, (1, 4)):
        layer = make_layer(group=group, num_experts=num_experts, **SHAPE)
        for strategy in strategies(num_experts, 2):
            layer(tokens_of(rank, 3)[0], strategy=strategy)[0].sum().backward()
    assert names == []
    make_expert_groups(2)
    assert set(names) == {"new_group"}
    dist.barrier()  # or one rank leaves while another still connects


def test_process_groups_are_made_by_make_expert_groups_alone(run_processes):
    """It is called by all ranks; what is made later would need them all too."""
    run_processes(makes_no_process_group, 4)
