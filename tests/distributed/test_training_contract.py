"""`step` and `finish_gradients` on ranks train like one process; what is forgotten is noticed."""

# R ranks of the world, W ranks of an expert group, T tokens of a rank, M model dim

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from moe_cases import make_layer, owned
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_core import (
    MoELayer,
    average_expert_gradients,
    equal_tokens,
    expert_parameters,
    finish_gradients,
    ignore_experts,
    step,
)
from moe_core.parallel import ExpertGroup, ParallelStrategy, make_expert_groups

SHAPE = {"model_dim": 8, "hidden_dim": 8, "capacity_factor": 0.0, "num_experts": 4, "top_k": 2}
FORGOTTEN = r"gradient of w1 is not averaged over {} ranks: call moe_core.finish_gradients\(model"
UPDATED = r"MoELayer of .*: experts.w1 has changed since .* not averaged over 4 ranks"


class Net(nn.Module):
    """A trunk, and two layers whose biases balance their experts."""

    def __init__(self, group: ExpertGroup | None = None, r: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8).double()
        options = {"group": group, "strategy": ParallelStrategy(r), "balance": "bias", **SHAPE}
        self.layers = nn.ModuleList(make_layer(seed, **options) for seed in (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


class Scales(nn.Module):
    """Experts of a user, which multiply their rows by a number each."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.ones(num_experts, dtype=torch.float64))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        return rows * self.w1.repeat_interleave(counts).unsqueeze(1)


def group_of(size: int, for_torch_tools: bool = False) -> ExpertGroup:
    group = make_expert_groups(size)
    group.for_torch_tools = for_torch_tools
    return group


def wrap(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(ignore_experts(model), broadcast_buffers=False)


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(5, 8, generator=generator, dtype=torch.float64)


def train(model: nn.Module, loss_of, num_steps: int = 3) -> list[float]:
    """The norms of steps with two accumulated batches and a loss scale."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    for number in range(num_steps):
        with step(model, torch.float64, equal_tokens=True):
            for i in range(2):
                (loss_of(2 * number + i) * 8).backward()
        norms.append(float(finish_gradients(model, 0.2, scale=16)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def equals_one_process(rank: int, layouts: list[tuple]) -> None:
    num_ranks = dist.get_world_size()
    single = Net()
    expected = train(
        single, lambda n: sum(single(batch(r, n)) for r in range(num_ranks)) / num_ranks
    )
    for size, for_torch_tools, r in layouts:
        model = Net(group_of(size, for_torch_tools), r)
        parallel = wrap(model)
        norms = train(model, lambda n, parallel=parallel: parallel(batch(rank, n)))
        # The norm is a sum of a few squares in fp32 (eps 6e-8), and clipping multiplies by it: in
        # three steps with a rate of 0.1 and a norm of 0.2 a weight moves by 0.06.
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
        for name, value in model.state_dict().items():
            whole = single.state_dict()[name]
            if name.startswith("layers.") and "experts" in name:
                layer, _, rest = name.removeprefix("layers.").partition(".")
                whole = owned(whole, model.layers[int(layer)], rest)
            if isinstance(value, torch.distributed.tensor.DTensor):
                value = value.to_local()
            torch.testing.assert_close(value, whole, rtol=1e-6, atol=0.06 * 1e-6, msg=name)


def test_two_lines_train_like_one_process(run_processes):
    layouts = [(1, False, 1), (2, False, 1), (2, True, 0), (4, False, 0), (4, False, 1)]
    run_processes(equals_one_process, 4, layouts)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def forgotten(rank: int) -> None:
    """An optimiser's step is refused before it changes a weight."""
    cases = [(size, False, None) for size in (1, 2, 4)]
    cases += [(2, True, Scales), (2, False, Scales)]
    for size, for_torch_tools, own in cases:
        model = Net(group_of(size, for_torch_tools))
        if own:
            first = model.layers[0]
            model.layers[0] = MoELayer(
                first.config, first.group, router=first.router, experts=own(4 // size)
            )
        parallel = wrap(model)
        for options in ({"foreach": False}, {"fused": True}):
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            parallel(batch(rank, 0)).backward()
            before = values(model)
            with pytest.raises(ValueError, match=FORGOTTEN.format(4)):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
            finish_gradients(model)
            optimizer.step()
            optimizer.zero_grad()


def updated_by_hand(rank: int) -> None:
    """Without an optimiser of torch, the next forward pass in training warns."""
    model = Net(group_of(2))
    model(batch(rank, 0)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    with pytest.warns(UserWarning, match=UPDATED):
        model(batch(rank, 1))
    model.eval()
    model(batch(rank, 1))


def right_loops(rank: int) -> None:
    """What only looks like a forgotten line is no error and gives no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=UPDATED)
        look_like_forgotten(rank)


def look_like_forgotten(rank: int) -> None:
    for size, for_torch_tools in ((1, False), (2, False), (2, True)):
        model = Net(group_of(size, for_torch_tools))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model(batch(rank, 0)).backward()
        model(batch(rank, 1)).backward()  # accumulation
        finish_gradients(model)
        model(batch(rank, 2))  # a pass without a backward pass
        optimizer.step()
        model(batch(rank, 3)).backward()
        model.load_state_dict(state)  # with the gradients of other weights
        model(batch(rank, 4)).backward()
        optimizer.zero_grad()  # a step that is skipped
        optimizer.step()
        with torch.no_grad():
            for parameter in expert_parameters(model).values():
                parameter.mul_(1.0)
        with equal_tokens(model):  # the parts alone
            model(batch(rank, 5)).backward()
        average_expert_gradients(model)
        optimizer.step()
    model = Net(group_of(2))
    model.layers[0].group.averaged_elsewhere = True
    model(batch(rank, 0)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model(batch(rank, 1))


def not_finite(rank: int) -> None:
    """Nothing is clipped, and the loads are dropped."""
    model = Net(group_of(2))
    biases = [layer.balance.bias.clone() for layer in model.layers]
    model(batch(rank, 0)).backward()
    if rank == 1:
        model.layers[1].experts.w2.grad.fill_(float("inf"))
    before = [parameter.grad.clone() for parameter in model.first.parameters()]
    assert not torch.isfinite(finish_gradients(model, 0.1))
    assert all(
        torch.equal(p.grad, g) for p, g in zip(model.first.parameters(), before, strict=True)
    )
    for layer, bias in zip(model.layers, biases, strict=True):
        assert torch.equal(layer.balance.bias, bias)
        assert not layer.balance.load.any()


@pytest.mark.parametrize("loop", [forgotten, updated_by_hand, right_loops, not_finite])
def test_a_forgotten_line_is_named(run_processes, loop):
    run_processes(loop, 4)


def test_a_step_keeps_casts_and_the_promise_of_equal_tokens():
    model = Net()
    group, experts = model.layers[0].group, model.layers[0].experts
    entered = []
    experts.cast_ahead = lambda dtype: nullcontext(entered.append(dtype))
    with step(model, torch.bfloat16, equal_tokens=True):
        assert group.has_equal_tokens
    with step(model):
        assert not group.has_equal_tokens
    assert entered == [torch.bfloat16]


def test_the_balance_may_be_left_to_the_caller():
    model = Net()
    model(batch(0, 0)).backward()
    before = model.layers[0].balance.bias.clone()
    finish_gradients(model, balance=False)
    assert torch.equal(model.layers[0].balance.bias, before)
    finish_gradients(model)
    assert not torch.equal(model.layers[0].balance.bias, before)


def test_gradients_are_divided_by_the_scale_of_the_losses():
    model = Net()
    (4 * model(batch(0, 0))).backward()
    expected = {name: parameter.grad / 4 for name, parameter in model.named_parameters()}
    norm = finish_gradients(model, scale=4.0)
    actual = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(actual, expected)
    squares = sum(float(gradient.square().sum()) for gradient in expected.values())
    assert float(norm) == pytest.approx(squares**0.5, rel=1e-6)
