"""Strategies where they are hardest: few or no tokens, frozen parts, several graphs at once,
several groups."""

# T tokens of a rank, W ranks, E experts, M model dim, K top-k

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from moe_cases import make_layer, owned
from test_strategies import CLOSE, SHAPE, check, expected_of, tokens_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from traffic import count_traffic

from moe_core import MoEConfig, MoELayer, average_expert_gradients, ignore_experts
from moe_core.parallel import (
    ExpertGroup,
    ParallelStrategy,
    make_expert_groups,
    valid_r,
)

# tokens of every rank
FEW = ([0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 41], [1, 1, 1, 1], [3, 0, 1, 12])
MIXED = [5, 0, 1, 9]
ROUTINGS = (
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 2, "capacity_factor": 0.7},
    {"top_k": 1, "capacity_factor": -0.4},
)
EXPERTS = (8, 2, 1)


def strategies(num_experts: int, degrees=(1, 2, 8), size: int = 4) -> list[ParallelStrategy]:
    travelling = itertools.product(valid_r(num_experts, size)[1:], degrees, (None, 2))
    return [ParallelStrategy(0)] + [
        ParallelStrategy(r, d, "2dh" if g else "linear", g) for r, d, g in travelling
    ]


def layers_of(group: ExpertGroup, num_experts: int = 2, **config) -> tuple[MoELayer, MoELayer]:
    """The same layer over the group and in one process."""
    config = {"capacity_factor": 0.0, **SHAPE, "num_experts": num_experts, **config}
    return make_layer(group=group, **config), make_layer(**config)


# 1. Ranks with 0, 1 and many tokens in the same step


def few_tokens(rank: int, share: int) -> None:
    """One in `share` of all combinations, another one for every strategy."""
    group = make_expert_groups(4, ranks_per_node=2)
    for num_experts in EXPERTS:
        layer, single = layers_of(group, num_experts)
        calls = [{**call, "top_k": min(call["top_k"], num_experts)} for call in ROUTINGS]
        pairs = list(itertools.product(FEW, calls))
        expected: dict[int, tuple] = {}
        for i, strategy in enumerate(strategies(num_experts)):
            for j in range(i % share, len(pairs), share):
                counts, call = pairs[j]
                if j not in expected:
                    expected[j] = expected_of(single, counts, rank, **call)
                check(layer, expected[j], counts[rank], strategy=strategy, **call)


@pytest.mark.parametrize("share", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_with_no_one_and_many_tokens(run_processes, share):
    run_processes(few_tokens, 4, share)


# 2. Variants of a call: nothing but the strategy may matter


def gradients_of(layer: MoELayer, x: Tensor, forward, **call) -> dict[str, Tensor]:
    """The output and every gradient that there is, of a loss that weighs all outputs
    differently."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_(x.requires_grad)
    y, aux_loss = forward(x, **call)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    loss = (y * weight).sum() + aux_loss
    if loss.requires_grad:
        loss.backward()
    found = {"y": y.detach(), "aux_loss": aux_loss.detach(), "x": x.grad}
    found.update({name: parameter.grad for name, parameter in layer.named_parameters()})
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def inputs_without_gradient(layer, x):
    return layer, x.detach()


def frozen_experts(layer, x):
    layer.experts.requires_grad_(False)
    return layer, x


def frozen_experts_and_input(layer, x):
    layer.experts.requires_grad_(False)
    return layer, x.detach()


def frozen_router(layer, x):
    layer.router.requires_grad_(False)
    return layer, x


def one_weight_trained(layer, x):
    layer.requires_grad_(False).experts.w2.requires_grad_()
    return layer, x.detach()


def in_eval_mode(layer, x):
    return layer.eval(), x


def without_grad(layer, x):
    return torch.no_grad()(layer), x


def in_inference_mode(layer, x):
    return torch.inference_mode()(layer), x.detach()


def checkpointed(layer, x):
    return lambda x, **call: checkpoint(lambda x: layer(x, **call), x, use_reentrant=False), x


def compiled(layer, x):
    return torch.compile(layer, backend="aot_eager"), x


def leading_dims(layer, x):
    return layer, x.detach().view(len(x), 1, 1, 8).requires_grad_()


def pruned(layer, x):
    """With all of w1 left. It is computed anew in a hook of the experts' call, within the graph of
    this pass."""
    if not prune.is_pruned(layer.experts):
        prune.identity(layer.experts, "w1")
    return layer, x


VARIANTS = {
    "frozen": [
        inputs_without_gradient,
        frozen_experts,
        frozen_experts_and_input,
        frozen_router,
        one_weight_trained,
    ],
    "called otherwise": [
        in_eval_mode,
        without_grad,
        in_inference_mode,
        checkpointed,
        leading_dims,
        pruned,
    ],
}


def like_data_parallel(rank: int, variants: list) -> None:
    group = make_expert_groups(4, ranks_per_node=2)
    for variant, num_experts in itertools.product(variants, (4, 2)):
        check_variant(variant, num_experts, group)


def check_variant(variant, num_experts: int, group: ExpertGroup) -> None:
    """Every strategy gives what r = 0 gives, which exchanges no tokens, and the outputs of one
    process."""
    x, _ = tokens_of(group.rank, MIXED[group.rank])
    layer, single = layers_of(group, num_experts)
    forward, x = variant(layer, x)
    plain, _ = variant(single, x)
    expected = gradients_of(layer, x, forward, strategy=ParallelStrategy(0))
    alone = gradients_of(single, x, plain)
    for name in ("y", "aux_loss", "x"):
        torch.testing.assert_close(
            expected.get(name), alone.get(name), **CLOSE, msg=f"{name}: {variant.__name__}"
        )
    assert expected.keys() == alone.keys()
    # each r with either degree, and either all-to-all
    for strategy in strategies(num_experts, (1, 3))[1::3]:
        found = gradients_of(layer, x, forward, strategy=strategy)
        torch.testing.assert_close(
            found, expected, **CLOSE, msg=lambda m, s=strategy: f"{variant.__name__} {s}: {m}"
        )


@pytest.mark.parametrize(
    "variants", [*VARIANTS.values(), pytest.param([compiled], marks=pytest.mark.slow)]
)
def test_frozen_checkpointed_and_other_calls(run_processes, variants):
    run_processes(like_data_parallel, 4, variants, seconds=100)


def some_ranks_inputs_need_no_gradient(rank: int) -> None:
    group = make_expert_groups(4, ranks_per_node=2)
    layer, single = layers_of(group, 4)
    x, _ = tokens_of(rank, MIXED[rank])
    for strategy in strategies(4, (1, 2)):
        y, _ = layer(x.detach().requires_grad_(len(x) > 0), strategy=strategy)
        torch.testing.assert_close(y, single(x)[0], **CLOSE)
        y.sum().backward()


def test_ranks_whose_empty_input_needs_no_gradient(run_processes):
    run_processes(some_ranks_inputs_need_no_gradient, 4, seconds=30)


def autocast(rank: int) -> None:
    group = make_expert_groups(4, ranks_per_node=2)
    seen = []

    class Seeing(nn.Module):
        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            seen.append(rows.dtype)
            return rows * 2

    torch.manual_seed(0)
    config = MoEConfig(8, 16, 8, top_k=2, capacity_factor=0.0)
    layer, seeing = MoELayer(config, group), MoELayer(config, group, experts=Seeing())
    x = tokens_of(rank, 5 + rank)[0].float().detach().requires_grad_()
    outcomes = []
    for strategy in strategies(8, (1, 2)):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y, aux_loss = layer(x, strategy=strategy)
        assert (y.dtype, aux_loss.dtype) == (torch.float32, torch.float32)
        y.sum().backward()
        outcomes.append(
            (y.detach(), layer.experts.w1.grad.clone(), layer.router.weight.grad.clone())
        )
        assert layer.experts.w1.grad.dtype == torch.float32
    for outcome in outcomes[1:]:
        torch.testing.assert_close(outcome, outcomes[0], rtol=0.02, atol=0.05)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = seeing(x, strategy=ParallelStrategy(1, 2))
    assert seen
    assert set(seen) <= {torch.bfloat16, torch.float32}
    assert seen[-1] == torch.bfloat16
    torch.testing.assert_close(y, 2 * x, rtol=0.02, atol=0.02)


def test_rows_travel_in_autocasts_dtype(run_processes):
    run_processes(autocast, 4, seconds=60)


# 3. Several graphs, layers and groups at once


def several_graphs(rank: int) -> None:
    """Two forwards, then their backwards in either order or as one; and gradients that add up over
    all of them."""
    group = make_expert_groups(4, ranks_per_node=2)
    refuses_other_derivatives(group)
    for num_experts in (4, 2):
        layer, _ = layers_of(group, num_experts)
        inputs = [tokens_of(rank, num_tokens[rank])[0] for num_tokens in (MIXED, MIXED[::-1])]
        orders = (lambda a, b: (a, b), lambda a, b: (b, a), lambda a, b: (a + b,))
        chosen = strategies(num_experts, (1, 3))
        expected = graph_gradients(layer, inputs, [ParallelStrategy(0)] * 2, orders[0])
        for i, pair in enumerate(zip(chosen, chosen[5:] + chosen[:5], strict=True)):
            found = graph_gradients(layer, inputs, pair, orders[i % 3])
            torch.testing.assert_close(
                found, expected, **CLOSE, msg=lambda m, pair=pair: f"{pair}: {m}"
            )


def refuses_other_derivatives(group: ExpertGroup) -> None:
    """Second and forward-mode derivatives, by the layer's name and on every rank."""
    x = torch.randn(5, SHAPE["model_dim"], dtype=torch.float64, requires_grad=True)
    for strategy in (ParallelStrategy(0), ParallelStrategy(1)):
        layer, _ = layers_of(group, 4)
        y, _ = layer(x, strategy=strategy)
        with pytest.raises(ValueError, match="MoELayer over several ranks has no second deriv"):
            torch.autograd.grad(y.sum(), [*layer.experts.parameters()], create_graph=True)
        with pytest.raises(ValueError, match="MoELayer over several ranks supports no"):
            torch.func.jvp(lambda x: layer(x, strategy=strategy)[0], (x,), (x,))  # noqa: B023


def graph_gradients(layer: MoELayer, inputs: list[Tensor], pair, order) -> list[Tensor]:
    layer.zero_grad()
    inputs = [x.detach().requires_grad_() for x in inputs]
    first, second = (
        layer(x, strategy=strategy)[0].square().sum()
        for x, strategy in zip(inputs, pair, strict=True)
    )
    for loss in order(first, 2 * second):
        loss.backward()
    return [x.grad for x in inputs] + [parameter.grad.clone() for parameter in layer.parameters()]


def test_several_graphs_at_once(run_processes):
    run_processes(several_graphs, 4, seconds=60)


class Stack(nn.Module):
    """Layers one after the other, each with a residual; `groups`: of every layer, None for one
    process."""

    def __init__(self, groups: list, num_experts: tuple[int, ...]) -> None:
        super().__init__()
        config = {**SHAPE, "capacity_factor": 0.0}
        self.layers = nn.ModuleList(
            make_layer(i, group=group, num_experts=n, **config)
            for i, (group, n) in enumerate(zip(groups, num_experts, strict=True))
        )

    def forward(self, x: Tensor, choices=None) -> Tensor:
        for layer, strategy in zip(self.layers, choices or [None] * len(self.layers), strict=True):
            x = x + layer(x, strategy=strategy)[0]
        return x.square().mean(1).sum()


def many_random_steps(rank: int, num_steps: int) -> None:
    """Layers in one DistributedDataParallel model, strategies from a seed that all ranks share, two
    losses a step."""
    shared, num_experts = make_expert_groups(4, ranks_per_node=2), (4, 2, 8, 1)
    model = Stack([shared, shared, dist.group.WORLD, shared], num_experts)
    single = Stack([None] * 4, num_experts)
    one_router_a_bucket = 0.0001  # MB
    parallel = DistributedDataParallel(ignore_experts(model), bucket_cap_mb=one_router_a_bucket)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (model, single)]
    choose = random.Random(0)
    for _ in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for last in (False, True):
            choices = [choose.choice(strategies(n)) for n in num_experts]
            counts = [choose.choice((0, 1, 2, 11)) for _ in range(4)]
            parallel.require_backward_grad_sync = last
            parallel(tokens_of(rank, counts[rank])[0], choices).backward()
            sum(single(tokens_of(r, counts[r])[0]) / 4 for r in range(4)).backward()
        average_expert_gradients(model)
        compare_gradients(model, single)
        for optimizer in optimizers:
            optimizer.step()


def compare_gradients(model: Stack, single: Stack) -> None:
    for i, (layer, alone) in enumerate(zip(model.layers, single.layers, strict=True)):
        for name, parameter in layer.named_parameters():
            expected = owned(alone.get_parameter(name).grad, layer, name)
            torch.testing.assert_close(
                parameter.grad, expected, rtol=1e-7, atol=1e-8, msg=f"layer {i}, {name}"
            )


@pytest.mark.parametrize("num_steps", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_random_strategies_in_a_data_parallel_model(run_processes, num_steps):
    run_processes(many_random_steps, 4, num_steps)


def overlapping_groups(rank: int) -> None:
    """Groups of which some ranks are in more than others, made in another number on every rank."""
    pair, triple = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    if rank == 3:
        strangers = [dist.new_group([3], use_local_synchronization=True) for _ in range(3)]
        assert len(strangers) == 3
    mine = [
        pair if rank < 2 else None,
        dist.group.WORLD,
        triple if rank else None,
        dist.group.WORLD,
    ]
    sizes, num_experts = [len(members(g)) for g in mine], (6, 4, 6, 2)
    model, single = Stack(mine, num_experts), Stack([None] * 4, num_experts)
    per_node = {1: 1, 2: 1, 3: 3, 4: 2}
    x, _ = tokens_of(rank, MIXED[rank])
    expected_loss = single(x)
    expected_loss.backward()
    for r, d in itertools.product((0, 1), (1, 3)):
        choices = [
            ParallelStrategy(r, d, "2dh" if size > 1 else "linear", per_node[size])
            for size in sizes
        ]
        model.zero_grad()
        y = x.detach().requires_grad_()
        loss = model(y, choices)
        loss.backward()
        torch.testing.assert_close((loss, y.grad), (expected_loss, x.grad), **CLOSE)
        for layer, alone, group in zip(model.layers, single.layers, mine, strict=True):
            for name, parameter in layer.experts.named_parameters():
                expected = alone.experts.get_parameter(name).grad.clone()
                if group is not None:
                    dist.all_reduce(expected, group=group)
                    expected /= len(members(group))
                torch.testing.assert_close(
                    parameter.grad, owned(expected, layer, f"experts.{name}"), **CLOSE
                )


def members(group) -> list[int]:
    return [0] if group is None else dist.get_process_group_ranks(group)


def test_groups_that_overlap_unevenly(run_processes):
    run_processes(overlapping_groups, 4, seconds=60)


# 4. What a call is given holds for that call alone; the degree changes neither drops nor results


class Doubling(nn.Module):
    """Experts whose arithmetic does not depend on how many rows come at once."""

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return 2 * rows


def nothing_sticks(rank: int) -> None:
    group = make_expert_groups(4, ranks_per_node=2)
    routers = [nn.Linear(8, 4, bias=False).double() for _ in range(2)]
    config = MoEConfig(num_experts=4, top_k=1, capacity_factor=0.5, **SHAPE)
    layer = MoELayer(config, group, router=routers).double()
    assert [name for name in layer.state_dict() if "router" in name] == [
        "router.0.weight",
        "router.1.weight",
    ]
    x, _ = tokens_of(rank, 16)
    before, dropped = layer(x)[0], layer.last_routing.dropped_share
    assert dropped > 0
    others = [{"top_k": 2}, {"capacity_factor": 0}, {"capacity_factor": 0.0, "router": 1}]
    for call in [*others, *({"strategy": strategy} for strategy in strategies(4))]:
        y, _ = layer(x, **call)
        assert layer.last_routing.counts.sum() == len(x) * call.get("top_k", 1)
        assert (layer.last_routing.dropped_share == 0) == ("capacity_factor" in call)
        assert ("strategy" in call) == torch.allclose(y, before)
        with count_traffic(group) as traffic:
            assert torch.equal(layer(x)[0], before)
        # the layer's own strategy: one exchange there, one back
        assert set(traffic.messages.values()) == {2}
    for used in (1, 0):
        layer.zero_grad()
        layer(x, router=used)[0].sum().backward()
        assert layer.router[used].weight.grad.abs().sum() > 0
        assert layer.router[1 - used].weight.grad is None


def degrees_agree(rank: int) -> None:
    group = make_expert_groups(4, ranks_per_node=2)
    choose, dropped = random.Random(1), 0
    for _ in range(6):
        num_experts, top_k = choose.choice((4, 8)), choose.choice((1, 2, 3))
        call = {
            "top_k": top_k,
            "capacity_factor": choose.choice((-1, 1)) * choose.uniform(0.1, 2.5),
        }
        counts = [choose.choice((0, 1, 7, 23, 31)) for _ in range(4)]
        x, weight = tokens_of(rank, counts[rank])
        config = MoEConfig(
            num_experts=num_experts, batch_prioritized=choose.random() < 0.5, **SHAPE
        )
        torch.manual_seed(3)
        layer = MoELayer(config, group, experts=Doubling()).double()
        outcomes = []
        for degree, g in ((1, None), (2, None), (3, 2), (8, 4), (5, 1)):
            strategy = ParallelStrategy(1, degree, "2dh" if g else "linear", g)
            x.grad = layer.router.weight.grad = None
            y, aux_loss = layer(x, strategy=strategy, **call)
            ((y * weight).sum() + aux_loss).backward()
            found = (
                y.detach(),
                aux_loss.detach(),
                x.grad,
                layer.router.weight.grad,
                *layer.last_routing,
            )
            outcomes.append(found)
        for outcome in outcomes[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True)), call
        dropped += layer.last_routing.dropped_share
    assert dropped > 0


def test_what_a_call_is_given_does_not_stick(run_processes):
    run_processes(nothing_sticks, 4, seconds=60)


def test_the_degree_changes_no_bit(run_processes):
    run_processes(degrees_agree, 4, seconds=60)
