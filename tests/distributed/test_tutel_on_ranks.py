"""moe_core.compat.tutel on several ranks: Tutel's losses, its collectives and process groups."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from tutel_cases import CASES_ON_RANKS, losses, make_layer, recorded

from moe_core.compat.tutel import moe, net
from moe_core.parallel import make_expert_groups
from moe_core.tutel import from_tutel, to_tutel


def train(rank: int) -> None:
    os.environ["LOCAL_SIZE"] = "2"  # for 2DH
    expected = recorded(net.get_world_size())
    for name, case in CASES_ON_RANKS.items():
        found = losses(case, moe, net, rank)
        if rank == 0:
            assert found == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_equal_those_of_tutel(run_processes, ranks):
    run_processes(train, ranks)


def collectives(rank: int) -> None:
    size = net.get_world_size()
    x = torch.arange(size * 2.0).view(size, 2) + 10 * rank
    others = [torch.arange(size * 2.0).view(size, 2) + 10 * r for r in range(size)]
    assert torch.equal(net.simple_all_reduce(x), sum(others))
    assert torch.equal(x, others[rank])
    assert torch.equal(net.simple_all_gather(x), torch.cat(others))
    assert torch.equal(net.simple_split(x), x[rank : rank + 1])
    assert torch.equal(net.simple_reduce_scatter(x), sum(others)[rank : rank + 1])
    assert torch.equal(net.simple_all_to_all(x), torch.stack([other[rank] for other in others]))
    assert torch.equal(net.simple_broadcast(x.clone(), src=1), others[1])
    parts, wait = net.simple_all_to_all(x, background=True)
    wait()
    assert torch.equal(parts, net.simple_all_to_all(x))
    sizes = [rank + 1] * size
    received, counts = net.batch_all_to_all_v([torch.full((sum(sizes),), float(rank))], sizes)
    assert counts.tolist() == [r + 1 for r in range(size)]
    assert received[0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    joined, lengths = net.batch_all_gather_v([torch.full((rank + 1,), float(rank))])
    assert lengths.tolist() == [r + 1 for r in range(size)]
    assert joined[0].tolist() == received[0].tolist()
    with pytest.raises(ValueError, match=r"dim 0 \(3\) must be divisible by the 2 ranks"):
        net.simple_split(torch.zeros(3))
    net.barrier()


def gradients(rank: int) -> None:
    """The gradient of each collective, against the sum over ranks of rank * output."""
    size = net.get_world_size()
    x = torch.ones(size, 4, requires_grad=True)

    def gradient(output: torch.Tensor, scale: float = 1.0) -> list[float]:
        (grad,) = torch.autograd.grad((output * (rank + 1) * scale).sum(), x)
        return grad[:, 0].tolist()

    assert gradient(net.all_to_all(x, 1, 0)) == [1.0, 2.0]
    assert torch.equal(net.all_to_all(net.all_to_all(x, 1, 0), 0, 1), x)
    assert gradient(net.zero_gather(x)) == [3.0, 3.0]
    assert gradient(net.all_gather(x, 0)) == [rank + 1.0] * 2
    assert net.zero_gather(torch.ones(3), full_shape=(5,)).shape == (5,)


def groups(rank: int) -> None:
    env = net.create_groups_from_world(group_count=2)
    assert (env.global_size, env.model_size, env.group_count) == (4, 2, 2)
    assert (env.data_rank, env.model_rank) == (rank // 2, rank % 2)
    assert dist.get_process_group_ranks(env.model_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(env.data_group) == [rank % 2, rank % 2 + 2]
    assert net.create_groups_from_world(group_count=2) is env
    assert net.create_groups_from_world(group_count=-2).model_size == 2
    with pytest.raises(ValueError, match=r"group_count \(3\) must divide the 4 ranks"):
        net.create_groups_from_world(group_count=3)
    with pytest.raises(ValueError, match="parent_group has 2 of 4 ranks"):
        net.create_groups_from_world(1, parent_group=env.model_group)
    layer = moe.moe_layer(
        {"type": "top", "k": 1},
        8,
        {"type": "ffn", "hidden_size_per_expert": 8},
        group=env.model_group,
    )
    assert (layer.num_global_experts, layer.world_size) == (2, 2)
    assert layer(torch.ones(3, 8)).shape == (3, 8)
    with pytest.raises(ValueError, match=r"num_local_experts \(-3\): the 4 ranks do not divide"):
        moe.moe_layer.global_expert_count(-3)


def unequal_tokens(rank: int) -> None:
    """Ranks with 3 and 9 tokens: an expert has the places of 9 tokens everywhere."""
    torch.manual_seed(0)
    x = torch.randn(3 + 6 * rank, 16)
    for experts in ({}, {"activation_fn": torch.tanh}):
        layer = make_layer({"experts": experts, "gate": {"k": 1}}, moe, rank)
        y = layer(x, inequivalent_tokens=True, capacity_factor=1.34)  # 1.34 * ceil(9 / 4) = 4.02
        assert y.shape == x.shape
        kept = (y.abs().sum(1) > 0).sum()
        counts = layer.dispatch_count
        assert kept == counts.clamp(max=4).sum()


def optimizer_of_parts(rank: int) -> None:
    """The optimizer that spreads its states gives the parameters of a usual one."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 5), nn.Linear(3, 5)]
    models[1].load_state_dict(models[0].state_dict())
    usual = torch.optim.Adam(models[0].parameters(), lr=0.1)
    spread = net.TutelDistributedOptimizer(models[1].parameters(), average_shared=True)
    spread.warp_local(torch.optim.Adam, lr=0.1)
    for step in range(3):
        for model, optimizer in zip(models, (usual, spread), strict=True):
            optimizer.zero_grad()
            x = torch.full((2, 3), rank + step + 1.0)
            model(x).square().sum().backward()
            if model is models[0]:
                for parameter in model.parameters():
                    parameter.grad = net.simple_all_reduce(parameter.grad) / 2
            optimizer.step()
    assert torch.allclose(models[0].weight, models[1].weight, atol=1e-6)
    assert torch.allclose(models[0].bias, models[1].bias, atol=1e-6)
    assert sum(part.numel() for part in spread.parts) == 8 + 3  # halves of 15 and 5, rounded up


def checkpoints(rank: int) -> None:
    """State dicts of four ranks, joined and cut for two ranks that share each expert and back."""
    case = {"experts": {"num_experts_per_device": -2}}
    layer = make_layer(case, moe, rank)
    with torch.no_grad():
        layer.experts.batched_fc2_bias.uniform_()
    states: list = [None] * 4
    dist.all_gather_object(states, layer.state_dict())
    whole = from_tutel(states)
    assert whole["experts.w1"].shape == (2, 24, 16)
    again = to_tutel(whole, 4)[rank]
    assert set(again) == set(states[rank])
    for name, value in again.items():
        assert torch.equal(value, states[rank][name]), name
    torch.manual_seed(rank)
    x = torch.randn(7, 16)
    other = make_layer(case, moe, rank + 10)
    other.load_state_dict(again)
    assert torch.equal(layer(x), other(x))


def in_pairs(rank: int) -> None:
    collectives(rank)
    gradients(rank)
    unequal_tokens(rank)
    optimizer_of_parts(rank)
    group = make_expert_groups(2)
    assert group.size == 2  # the engine's own groups work beside those of layers


def in_fours(rank: int) -> None:
    groups(rank)
    checkpoints(rank)


def test_two_ranks(run_processes):
    run_processes(in_pairs, 2)


def test_four_ranks(run_processes):
    run_processes(in_fours, 4)
