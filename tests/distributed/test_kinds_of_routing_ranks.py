"""Soft MoE, expert choice, balancing biases and shared experts over ranks equal one process."""

# B images of a rank, N tokens of an image

import pytest
import torch
import torch.distributed as dist
from moe_cases import all_gradients, make_layer, owned

from moe_core import average_expert_gradients
from moe_core.balance import update_balance
from moe_core.parallel import ParallelStrategy

KINDS = {
    "soft": {"router": "soft", "slots_per_expert": 3},
    "expert_choice": {"router": "expert_choice", "capacity_factor": 1.0},
    "expert_choice_per_image": {
        "router": "expert_choice",
        "capacity_factor": 2.0,
        "choose_per_image": True,
    },
    "bias": {"balance": "bias", "capacity_factor": 0.0},
    "sigmoid_and_shared": {
        "gate_activation": "sigmoid",
        "top_k": 2,
        "num_shared_experts": 1,
        "z_loss_weight": 0.3,
        "capacity_factor": 0.0,
    },
}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def equals_one_process(
    rank: int, world_size: int, kind: str, strategy: ParallelStrategy, changes: dict | None = None
) -> None:
    options = {"kernels": "torch"} | KINDS[kind] | (changes or {})
    layer = make_layer(group=dist.group.WORLD, strategy=strategy, **options)
    single = make_layer(**options)
    torch.manual_seed(1)
    images = torch.randn(world_size, 2, 8, 6, dtype=torch.float64)  # [W, B, N, M]
    weights = torch.randn_like(images)

    mean_loss = 0
    for r in range(world_size):
        x = images[r].clone().requires_grad_()
        y, aux_loss = single(x)
        mean_loss = mean_loss + ((y * weights[r]).sum() + 0.1 * aux_loss) / world_size
        if r == rank:
            rank_x, expected_y, expected_loss = x, y, aux_loss
    expected = all_gradients(mean_loss, rank_x, single)

    x = images[rank].clone().requires_grad_()
    y, aux_loss = layer(x)
    torch.testing.assert_close((y, aux_loss), (expected_y, expected_loss), **CLOSE)
    ((y * weights[rank]).sum() + 0.1 * aux_loss).backward()
    average_expert_gradients(layer)
    shared = [p for n, p in layer.named_parameters() if not n.startswith("experts.")]
    for parameter in shared:  # as DistributedDataParallel does
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    torch.testing.assert_close(x.grad / world_size, expected.pop("x"), **CLOSE)
    for name, gradient in expected.items():
        part = owned(gradient, layer, name)
        torch.testing.assert_close(layer.get_parameter(name).grad, part, **CLOSE)

    if layer.balance is not None:
        update_balance(layer)
        single.balance.update(single.balance.load)
        torch.testing.assert_close(layer.balance.bias, single.balance.bias, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(run_processes, kind):
    for strategy in (ParallelStrategy(), ParallelStrategy(r=0)):
        run_processes(equals_one_process, 2, 2, kind, strategy)


@pytest.mark.parametrize("kind", ["soft", "expert_choice"])
def test_four_ranks_in_chunks(run_processes, kind):
    run_processes(equals_one_process, 4, 4, kind, ParallelStrategy(pipeline_degree=2))


def test_two_ranks_for_an_expert(run_processes):
    options = {"num_experts": 2}
    run_processes(equals_one_process, 4, 4, "soft", ParallelStrategy(r=2), options)


def update_without_a_bias(rank: int, world_size: int) -> None:
    update_balance(make_layer(group=dist.group.WORLD))  # makes no collective


def test_a_layer_without_a_bias(run_processes):
    run_processes(update_without_a_bias, 2, 2)
