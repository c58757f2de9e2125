"""DeepSpeed's ZeRO-1 and ZeRO-2 train a model with MoELayer as plain torch does."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed", reason="needs the deepspeed extra")

from moe_core import MoEConfig, MoELayer, average_expert_gradients, ignore_experts
from moe_core.compat.deepspeed import mark_experts
from moe_core.parallel import make_expert_groups

STEPS, BATCH, CLASSES, WIDTH, LR = 20, 16, 10, 32, 1e-2


class Net(nn.Module):
    """Two residual MoE layers between projections."""

    def __init__(self, group) -> None:
        super().__init__()
        config = MoEConfig(WIDTH, 2 * WIDTH, num_experts=4, top_k=2, capacity_factor=0.0)
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(MoELayer(config, group) for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels):
        x, aux_losses = self.first(x), 0.0
        for layer in self.layers:
            y, aux_loss = layer(x)
            x, aux_losses = x + y, aux_losses + aux_loss
        return nn.functional.cross_entropy(self.last(x), labels) + 0.01 * aux_losses


def batches(rank: int):
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(99))
    for _ in range(STEPS):
        x = torch.randn(BATCH, 8, generator=generator)
        yield x, (x @ weights).argmax(dim=1)


def build(size: int) -> Net:
    torch.manual_seed(0)
    return Net(make_expert_groups(size))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3, weight_decay=0.05)


def plain_losses(rank: int, size: int) -> list[float]:
    model = build(size)
    wrapped = nn.parallel.DistributedDataParallel(ignore_experts(model))
    optimizer = adam(model)
    losses = []
    for x, labels in batches(rank):
        loss = wrapped(x, labels)
        optimizer.zero_grad()
        loss.backward()
        average_expert_gradients(model)
        optimizer.step()
        losses.append(float(loss))
    return losses


def deepspeed_losses(rank: int, size: int, stage: int, root: Path) -> list[float]:
    import deepspeed

    model = build(size)
    names = set(model.state_dict())
    mark_experts(model)
    assert set(model.state_dict()) == names
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    shared = [p for p in model.parameters() if getattr(p, "allreduce", True)]
    groups = [{"params": shared, "name": "shared"}]
    own = [p for p in model.parameters() if not getattr(p, "allreduce", True)]
    if own:
        groups.append({"params": own, "moe": True, "name": own[0].group_name})
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=1e-3, weight_decay=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = []
    for x, labels in batches(rank):
        loss = engine(x, labels)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    if own:
        with pytest.raises(RuntimeError, match=r"save them with moe_core\.checkpoint"):
            engine.save_checkpoint(str(root))
    return losses


def compare(rank: int, size: int, stage: int, root: Path) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    expected = plain_losses(rank, size)
    found = deepspeed_losses(rank, size, stage, root)
    largest = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    print(f"rank {rank}, groups of {size}, ZeRO-{stage}: largest relative difference {largest:.1e}")
    assert expected[-1] < 0.7 * expected[0]
    # fp32 (eps 6e-8): sums of at most 32 terms, whose errors add up in 20 steps
    assert largest < 20 * 32 * 6e-8


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("stage", [1, 2])
def test_losses_are_those_of_plain_torch(run_processes, tmp_path, ranks, size, stage):
    run_processes(compare, ranks, size, stage, tmp_path, fresh=True)


def mixed(rank: int) -> None:
    model = nn.ModuleList([build(1), build(2)])
    with pytest.raises(ValueError, match="expert groups of 1, 2 ranks in one model"):
        mark_experts(model)


@pytest.mark.slow
def test_groups_of_several_sizes_are_refused(run_processes):
    run_processes(mixed, 2)
