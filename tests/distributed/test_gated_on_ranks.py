"""Gated experts on several ranks equal those of one process: every strategy, fewer experts than
ranks, weights gathered ahead. `test_expert_checkpoint` has their checkpoints."""

# T tokens of a rank, W ranks, E experts

import pytest
import torch
import torch.distributed as dist
from moe_cases import make_layer, owned
from torch import Tensor

from moe_core import MoELayer, gather_ahead
from moe_core.parallel import ParallelStrategy, make_expert_groups
from moe_core.parallel.strategy import valid_r

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
OPTIONS = {
    "gated": True, "activation": "silu", "hidden_dim": 16, "model_dim": 8, "top_k": 1,
    "capacity_factor": 0.0, "aux_loss": "none",
}  # fmt: skip


def inputs_of(rank: int) -> tuple[Tensor, Tensor]:
    """Tokens [T, 8] of a rank, and the weights of its loss."""
    generator = torch.Generator().manual_seed(rank)
    shape = (5 + 2 * rank, 8)
    x, weight = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    return x.requires_grad_(), weight


def check_equals_one_process(layer: MoELayer, single: MoELayer, **call) -> None:
    """Outputs, the gradient of x, and those of experts as sums over the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer.zero_grad()
    single.zero_grad()
    for r in range(size):
        expected_x, weight = inputs_of(r)
        expected_y = single(expected_x)[0]
        (expected_y * weight).sum().backward()
        if r == rank:
            expected = expected_y, expected_x.grad
    x, weight = inputs_of(rank)
    y = layer(x, **call)[0]
    (y * weight).sum().backward()
    torch.testing.assert_close((y, x.grad), expected, **CLOSE)
    names = {name for name, _ in layer.experts.named_parameters()}
    assert names == {"w1", "b1", "w2", "b2", "w3", "b3"}
    for name, parameter in layer.experts.named_parameters():
        whole = single.experts.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, owned(whole, layer, f"experts.{name}"), **CLOSE)


def every_strategy(rank: int, world_size: int, num_experts: int) -> None:
    group = make_expert_groups(world_size)
    group.for_torch_tools = False  # the backward pass sums, `average_expert_gradients` averages
    layer = make_layer(group=group, num_experts=num_experts, **OPTIONS)
    single = make_layer(num_experts=num_experts, **OPTIONS)
    for name, parameter in layer.named_parameters():  # the same values at the start
        assert torch.equal(parameter, owned(single.get_parameter(name), layer, name))
    for r in valid_r(num_experts, world_size):
        for degree in (1, 2) if r else (1,):
            check_equals_one_process(layer, single, strategy=ParallelStrategy(r, degree))


@pytest.mark.parametrize(("world_size", "num_experts"), [(2, 4), (2, 1), (4, 4), (4, 2)])
def test_every_strategy_equals_one_process(run_processes, world_size, num_experts):
    run_processes(every_strategy, world_size, world_size, num_experts)


def gathered_ahead(rank: int) -> None:
    layer = make_layer(
        group=make_expert_groups(2), strategy=ParallelStrategy(r=0), num_experts=4, **OPTIONS
    )
    x, weight = inputs_of(rank)
    inputs = [x, *layer.experts.parameters()]
    expected = torch.autograd.grad((layer(x)[0] * weight).sum(), inputs)
    with gather_ahead(layer):
        y = layer(x)[0]
    torch.testing.assert_close(torch.autograd.grad((y * weight).sum(), inputs), expected)


def test_weights_gathered_ahead(run_processes):
    run_processes(gathered_ahead, 2)
