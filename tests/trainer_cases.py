"""Trainers of a small model on the digits, for tests on several ranks."""

from pathlib import Path

import torch
import torch.distributed as dist

from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.data import build_data
from swinv2_moe.models import build_model
from swinv2_moe.train.checkpoint import open_checkpoint
from swinv2_moe.train.distributed import World, expert_group, seed_everything
from swinv2_moe.train.loop import Trainer, mean_over_ranks
from swinv2_moe.train.saver import Saver, save_policy

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart_digits.yaml"
# Three blocks (two with experts), no noise and no limit: nothing depends on how tokens lie on
# ranks. With a large EPS Adam's steps are about proportional to the gradients, so rounding errors
# stay as small as they are.
SMALL = (
    "DEVICE cpu DATA.NUM_WORKERS 0 MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.DEPTHS [1,1,1]"
    " MODEL.DROP_PATH_RATE 0"
)
SMALL += (
    " MODEL.MOE.BLOCKS [[],[0],[0]] MODEL.MOE.NUM_EXPERTS 4 MODEL.MOE.CAPACITY_FACTOR 0"
    " MODEL.MOE.GATE_NOISE 0"
)
SMALL += (
    " MODEL.MOE.EVAL_CAPACITY_FACTOR 0 TRAIN.EPOCHS 2 TRAIN.WARMUP_EPOCHS 0 TRAIN.OPTIMIZER.EPS"
    " 1e-3"
)
GLOBAL_BATCH = 32


def make_trainer(rank: int, size: int, options: str = "") -> Trainer:
    """A trainer that has not begun; of several ranks the default group is its world."""
    batch = f"DATA.BATCH_SIZE {GLOBAL_BATCH // size}"
    config = load_config(QUICKSTART, f"{SMALL} {batch} {options}".split())
    world = World(rank, size, torch.device("cpu"), dist.group.WORLD if size > 1 else None)
    data = build_data(data_config(config), rank, size)
    seed_everything(config.SEED)
    return Trainer(
        config,
        world,
        data,
        build_model(
            model_config(config),
            data.num_classes,
            expert_group(model_config(config).experts, world),
        ),
    )


def save(trainer: Trainer, root: Path, **how) -> Path:
    """The trainer's state as a checkpoint in `root`; every rank calls this."""
    saver = Saver(root, trainer.world, save_policy(trainer.config))
    trainer.save(saver, **how)
    saver.close()
    return root / f"step-{trainer.progress.step:08d}"


def resume(trainer: Trainer, directory: Path) -> None:
    trainer.resume(open_checkpoint(directory, trainer.world))


def train_steps(trainer: Trainer, count: int) -> list[tuple[float, float, float]]:
    """The loss and auxiliary loss (means over the ranks) and the gradient norm of the next so many
    steps."""
    trainer.data.set_epoch(
        trainer.progress.epoch,
        skip_steps=trainer.progress.epoch_step * trainer.config.TRAIN.ACCUMULATION_STEPS,
    )
    size, found = trainer.config.TRAIN.ACCUMULATION_STEPS, []
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
