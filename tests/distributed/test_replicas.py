"""Expert replicas equal one process, step after step; what every layout saves, every other loads;
what they send."""

# W ranks of the world, S ranks of an expert group, E experts, M model dim, H hidden dim, T tokens
# of a rank, N rows

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe_cases import make_layer, owned
from test_strategies import SHAPE
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_core import (
    MoELayer,
    average_expert_gradients,
    clip_gradients,
    expert_parameters,
    global_grad_norm,
    ignore_experts,
    load_tensors,
    save_tensors,
)
from moe_core.parallel import ExpertGroup, ParallelStrategy, make_expert_groups, valid_r


class Model(nn.Module):
    """A trunk, two layers of experts on the same group and an input of its own for each rank and
    step."""

    def __init__(
        self, group: ExpertGroup | None, num_experts: int, seed: int = 0, dtype=torch.float64
    ) -> None:
        super().__init__()
        config = {
            **SHAPE,
            "num_experts": num_experts,
            "capacity_factor": 0.0,
            "top_k": min(2, num_experts),
        }
        self.first = make_layer(seed, dtype, group, **config)
        self.trunk = nn.Linear(8, 8).to(dtype)
        self.last = make_layer(seed + 1, dtype, group, **{**config, "activation": "silu"})

    def forward(self, x: Tensor, strategy: ParallelStrategy | None = None) -> Tensor:
        y, aux_loss = self.first(x, strategy=strategy)
        z, last_aux_loss = self.last(self.trunk(x + y), strategy=strategy)
        return z.square().sum() + aux_loss + last_aux_loss


def tokens(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn((7, 0, 1, 4)[(rank + step) % 4], 8, dtype=torch.float64, generator=generator)


def strategies(num_experts: int, size: int) -> list[ParallelStrategy]:
    found = [ParallelStrategy(r, 1 + r % 2) for r in valid_r(num_experts, size)]
    return found + [
        ParallelStrategy(r, 2, "2dh", size // 2) for r in valid_r(num_experts, size)[1:] if size > 1
    ]


def check_training(rank: int, world_size: int, size: int, num_experts: int) -> None:
    """A few clipped steps, against one process on everyone's tokens."""
    group = make_expert_groups(size)
    assert (group.size, group.num_replicas) == (size, world_size // size)
    model, single = Model(group, num_experts), Model(None, num_experts)
    parallel = wrap(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, part_of(single.get_parameter(name), model, name)), name
    choices = strategies(num_experts, size)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, single)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = parallel(tokens(rank, step), choices[step % len(choices)])
        loss.backward()
        average_expert_gradients(model)
        losses = [single(tokens(r, step)) / world_size for r in range(world_size)]
        # a clipping factor is in fp32
        close = {"rtol": 1e-6, "atol": 1e-7} if step else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(loss, losses[rank] * world_size, **close)
        sum(losses).backward()
        compare(model, single, **close)
        torch.testing.assert_close(
            global_grad_norm(model), global_grad_norm(single), rtol=1e-6, atol=0
        )
        norms = [clip_gradients(m, 0.5 * global_grad_norm(single).item()) for m in (model, single)]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        torch.testing.assert_close(global_grad_norm(model), 0.5 * norms[0], rtol=1e-5, atol=0)
        compare(model, single, 1e-6, 1e-7)
        for optimizer in optimizers:
            optimizer.step()
        assert_replicas_equal(model, group)


def wrap(model: nn.Module, **options) -> nn.Module:
    return DistributedDataParallel(ignore_experts(model), **options)


def part_of(whole: Tensor, model: nn.Module, name: str) -> Tensor:
    """What of a tensor of the one-process model this rank has under the same name."""
    child, _, rest = name.partition(".")
    layer = model.get_submodule(child)
    return owned(whole, layer, rest) if isinstance(layer, MoELayer) else whole


def compare(model: nn.Module, single: nn.Module, rtol: float, atol: float) -> None:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: part_of(single.get_parameter(name).grad, model, name) for name in found}
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def assert_replicas_equal(model: nn.Module, group: ExpertGroup) -> None:
    for name, parameter in expert_parameters(model).items():
        copies = [torch.empty_like(parameter) for _ in range(group.num_replicas)]
        if group.num_replicas > 1:
            dist.all_gather(copies, parameter.detach(), group=group.replicas.process_group)
            assert all(torch.equal(copy, parameter) for copy in copies), name


def trains_like_one_process(rank: int, world_size: int, cases: list[tuple[int, int]]) -> None:
    for size, num_experts in cases:
        check_training(rank, world_size, size, num_experts)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (4, [(1, 2), (2, 4), (2, 1), (4, 2)]),
        pytest.param(4, [(1, 1), (2, 2), (2, 8), (4, 1), (4, 4), (4, 8)], marks=pytest.mark.slow),
        pytest.param(8, [(2, 4), (2, 1), (4, 8), (4, 2), (8, 2)], marks=pytest.mark.slow),
    ],
)
def test_replicas_train_like_one_process(run_processes, world_size, cases):
    run_processes(trains_like_one_process, world_size, world_size, cases, seconds=200)


def save(rank: int, size: int, directory: Path) -> None:
    model = Model(make_expert_groups(size), 2, seed=5)
    save_tensors(directory, model, model.state_dict(), is_main=rank == 0)
    dist.barrier()


def saves_and_loads(rank: int, directory: Path) -> None:
    """Two experts over 1, 2 and 4 ranks: whole, one each, halves; with 4, 2 and no replicas."""
    for size in (1, 2, 4):
        save(rank, size, directory / str(size))
    groups = {size: make_expert_groups(size) for size in (1, 2, 4)}
    whole = Model(None, 2, seed=5)
    for saved in (1, 2, 4, "one process"):
        for group in groups.values():
            model = Model(group, 2, seed=9)
            model.load_state_dict(load_tensors(directory / str(saved), model))
            for name, parameter in model.named_parameters():
                expected = part_of(whole.get_parameter(name), model, name)
                assert torch.equal(parameter, expected), (saved, group.size, name)


def test_every_layout_loads_what_any_other_saved(run_processes, tmp_path):
    whole = Model(None, 2, seed=5)
    save_tensors(tmp_path / "one process", whole, whole.state_dict())
    run_processes(saves_and_loads, 4, tmp_path)
    for layout in ("1", "2", "4"):
        model = Model(None, 2, seed=9)
        model.load_state_dict(load_tensors(tmp_path / layout, model))
        torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)
        assert len(list((tmp_path / layout / "experts" / "first").iterdir())) == 2


class Skipping(nn.Module):
    """Experts of one's own that leave out, as many do, the one that got no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        parts = rows.tensor_split(offsets.tolist()[:-1])
        return torch.cat(
            [f(part) if len(part) else part for f, part in zip(self.experts, parts, strict=True)]
        )


def unused_expert_of_one_replica(rank: int) -> None:
    group = make_expert_groups(1)
    router = nn.Linear(8, 2, bias=False).double()
    layer = make_layer(0, group=group, **SHAPE, num_experts=2, capacity_factor=0.0)
    torch.manual_seed(0)
    layer = MoELayer(layer.config, group, router=router, experts=Skipping())
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 8))
    for x in (torch.ones(3, 8).double(), (1 - 2 * rank) * torch.ones(3, 8).double()):
        layer.zero_grad()
        layer(x)[0].sum().backward()  # the second time, each replica uses another expert
        average_expert_gradients(layer)
    for expert in layer.experts.experts:
        torch.testing.assert_close(expert.weight.grad.abs(), torch.full((8, 8), 1.5).double())


def test_an_expert_that_only_one_replica_used(run_processes):
    run_processes(unused_expert_of_one_replica, 2, seconds=30)


def train_by_hand(rank: int, group: ExpertGroup, strategy: ParallelStrategy) -> Model:
    """Two accumulated batches for each step; the update is after the backward pass."""
    model = Model(group, 4)
    for step in range(3):
        wrapped = wrap(model)
        for batch in range(2):
            wrapped(tokens(rank, 2 * step + batch), strategy).backward()
        with torch.no_grad():
            for parameter in expert_parameters(model).values():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        model.zero_grad()
    return model


class Updates:
    """Hooks of the experts' gradients: an optimiser in the backward pass, as torchtune's, that
    updates with the sum of two accumulated gradients; and a reader of each gradient."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.read: dict[Tensor, Tensor] = {}
        self.sums: dict[Tensor, list[Tensor]] = {parameter: [] for parameter in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.update)
            parameter.register_hook(partial(self.read.__setitem__, parameter))

    def update(self, parameter: Tensor) -> None:
        assert torch.equal(parameter.grad, self.read.pop(parameter))
        self.sums[parameter].append(parameter.grad)
        parameter.grad = None
        if len(self.sums[parameter]) == 2:
            with torch.no_grad():
                parameter.sub_(0.1 * sum(self.sums[parameter]))
            self.sums[parameter].clear()


def hooks_get_averages(rank: int) -> None:
    """The hooks of a user see what an optimiser after the backward pass sees."""
    group = make_expert_groups(2)
    for strategy in (ParallelStrategy(1, 2), ParallelStrategy(0)):
        expected = train_by_hand(rank, group, strategy)
        with torch.device("meta"):
            model = Model(group, 4)  # its parameters are replaced
        model.to_empty(device="cpu").load_state_dict(Model(group, 4).state_dict())
        experts = expert_parameters(model)
        Updates(list(experts.values()))
        for step in range(3):
            wrapped = wrap(model)
            for batch in range(2):
                wrapped(tokens(rank, 2 * step + batch), strategy).backward()
            model.zero_grad()
        for name, parameter in experts.items():
            close = {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(parameter, expected.get_parameter(name), **close)
        assert_replicas_equal(model, group)


def hooks_before_the_average(rank: int) -> None:
    """Where a call averages the gradients, an update in the backward pass is an error."""
    group = make_expert_groups(2)
    group.for_torch_tools = False
    model = Model(group, 4)

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    read = []
    for parameter in expert_parameters(model).values():
        parameter.register_post_accumulate_grad_hook(lambda p: read.append(p.grad.norm()))
    model(tokens(rank, 0)).backward()  # to read is allowed
    for parameter in expert_parameters(model).values():
        parameter.register_post_accumulate_grad_hook(update)
    with pytest.raises(ValueError, match=r"updated an expert in the backward .*finish_gradients"):
        model(tokens(rank, 1)).backward()


def replicas_that_run_different_layers(rank: int) -> None:
    """The ranks of each expert group call the same layer, their replicas another."""
    group = make_expert_groups(2)
    layers = [make_layer(seed, group=group, capacity_factor=0.0) for seed in range(2)]
    x = torch.randn(5, 6, dtype=torch.float64)
    for layer in layers:
        layer(x)[0].sum().backward()
    with pytest.raises(ValueError, match="the ranks ran different passes of MoE layers"):
        layers[group.replica](x)[0].sum().backward()


@pytest.mark.parametrize(
    "check", [hooks_get_averages, hooks_before_the_average, replicas_that_run_different_layers]
)
def test_hooks_of_the_user(check, run_processes):
    run_processes(check, 4)
