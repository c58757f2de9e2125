"""Trainers of a small model on the digits, for tests on several ranks."""

import shlex
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from swinv2_moe.checkpoints.checkpoint import open_checkpoint
from swinv2_moe.checkpoints.saver import Saver
from swinv2_moe.config import AllSections, all_sections, load_config
from swinv2_moe.data.build import build_data
from swinv2_moe.data.datasets import Batch
from swinv2_moe.models import MoEModel, build_model
from swinv2_moe.ranks.world import World, expert_group, seed_everything
from swinv2_moe.start.teacher import open_teacher
from swinv2_moe.train.distill import Distillation
from swinv2_moe.train.loop import Trainer, mean_over_ranks
from swinv2_moe.train.step import TrainingStep

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart_digits.yaml"
# Three blocks (two with experts), no noise and no limit: nothing depends on how tokens lie on
# ranks. With a large EPS Adam's steps are about proportional to the gradients, so rounding errors
# stay as small as they are.
SMALL = (
    "DEVICE cpu DATA.NUM_WORKERS 0 MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1]"
    " MODEL.DROP_PATH_RATE 0 MODEL.MOE.BLOCKS [[],[0],[0]] MODEL.MOE.NUM_EXPERTS 4"
    " MODEL.MOE.CAPACITY_FACTOR 0 MODEL.MOE.GATE_NOISE 0 MODEL.MOE.EVAL_CAPACITY_FACTOR 0"
    " TRAIN.EPOCHS 2 TRAIN.WARMUP_EPOCHS 0 TRAIN.OPTIMIZER.EPS 1e-3"
)
GLOBAL_BATCH = 32
# Losses and gradient norms of steps whose sums have other orders (other ranks, other parts). fp32's
# eps is 6e-8: a sum of the 256 products of the widest layer is wrong by some 16 eps, and some 40
# such sums follow each other: 40**0.5 * 16 * 6e-8 = 6e-6 of the value.
SAME_STEPS = {"rtol": 2e-5, "atol": 2e-6}


def make_trainer(rank: int, size: int, options: str = "") -> Trainer:
    """A trainer that has not begun; of several ranks the default group is its world."""
    config, world = _sections(size, options), _world(rank, size)
    data = build_data(config.data, rank, size)
    return Trainer(config, world, data, _model(config, world, data.num_classes))


def make_distilled(rank: int, size: int, options: str) -> Trainer:
    """As `make_trainer`, with the teacher that the options name."""
    config, world = _sections(size, options), _world(rank, size)
    teacher = open_teacher(config.train.distill.teacher, config.train.distill.img_size, world)
    assert teacher is not None
    data = replace(build_data(config.data, rank, size), views=config.train.distill.views)
    distillation = Distillation(config, world, data, teacher)
    model = _model(config, world, data.num_classes)
    return Trainer(config, world, data, model, distillation=distillation)


def make_step(rank: int, size: int, options: str = "", device: str = "cpu") -> TrainingStep:
    """The training step of such a trainer, without data."""
    config, world = (
        _sections(size, options),
        replace(_world(rank, size), device=torch.device(device)),
    )
    step = TrainingStep(config.train, world, _model(config, world, num_classes=10), 10)
    step.wrapped.train()
    return step


def make_batch(size: int) -> Batch:
    """A rank's batch of noise, for `size` ranks."""
    shape = (GLOBAL_BATCH // size, 3, 16, 16)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return Batch(images, torch.arange(len(images)) % 10, [])


def _sections(size: int, options: str) -> AllSections:
    batch = f"DATA.BATCH_SIZE {GLOBAL_BATCH // size}"
    return all_sections(load_config(QUICKSTART, shlex.split(f"{SMALL} {batch} {options}")))


def _world(rank: int, size: int) -> World:
    group = None
    if size > 1:
        group = dist.group.WORLD
    return World(rank, size, torch.device("cpu"), group)


def _model(config: AllSections, world: World, num_classes: int) -> MoEModel:
    seed_everything(config.run.seed)
    return build_model(config.model, num_classes, expert_group(config.model.experts, world))


def save(trainer: Trainer, root: Path, **how) -> Path:
    """The trainer's state as a checkpoint in `root`; every rank calls this."""
    saver = Saver(root, trainer.world, trainer.config.checkpoint.keep_last)
    trainer.save(saver, **how)
    saver.close()
    return root / f"step-{trainer.progress.step:08d}"


def resume(trainer: Trainer, directory: Path) -> None:
    trainer.resume(open_checkpoint(directory, trainer.world))


def assert_same_steps(found: list, expected: list) -> None:
    """Of what `train_steps` returns, or columns of it."""
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **SAME_STEPS)


def train_steps(trainer: Trainer, count: int) -> list[tuple[float, float, float]]:
    """The loss and auxiliary loss (means over the ranks) and the gradient norm of the next so many
    steps."""
    size, found = trainer.config.train.accumulation_steps, []
    trainer.data.set_epoch(trainer.progress.epoch, skip_steps=trainer.progress.epoch_step * size)
    batches = [
        batch for batch, _ in zip(trainer.data.train_loader, range(count * size), strict=False)
    ]
    trainer.step.wrapped.train()
    for step in range(count):
        result = trainer.train_step(batches[step * size : (step + 1) * size])
        loss = mean_over_ranks(trainer.world, result.loss)
        aux_loss = mean_over_ranks(trainer.world, result.aux_loss)
        found.append((loss, aux_loss, result.grad_norm))
    return found
