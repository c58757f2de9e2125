"""Expert parallelism over gloo processes equals one process: outputs, losses, gradients,
parameters, norms."""

# T tokens of a rank, W ranks

import copy

import pytest
import torch
import torch.distributed as dist
from moe_cases import all_gradients, make_layer, owned, plain_forward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_core import (
    MoEConfig,
    MoELayer,
    average_expert_gradients,
    clip_gradients,
    expert_parameters,
    global_grad_norm,
)
from moe_core.parallel import ExpertGroup

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
UNEQUAL = {2: [[9, 5], [1, 0]], 4: [[7, 0, 13, 1], [0, 0, 6, 0]]}  # tokens of every rank
CONFIGS = [
    {"capacity_factor": 0.0, "top_k": 2},
    {"capacity_factor": 0.0, "top_k": 4, "batch_prioritized": True, "router": "cosine"},
    {"capacity_factor": 0.6, "top_k": 1, "normalize_gates": False},
    {"capacity_factor": -0.6, "top_k": 2, "batch_prioritized": True},
    {"capacity_factor": 0.05, "top_k": 1},  # room for no row at all
]


def inputs_of(rank: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens [T, 6] of a rank of the group, and the weights of its loss; every rank can make those
    of all."""
    generator = torch.Generator().manual_seed(rank)
    x, weight = (
        torch.randn(counts[rank], 6, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    return x.requires_grad_(), weight


def rank_loss(y: Tensor, aux_loss: Tensor, weight: Tensor) -> Tensor:
    return (y * weight).sum() + 0.1 * aux_loss


def check_equals_one_process(group, counts: list[int], config: dict) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    layer, single = make_layer(group=group, **config), make_layer(**config)
    for name, parameter in layer.named_parameters():  # same seed, same values; nothing twice
        whole = single.get_parameter(name)
        torch.testing.assert_close(parameter, owned(whole, layer, name), rtol=0, atol=0)

    mean_loss, xs = 0, []
    for r in range(size):
        x, weight = inputs_of(r, counts)
        y, aux_loss = (
            plain_forward(single, x, most_tokens=max(counts)) if len(x) else (x * 1, x.sum())
        )
        mean_loss = mean_loss + rank_loss(y, aux_loss, weight) / size
        xs.append((x, y, aux_loss))
    expected = all_gradients(mean_loss, xs[rank][0], single)

    x, weight = inputs_of(rank, counts)
    y, aux_loss = layer(x)
    torch.testing.assert_close((y, aux_loss), xs[rank][1:], **CLOSE)
    rank_loss(y, aux_loss, weight).backward()
    average_expert_gradients(layer)
    for parameter in layer.router.parameters():  # as DistributedDataParallel does
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= size
    torch.testing.assert_close(x.grad / size, expected.pop("x"), **CLOSE)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            layer.get_parameter(name).grad, owned(gradient, layer, name), **CLOSE
        )


def equals_one_process(rank: int, world_size: int) -> None:
    for counts in ([8] * world_size, *UNEQUAL[world_size]):
        for config in CONFIGS:
            check_equals_one_process(dist.group.WORLD, counts, config)


@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_one_process(run_processes, world_size):
    run_processes(equals_one_process, world_size, world_size)


def on_subgroups(rank: int) -> None:
    """Ranks 0 and 2, 1 and 3 share experts; then two layers, each over another pairing, in one
    model."""
    strided = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    for config in CONFIGS:
        check_equals_one_process(strided[rank % 2], [5, 2], config)
    counts = [6, 3, 0, 4]
    config = {"capacity_factor": 0.0, "top_k": 2, "aux_loss": "none"}
    single = nn.Sequential(*(make_layer(seed, **config) for seed in (0, 1)))
    layers = [
        make_layer(seed, group=group, **config)
        for seed, group in ((0, strided[rank % 2]), (1, halves[rank // 2]))
    ]
    x, weight = inputs_of(rank, counts)
    y = layers[1](layers[0](x)[0])[0]
    (y * weight).sum().backward()
    expected_x, _ = inputs_of(rank, counts)
    expected = single[1](single[0](expected_x)[0])[0]
    (expected * weight).sum().backward()
    torch.testing.assert_close((y, x.grad), (expected, expected_x.grad), **CLOSE)
    check_gradients_are_means_over_the_group(
        layers[1], [0, 1] if rank < 2 else [2, 3], counts, single
    )
    model = nn.ModuleList(layers)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    # each layer's experts from its own group, routers once
    whole = sum(p.numel() for p in single.parameters())
    torch.testing.assert_close(global_grad_norm(model).item(), whole**0.5, rtol=1e-6, atol=0)


def check_gradients_are_means_over_the_group(
    layer: MoELayer, ranks: list[int], counts, single: nn.Module
) -> None:
    single.zero_grad()
    for r in ranks:
        x, weight = inputs_of(r, counts)
        (single[1](single[0](x)[0])[0] * weight).sum().backward()
    for name, parameter in layer.experts.named_parameters():
        expected = single[1].experts.get_parameter(name).grad / len(ranks)
        torch.testing.assert_close(
            parameter.grad, owned(expected, layer, f"experts.{name}"), **CLOSE
        )


def test_subgroups_and_two_layers_on_different_groups(run_processes):
    run_processes(on_subgroups, 4)


class Trunk(nn.Module):
    def __init__(self, group=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6).double()
        self.moe = make_layer(group=group, capacity_factor=0.0, aux_loss="none")

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))[0]


def training_step(model: nn.Module, max_norm: float) -> Tensor:
    """One clipped step on this rank's tokens (a single process: on everyone's); the norm before
    clipping."""
    group = model.moe.group
    counts = [4, 9]
    ranks = [group.rank] if group.size > 1 else range(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for r in ranks:
        x, weight = inputs_of(r, counts)
        ((model(x) * weight).sum() / (1 if group.size > 1 else 2)).backward()
    if group.size > 1:
        average_expert_gradients(model)
        experts = expert_parameters(model)
        for name, parameter in model.named_parameters():
            if name not in experts:
                dist.all_reduce(parameter.grad)
                parameter.grad /= group.size
    norm = clip_gradients(model, max_norm)
    optimizer.step()
    return norm


def clipped_step(rank: int) -> None:
    for max_norm in (0.0, 0.5, 1e6):
        model, single = Trunk(dist.group.WORLD), Trunk()
        norm, expected_norm = training_step(model, max_norm), training_step(single, max_norm)
        # the norm is a sum of a few squares in fp32 (eps 6e-8), and clipping multiplies by it
        torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
        close = {"rtol": 1e-6, "atol": 1e-7} if max_norm == 0.5 else CLOSE
        assert norm > 0.5
        clipped = min(norm.item(), max_norm) if max_norm else norm.item()
        assert nn.utils.get_total_norm(
            [p.grad for p in single.parameters()]
        ).item() == pytest.approx(clipped, rel=1e-5)
        for name, parameter in model.named_parameters():
            whole = single.get_parameter(name)
            torch.testing.assert_close(
                parameter, owned(whole, model.moe, name.removeprefix("moe.")), **close
            )


def test_clipping_uses_the_norm_of_one_process(run_processes):
    run_processes(clipped_step, 2)


def shared_by_two_layers(rank: int) -> None:
    """The gradients of experts that two layers share are averaged once."""
    group = ExpertGroup.of(dist.group.WORLD)
    group.for_torch_tools = False  # this function averages, not the backward pass
    first = make_layer(group=group, capacity_factor=0.0)
    second = MoELayer(first.config, group, experts=first.experts).double()
    for parameter in first.experts.parameters():
        parameter.grad = torch.ones_like(parameter)
    average_expert_gradients(nn.ModuleList([first, second]))
    for parameter in first.experts.parameters():
        assert (parameter.grad == 1 / dist.get_world_size()).all()


def test_experts_that_two_layers_share(run_processes):
    run_processes(shared_by_two_layers, 2)


def errors_and_edges(rank: int) -> None:
    group = dist.group.WORLD
    for num_experts in (3, 6):
        with pytest.raises(ValueError, match=rf"num_experts \({num_experts}\) .*size \(4\)"):
            make_layer(group=group, num_experts=num_experts)
    others = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match="not in the expert-parallel group"):
            make_layer(group=others)
    # Expert parameters are nowhere twice: their sizes add up to those of one process.
    layer, single = make_layer(group=group, num_experts=8), make_layer(num_experts=8)
    total = torch.tensor(sum(p.numel() for p in layer.experts.parameters()))
    dist.all_reduce(total)
    assert total == sum(p.numel() for p in single.experts.parameters())
    copied = copy.deepcopy(layer)  # an averaged model, say: the group is shared, not copied
    x, _ = inputs_of(rank, [3, 0, 1, 2])
    torch.testing.assert_close(copied(x), layer(x), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x)[0], single(x, capacity_factor=0.0)[0], **CLOSE)
    assert layer.last_routing.counts.sum() == len(x)  # the rank's own tokens
    # bf16 travels too
    low = MoELayer(MoEConfig(6, 10, 8, capacity_factor=0.0), group).bfloat16()
    y, _ = low(x.detach().bfloat16().requires_grad_())
    y.sum().backward()
    assert y.dtype == low.experts.w1.grad.dtype == torch.bfloat16
    # no gradient anywhere: nothing waits for a backward
    assert global_grad_norm(make_layer(group=group)) == 0


def test_errors_and_edges(run_processes):
    run_processes(errors_and_edges, 4)


def compiled_and_checkpointed(rank: int) -> None:
    layer = make_layer(group=dist.group.WORLD, capacity_factor=0.6, top_k=2)
    forwards = (
        layer,
        torch.compile(layer, backend="aot_eager"),
        lambda x: checkpoint(layer, x, use_reentrant=False),
    )
    for num_tokens in (8 + rank, 5 * rank):
        outcomes = []
        for forward in forwards:
            x = torch.ones(num_tokens, 6).double().cumsum(1).sin().requires_grad_()
            y, aux_loss = forward(x)
            outcomes.append((y, aux_loss, all_gradients(y.square().sum() + aux_loss, x, layer)))
        torch.testing.assert_close(outcomes[1], outcomes[0], **CLOSE)
        torch.testing.assert_close(outcomes[2], outcomes[0], **CLOSE)


def test_compiled_and_checkpointed_layers_equal_eager(run_processes):
    run_processes(compiled_and_checkpointed, 2)
