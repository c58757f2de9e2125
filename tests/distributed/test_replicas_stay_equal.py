"""Four ranks, two replicas of each expert, fp16 with overflows on single ranks: what is there twice
stays bit-equal."""

import random
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_cases import make_trainer

from moe_core import expert_parameters, moe_layers
from moe_core.parallel import ParallelStrategy
from swinv2_moe.checkpoints.saver import Saver
from swinv2_moe.data.datasets import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.train.loop import Trainer

CLIP = 0.4
OPTIONS = "MODEL.MOE.EXPERT_PARALLEL_SIZE 2 MODEL.MOE.STRATEGY n2 MODEL.MOE.CAPACITY_FACTOR 1.0"
OPTIONS += (
    f" MODEL.MOE.GATE_NOISE 1.0 AMP_ENABLE True AMP_DTYPE float16 TRAIN.CLIP_GRAD {CLIP}"
    " DATA.BATCH_SIZE 4"
)
OPTIONS += (
    " MODEL.SWINV2.DEPTHS [1,1] MODEL.SWINV2.NUM_HEADS [2,2] MODEL.SWINV2.PRETRAINED_WINDOW_SIZES"
    " [0,0]"
)
OPTIONS += " MODEL.MOE.BLOCKS [[0],[0]]"
STRATEGIES = [
    ParallelStrategy(r, d, a2a) for r in (0, 1) for d in (1, 2) for a2a in ("linear", "2dh")
]


def random_batches(count: int, generator: torch.Generator) -> list[Batch]:
    return [
        Batch(
            torch.randn(4, 3, 16, 16, generator=generator),
            torch.randint(10, (4,), generator=generator),
            [],
        )
        for _ in range(count)
    ]


def overflow(parameter: torch.nn.Parameter):
    """An infinity in this rank's own gradient, before any exchange; the handle takes it away
    again."""
    return parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))


def train(trainer: Trainer, seed: int, num_steps: int) -> tuple[list[tuple], set[int]]:
    """Per step what all ranks must agree on (norm, scale, updates), and the steps in which one rank
    overflowed."""
    rank, rng = trainer.world.rank, random.Random(seed)  # all ranks draw the same
    own = torch.Generator().manual_seed(100 * seed + rank)
    torch.manual_seed(100 * seed + rank)
    layers = list(moe_layers(trainer.step.model).values())
    targets = [layers[0].experts.w1, layers[1].experts.b2]
    if not trainer.config.train.shard_trunk:  # hooks of sharded parameters see the average
        targets += [trainer.step.model.head.fc.weight, trainer.step.model.patch_embed.proj.weight]
    trainer.step.scaler.GROWTH_INTERVAL, trainer.step.scaler.scale = 7, 2.0**10
    trainer.step.wrapped.train()
    history, injected = [], set()
    for step in range(num_steps):
        for layer in layers:
            layer.strategy = rng.choice(STRATEGIES)
        batches = random_batches(rng.choice((1, 1, 1, 2)), own)
        target, where, now = rng.choice(targets), rng.randrange(4), rng.random() < 0.15
        handle = overflow(target) if now and where == rank else None
        norm = trainer.train_step(batches).grad_norm
        if handle is not None:
            handle.remove()
        injected |= {step} if now else set()
        history.append((norm, trainer.step.scaler.scale, trainer.step.scaler.updates))
    return history, injected


def check_history(history: list[tuple], injected: set[int]) -> None:
    norms, scales, updates = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*history, strict=True)
    )
    finite = norms.isfinite()
    assert 3 <= len(injected) <= 15
    assert not finite[list(injected)].any()
    assert (updates.diff(prepend=torch.zeros(1)) == finite).all()
    assert updates[-1] >= len(history) / 2
    assert (norms[finite] > CLIP).float().mean() > 0.5
    assert (scales.diff() > 0).any()
    assert (scales.diff() < 0).any()


def bits(trainer: Trainer, names) -> Tensor:
    """Parameters and both moments, as one vector of integers."""
    parameters = dict(trainer.step.model.named_parameters())
    tensors = []
    for name in names:
        state = trainer.step.optimizer.state[parameters[name]]
        tensors += [parameters[name].detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]]
    return torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors])


def assert_equal_on(group: dist.ProcessGroup, own: Tensor, size: int) -> None:
    everyone = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everyone, own, group=group)
    assert all(torch.equal(other, own) for other in everyone)


def check_steps(rank: int, seed: int, num_steps: int, shard: bool) -> None:
    trainer = make_trainer(rank, 4, f"{OPTIONS} TRAIN.SHARD_TRUNK {shard}")
    before = next(iter(expert_parameters(trainer.step.model).values())).detach().clone()
    history, injected = train(trainer, seed, num_steps)
    check_history(history, injected)
    assert len({tuple(other) for other in trainer.world.gather(history)}) == 1
    experts = expert_parameters(trainer.step.model)
    group = next(iter(moe_layers(trainer.step.model).values())).group
    assert_equal_on(group.replicas.process_group, bits(trainer, experts), 2)
    everyone = trainer.world.gather(next(iter(experts.values())).detach())
    assert not everyone[rank].equal(before)
    assert not everyone[0].equal(everyone[1])  # other experts
    shared = [name for name, p in trainer.step.model.named_parameters() if name not in experts]
    if shard:
        assert all(isinstance(trainer.step.model.get_parameter(name), DTensor) for name in shared)
    else:
        assert_equal_on(dist.group.WORLD, bits(trainer, shared), 4)
        check_drift_is_not_saved(trainer, shared[1])


def check_drift_is_not_saved(trainer: Trainer, name: str) -> None:
    """A weight that differs in one bit on a rank."""
    if trainer.world.rank == 2:
        with torch.no_grad():
            trainer.step.model.get_parameter(name).view(torch.int32)[0] ^= 1
    root = Path(tempfile.mkdtemp()) / "checkpoints"
    saver = Saver(root, trainer.world, keep_last=2)
    with pytest.raises(UserError, match=f"step 50 is not saved: {name} of rank 2 differs"):
        saver.save(trainer.step.model, trainer.step.state(), {"step": 50})
    assert not root.exists()


@pytest.mark.parametrize(
    ("seed", "num_steps", "shard"),
    [(0, 26, False), pytest.param(1, 50, True, marks=pytest.mark.slow)],
)
def test_replicas_stay_equal(seed, num_steps, shard, run_processes):
    run_processes(check_steps, 4, seed, num_steps, shard)
