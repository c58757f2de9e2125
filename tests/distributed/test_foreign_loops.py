"""Distributed experts inside torch's own tools, accelerate, Lightning and transformers' Trainer."""

# R ranks of the world, W ranks of an expert group

import io
import itertools
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from moe_cases import make_layer, owned
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization

from moe_core import (
    MoELayer,
    average_expert_gradients,
    clip_gradients,
    expert_parameters,
    ignore_experts,
)
from moe_core.parallel import make_expert_groups
from swinv2_moe.models.timm_model import timm_model

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SHAPE = {"model_dim": 8, "hidden_dim": 8, "capacity_factor": 0.0, "top_k": 1}


class Scales(nn.Module):
    """Two experts of a user, which multiply their rows by a number each."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        return rows * self.scales.repeat_interleave(counts).unsqueeze(1)


class Net(nn.Module):
    """A trunk and a layer of experts; the output has the attributes that trainers read."""

    def __init__(self, group=None, num_experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8).double()
        self.moe = make_layer(group=group, num_experts=num_experts, **SHAPE)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y, aux_loss = self.moe(self.first(x.double()))
        return {"loss": y.square().sum() + 0.1 * aux_loss}


def batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 8, generator=generator)


def check_gradients(model: Net, num_steps: int = 1) -> None:
    """The gradients are those of one process with the batches of all ranks."""
    single, num_ranks = Net(num_experts=model.moe.config.num_experts), dist.get_world_size()
    for step in range(num_steps):
        for rank in range(num_ranks):
            (single(batch(rank, step))["loss"] / num_ranks).backward()
    for name, parameter in model.named_parameters():
        expected = single.get_parameter(name).grad
        if name.startswith("moe."):
            expected = owned(expected, model.moe, name.removeprefix("moe."))
        torch.testing.assert_close(parameter.grad, expected, **CLOSE, msg=name)


def check_data_parallel(rank: int) -> None:
    for size, num_experts in ((2, 4), (4, 2), (1, 2)):
        group = make_expert_groups(size)
        model = Net(group, num_experts)
        before = [p.detach().clone() for p in model.parameters()]
        parallel = DistributedDataParallel(ignore_experts(model))
        assert all(map(torch.equal, before, model.parameters()))
        with parallel.no_sync():
            parallel(batch(rank, 0))["loss"].backward()
        parallel(batch(rank, 1))["loss"].backward()
        check_gradients(model, 2)
        average_expert_gradients(model)  # nothing is averaged twice
        check_gradients(model, 2)
    # the root knows its experts, or is refused
    layer = make_layer(group=make_expert_groups(2), num_experts=4, **SHAPE)
    backbone = timm_model(
        name="vit_tiny_patch16_224",
        args="patch_size=4 embed_dim=8 depth=2 num_heads=2",
        img_size=16,
        num_experts=4,
        moe_blocks=[[1]],
        expert_group=layer.group,
    )
    for root in (layer, backbone):
        before = [p.detach().clone() for p in expert_parameters(root).values()]
        DistributedDataParallel(root)
        assert all(map(torch.equal, before, expert_parameters(root).values()))
    check_frozen_experts(layer.group)


def check_frozen_experts(group) -> None:
    """A program may leave frozen experts that are equal on all ranks to DistributedDataParallel and
    ZeroRedundancyOptimizer. Others are refused before they are overwritten."""
    would = r"moe.experts.{}: Dist.* would overwrite .*ignore_experts"
    for is_equal, bias in ((True, 0), (False, dist.get_rank())):
        model = Net(group)
        with pytest.raises(ValueError, match=would.format("w1")):
            DistributedDataParallel(model)
        frozen = model.moe.experts.b2.requires_grad_(False)
        frozen.detach().fill_(bias)
        experts = expert_parameters(model).items()
        model._ddp_params_and_buffers_to_ignore = [name for name, p in experts if p.requires_grad]
        if is_equal:
            before = model.moe.experts.w1.detach().clone()
            DistributedDataParallel(model)(batch(dist.get_rank()))["loss"].backward()
            assert torch.equal(before, model.moe.experts.w1)
            ZeroRedundancyOptimizer([frozen], torch.optim.SGD, lr=0.1).step()
        else:
            with pytest.raises(ValueError, match=would.format("b2")):
                DistributedDataParallel(model)
            assert torch.equal(frozen, torch.full_like(frozen, bias))
            with pytest.raises(ValueError, match="ZeroRedundancyOptimizer would overwrite"):
                ZeroRedundancyOptimizer([frozen], torch.optim.SGD, lr=0.1).step()


def check_drift(rank: int) -> None:
    """Ranks that update shared parameters differently are told in the second or third pass."""
    group = make_expert_groups(2)
    for is_parallel in (True, False):
        model: nn.Module = Net(group)
        if is_parallel:
            model = DistributedDataParallel(ignore_experts(model))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(batch(rank))["loss"].backward()
        if is_parallel:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with pytest.raises(ValueError, match=r"router's weights differ .*moe_core.clip_gradients"):
            model(batch(rank))
    model = Net(group)
    model.moe = MoELayer(model.moe.config, group, router=model.moe.router, experts=Scales())
    parallel = DistributedDataParallel(ignore_experts(model))
    parallel(batch(rank))["loss"].backward()
    average_expert_gradients(model)
    torch.optim.SGD(model.parameters(), 0.1).step()
    parallel(batch(rank))
    model.moe.experts.scales.data += rank
    with pytest.raises(ValueError, match=r"moe: the experts differ .*finish_gradients"):
        parallel(batch(rank))
    model = Net(group)
    model.requires_grad_(False).moe.experts.requires_grad_()
    parallel = ignore_experts(model)
    optimizer = torch.optim.SGD(expert_parameters(model).values(), 0.1)
    for step in range(3):  # a frozen trunk does not drift
        parallel(batch(rank, step))["loss"].backward()
        clip_gradients(model, 0.1)
        optimizer.step()


def check_zero(rank: int) -> None:
    model = Net(make_expert_groups(2))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(batch(rank))["loss"].backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"ZeroRedundancyOptimizer would overwrite"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(ValueError, match=r"would keep this rank's only: save on all ranks"):
        torch.save(model.state_dict(), io.BytesIO())
    with pytest.raises(ValueError, match=r"would keep this rank's only: save on all ranks"):
        safetensors.torch.save(model.state_dict())
    model = Net(make_expert_groups(2))
    experts = set(expert_parameters(model).values())
    others = [p for p in model.parameters() if p not in experts]
    ZeroRedundancyOptimizer(others, torch.optim.SGD, lr=0.1).step()


def check_fully_sharded(rank: int) -> None:
    group = make_expert_groups(2)
    with pytest.raises(ValueError, match=r"experts.w1: .* ignored_params=set\(moe_core.expert"):
        fully_shard(Net(group))
    with pytest.raises(ValueError, match=r"experts.w1: .* ignored_states=list\(moe_core.expert"):
        FullyShardedDataParallel(Net(group), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"experts.w1: .*parametrize needs all experts in one"):
        register_parametrization(Net(group).moe.experts, "w1", nn.Identity())
    own = Net()
    own.moe = MoELayer(own.moe.config, group, router=own.moe.router, experts=Scales())
    fully_shard(own)
    own(batch(rank))["loss"].backward()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"experts.scales: fully_shard has mixed the experts of 2"):
        optimizer.step()
    model = Net(group)
    fully_shard(model, ignored_params=set(expert_parameters(model).values()))
    model(batch(rank))["loss"].backward()
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.full_tensor()
    check_gradients(model)


def inside_torch(rank: int) -> None:
    for check in (check_data_parallel, check_drift, check_zero, check_fully_sharded):
        check(rank)


def test_torchs_tools_are_right_or_refuse(run_processes):
    run_processes(inside_torch, 4)


def trained(group, num_experts: int, shards: bool) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its AdamW after a step on the same batch."""
    model = Net(group, num_experts)
    if shards:
        fully_shard(model, ignored_params=set(expert_parameters(model).values()))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(batch(0))["loss"].backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def check_loaded(model, optimizer, single, single_optimizer) -> None:
    for name, parameter in model.named_parameters():
        whole = single.get_parameter(name)
        moments = optimizer.state[parameter]["exp_avg"]
        expected_moments = single_optimizer.state[whole]["exp_avg"]
        for found, expected in ((parameter, whole), (moments, expected_moments)):
            if isinstance(found, DTensor):
                found = found.full_tensor()
            if name.startswith("moe."):
                expected = owned(expected, model.moe, name.removeprefix("moe."))
            torch.testing.assert_close(found, expected, **CLOSE, msg=name)


def load_anew(group, num_experts: int, shards: bool, file: Path, ranks) -> tuple:
    """A model and its optimiser from a checkpoint."""
    model, optimizer = trained(group, num_experts, shards)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=file, process_group=ranks)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return model, optimizer


def through_checkpoints(rank: int, folder: Path) -> None:
    """What one number of ranks saves, another loads: one, groups of 2 with replicas, 4 ranks with
    parts of experts, a sharded trunk."""
    alone = [dist.new_group([r]) for r in range(4)][rank]
    pair, four = make_expert_groups(2), make_expert_groups(4)
    layouts = {
        "one": (None, False),
        "replicas": (pair, False),
        "four": (four, False),
        "sharded": (pair, True),
    }
    for num_experts in (2, 4):
        if num_experts == 4:  # two experts of a rank, or one
            layouts = {"replicas": (pair, False), "four": (four, False)}
        reference = trained(None, num_experts, False)
        for name, (group, shards) in layouts.items():
            ranks = None if group else alone
            if group or rank == 0:
                state = state_of(*trained(group, num_experts, shards))
                file = folder / f"{num_experts}{name}"
                dcp.save(state, checkpoint_id=file, process_group=ranks)
        dist.barrier()
        for group, shards in layouts.values():
            ranks = None if group else alone
            for source in layouts:
                file = folder / f"{num_experts}{source}"
                check_loaded(*load_anew(group, num_experts, shards, file, ranks), *reference)


def test_torchs_checkpoints_load_on_any_number_of_ranks(run_processes, tmp_path):
    run_processes(through_checkpoints, 4, tmp_path)


OPTIMIZERS = {
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), foreach=False),
    "adam": lambda model: torch.optim.Adam(model.parameters(), foreach=False),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False),
}


def stepped(group, kind: str, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(group)
    optimizer = OPTIMIZERS[kind](model)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(0, step))["loss"].backward()
        optimizer.step()
    return model, optimizer


def states_of_optimizers(rank: int, folder: Path) -> None:
    """A rank's own values come back on as many ranks. Others get those of their experts; a value
    for all experts of a rank (Adafactor's mean over them, of a bias) becomes their mean."""
    groups = {size: make_expert_groups(size) for size in (2, 4)}
    for kind in OPTIMIZERS:
        saved = {}
        for size, group in groups.items():
            model, optimizer = stepped(group, kind, 3)
            dcp.save(state_of(model, optimizer), checkpoint_id=folder / f"{kind}{size}")
            saved[size] = all_states(model, optimizer)
        for (source, of_experts), group in itertools.product(saved.items(), groups.values()):
            model, optimizer = stepped(group, kind, 1)
            state = state_of(model, optimizer)
            dcp.load(state, checkpoint_id=folder / f"{kind}{source}")
            states = [state["model"], state["optimizer"]]
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
            for key, found in all_states(model, optimizer).items():
                each = of_experts[key].repeat_interleave(4 // len(of_experts[key]), 0)  # expert
                expected = each.unflatten(0, (len(found), -1)).mean(1)
                torch.testing.assert_close(found, expected, **CLOSE, msg=str((kind, key)))


def all_states(model: Net, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], Tensor]:
    """The states of the experts of all ranks of the group, [4, ...]; of a value for all experts of
    a rank [W, ...]."""
    states = {}
    for name, parameter in expert_parameters(model).items():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.ndim:
                parts = [torch.empty_like(value) for _ in range(model.moe.group.size)]
                dist.all_gather(parts, value.detach(), group=model.moe.group.process_group)
                states[name, key] = torch.cat(parts)
    return states


def test_states_of_optimizers_load_on_other_numbers_of_ranks(run_processes, tmp_path):
    run_processes(states_of_optimizers, 4, tmp_path)


# --- trainers


def experts_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in expert_parameters(model).values()]


def expected_experts(group, num_steps: int) -> list[Tensor]:
    """This rank's experts after steps of SGD in one process, with the batches of all ranks."""
    single, model = Net(), Net(group)
    optimizer = torch.optim.SGD(single.parameters(), 0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (single(batch(rank, step))["loss"] / dist.get_world_size()).backward()
        optimizer.step()
    names = expert_parameters(model)
    return [
        owned(single.get_parameter(name), model.moe, name.removeprefix("moe.")) for name in names
    ]


class Batches(torch.utils.data.Dataset):
    """Row r of batch s is item (2 s + r): the samplers of trainers give each rank every second."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict:
        return {"x": batch(index % 2, index // 2), "labels": 0}


class Squeezed(Net):
    """A Net for batches with one item [1, T, M]."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(x.squeeze(0))


def in_accelerate(rank: int, folder: Path, clip: bool) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = ignore_experts(Net(make_expert_groups(2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        accelerator.backward(parallel(batch(rank, step))["loss"])
        if clip:
            accelerator.clip_grad_norm_(parallel.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="keep this rank's only"):
        accelerator.save_state(folder)
    return model


def in_trainer(rank: int, folder: Path, clip: bool) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        max_steps=3,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.1 if clip else 0.0,
        disable_tqdm=True,
    )
    model = ignore_experts(Squeezed(make_expert_groups(2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(model, arguments, train_dataset=Batches(), optimizers=(optimizer, None))
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(Batches())
    trainer.train()
    if rank == 0:  # which alone saves
        with pytest.raises(ValueError, match="keep this rank's only"):
            trainer.save_model(folder)
    return model


def in_lightning(rank: int, folder: Path, clip: bool) -> nn.Module:
    import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Squeezed(make_expert_groups(2))

        def training_step(self, rows: dict, index: int) -> Tensor:
            return self.net(rows["x"])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=False,  # which would shuffle
        gradient_clip_val=0.1 if clip else None,
    )
    module = ignore_experts(Module())
    own = range(rank, len(Batches()), 2)
    trainer.fit(module, torch.utils.data.DataLoader(Batches(), 1, sampler=own))
    if rank == 0:  # which alone saves
        with pytest.raises(ValueError, match="keep this rank's only"):
            trainer.save_checkpoint(folder / "last.ckpt")
    return module


LOOPS = {
    "accelerate": in_accelerate,
    "transformers": in_trainer,
    "pytorch_lightning": in_lightning,
}


def in_loop(rank: int, package: str, folder: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the world is made already
    model = LOOPS[package](rank, folder, False)
    expected = expected_experts(make_expert_groups(2), 3)
    torch.testing.assert_close(experts_of(model), expected, **CLOSE)
    with pytest.raises(ValueError, match="router's weights differ"):
        LOOPS[package](rank, folder, True)


@pytest.mark.slow
@pytest.mark.parametrize("package", list(LOOPS))
def test_trainers_train_experts_as_one_process(package, run_processes, tmp_path):
    pytest.importorskip(package)
    if package == "transformers":
        pytest.importorskip("accelerate")  # of its Trainer
    run_processes(in_loop, 2, package, tmp_path, fresh=True)
