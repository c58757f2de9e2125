"""A static exchange gives what one process gives, without counts and without waiting."""

# T tokens of a rank, W ranks, E experts

import itertools

import pytest
import torch
import torch.distributed as dist
from host_reads import count_reads
from moe_cases import all_gradients, make_layer, owned, plain_forward

from moe_core import average_expert_gradients, equal_tokens
from moe_core.parallel import ParallelStrategy

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
ROUTINGS = [
    {"top_k": 1, "capacity_factor": 0.5, "normalize_gates": False},
    {"top_k": 2, "capacity_factor": 1.25, "batch_prioritized": True},
    {"top_k": 1, "capacity_factor": 4.0},  # most places stay empty
    {"top_k": 1, "capacity_factor": 0.05},  # room for no row at all
]


def inputs_of(rank: int, num_tokens: int):
    generator = torch.Generator().manual_seed(rank)
    shape = (num_tokens, 6)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    weight = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), weight


def check(layer, single, num_tokens: list[int]) -> None:
    rank = layer.group.rank
    size = layer.group.size
    mean_loss = 0
    for r in range(size):
        x, weight = inputs_of(r, num_tokens[r])
        y, aux_loss = x * 1, x.sum()
        if num_tokens[r]:
            y, aux_loss = plain_forward(single, x, most_tokens=max(num_tokens))
        mean_loss = mean_loss + ((y * weight).sum() + 0.1 * aux_loss) / size
        if r == rank:
            rank_x, expected_y, expected_loss = x, y, aux_loss
    expected = all_gradients(mean_loss, rank_x, single)

    x, weight = inputs_of(rank, num_tokens[rank])
    y, aux_loss = layer(x)
    torch.testing.assert_close((y, aux_loss), (expected_y, expected_loss), **CLOSE)
    ((y * weight).sum() + 0.1 * aux_loss).backward()
    average_expert_gradients(layer)
    dist.all_reduce(layer.router.weight.grad)  # as DistributedDataParallel does
    layer.router.weight.grad /= size
    torch.testing.assert_close(x.grad / size, expected["x"], **CLOSE)
    for name, parameter in layer.named_parameters():
        part = owned(expected[name], layer, name)
        torch.testing.assert_close(parameter.grad, part, **CLOSE, msg=name)


def equals_one_process(rank: int, world_size: int) -> None:
    counts = {2: [[8, 8], [9, 0]], 4: [[8] * 4, [7, 0, 13, 1]]}[world_size]
    shapes = ((1, 4), (2, 8), (3, 4))
    for routing, (degree, experts) in itertools.product(ROUTINGS, shapes):
        strategy = ParallelStrategy(pipeline_degree=degree, exchange="static")
        config = routing | {"num_experts": experts}
        for num_tokens in counts:
            layer = make_layer(group=dist.group.WORLD, strategy=strategy, **config)
            check(layer, make_layer(**config), num_tokens)
            check_dropless_evaluation(layer, make_layer(**config), num_tokens[rank])


def check_dropless_evaluation(layer, single, num_tokens: int) -> None:
    x, _ = inputs_of(layer.group.rank, num_tokens)
    with torch.no_grad():
        y, _ = layer.eval()(x)
        expected, _ = single.eval()(x)
    assert layer.last_routing.dropped_share == 0
    torch.testing.assert_close(y, expected, **CLOSE)


@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_one_process(run_processes, world_size):
    run_processes(equals_one_process, world_size, world_size)


def over_nodes(rank: int) -> None:
    strategy = ParallelStrategy(1, 2, "2dh", 2, exchange="static")
    layer = make_layer(group=dist.group.WORLD, strategy=strategy, **ROUTINGS[1])
    check(layer, make_layer(**ROUTINGS[1]), [8] * 4)


def test_over_nodes(run_processes):
    run_processes(over_nodes, 4)


def empty_places_hold_zeros(rank: int) -> None:
    """A token that is not finite spoils neither other tokens nor experts that it did not choose."""
    layer = make_layer(
        group=dist.group.WORLD,
        strategy=ParallelStrategy(exchange="static"),
        capacity_factor=4.0,
        aux_loss="none",
    )
    x = torch.randn(8, 6, dtype=torch.float64)
    x[0] = float("inf")
    y, _ = layer(x)
    assert y[1:].isfinite().all()
    y[1:].sum().backward()
    is_finite = layer.experts.w1.grad.isfinite().flatten(1).all(1)
    assert is_finite.sum() >= 1  # at most one of this rank's two experts has the token


def test_empty_places_hold_zeros(run_processes):
    run_processes(empty_places_hold_zeros, 2)


def soft_routing_fills_all_places(rank: int) -> None:
    config = {"router": "soft", "slots_per_expert": 2, "capacity_factor": 0.0}
    strategies = (ParallelStrategy(), ParallelStrategy(pipeline_degree=2, exchange="static"))
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    results = []
    for strategy in strategies:
        layer = make_layer(group=dist.group.WORLD, strategy=strategy, **config)
        y, _ = layer(x)
        y.square().sum().backward()
        results.append((y, layer.experts.w1.grad, layer.router.slots.grad))
        assert layer.last_routing.dropped_share == 0
    torch.testing.assert_close(results[0], results[1], **CLOSE)


def test_soft_routing_fills_all_places(run_processes):
    run_processes(soft_routing_fills_all_places, 2)


def waits_for_nothing(rank: int) -> None:
    strategy = ParallelStrategy(pipeline_degree=2, exchange="static")
    layer = make_layer(group=dist.group.WORLD, strategy=strategy, capacity_factor=1.0)
    x, _ = inputs_of(rank, 8)
    # A CPU's kernels read the experts' offsets, a GPU's do not.
    layer.experts.forward = lambda rows, offsets, **others: rows * 2
    with equal_tokens(layer):
        assert count_reads(lambda: layer(x)[0].sum().backward()) == []


def test_waits_for_nothing(run_processes):
    run_processes(waits_for_nothing, 2)


def refused(rank: int) -> None:
    group = dist.group.WORLD
    static = ParallelStrategy(exchange="static")
    with pytest.raises(ValueError, match=r"capacity_factor \(0\)"):
        make_layer(group=group, strategy=static)(torch.ones(2, 6).double(), capacity_factor=0.0)
    with pytest.raises(ValueError, match=r"num_experts \(1\)"):
        make_layer(group=group, strategy=static, num_experts=1)


def test_refused(run_processes):
    run_processes(refused, 2)
    with pytest.raises(ValueError, match=r"r \(0\) must be 1"):
        ParallelStrategy(0, exchange="static")
    with pytest.raises(ValueError, match="exchange"):
        ParallelStrategy(exchange="fixed")
