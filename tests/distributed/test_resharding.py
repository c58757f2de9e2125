"""What any number of ranks saved, any other number loads: the same tensors to the bit, the same
losses afterwards."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from trainer_cases import assert_same_steps, make_trainer, resume, save, train_steps

from swinv2_moe.checkpoints.checkpoint import read_meta

STEPS_BEFORE, STEPS_AFTER = 3, 3
SAVED, LOADED, EXPERTS = (1, 2, 4), (1, 2, 4, 8), (2, 4, 8)


def options(experts: int, world_size: int) -> str:
    """Expert groups of all ranks, or, with 4 experts, of half of them: replicas of experts."""
    group = world_size // 2 if experts == 4 and world_size > 1 else world_size
    keys = {"NUM_EXPERTS": experts, "EXPERT_PARALLEL_SIZE": group, "GLOBAL_BALANCE": True}
    return (
        " ".join(f"MODEL.MOE.{key} {value}" for key, value in keys.items()) + " TRAIN.EMA_DECAY 0.5"
    )


def save_and_go_on(rank: int, root: Path, experts: int) -> None:
    """Train, save in the middle of an epoch, train on; the losses after the save go into
    losses.json."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = make_trainer(rank, size, options(experts, size))
    train_steps(trainer, STEPS_BEFORE)
    save(trainer, root)
    losses = train_steps(trainer, STEPS_AFTER)
    if rank == 0:
        (root / "losses.json").write_text(json.dumps(losses))


def load_and_go_on(rank: int, sources: list[Path], target: Path, experts: int) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = make_trainer(rank, size, options(experts, size))
    for source in sources:
        train_steps(trainer, 1)  # a state that is to be replaced
        directory = source / f"step-{STEPS_BEFORE:08d}"
        resume(trainer, directory)
        again = save(trainer, target / source.name)
        assert read_meta(again)["files"] == read_meta(directory)["files"], (
            "bytes and checksum of every tensor's file"
        )
        assert (trainer.progress.step, trainer.progress.epoch, trainer.progress.epoch_step) == (
            STEPS_BEFORE,
            0,
            STEPS_BEFORE,
        )
        losses = train_steps(trainer, STEPS_AFTER)
        expected = json.loads((source / "losses.json").read_text())
        assert_same_steps(losses, expected)


def reshard(run_processes, root: Path, saved: tuple, loaded: tuple, experts: int) -> None:
    for world_size in saved:
        start(run_processes, save_and_go_on, world_size, root / f"from-{world_size}", experts)
    sources = [root / f"from-{world_size}" for world_size in saved]
    for world_size in loaded:
        start(
            run_processes, load_and_go_on, world_size, sources, root / f"to-{world_size}", experts
        )


def start(run_processes, function, world_size: int, *args) -> None:
    if world_size == 1:
        function(0, *args)
    else:
        run_processes(function, world_size, *args)


@pytest.mark.parametrize(("saved", "loaded", "experts"), [((4,), (1,), 8), ((2,), (4,), 2)])
def test_some_numbers_of_ranks(saved, loaded, experts, run_processes, tmp_path):
    reshard(run_processes, tmp_path, saved, loaded, experts)


@pytest.mark.slow
@pytest.mark.parametrize("experts", EXPERTS)
def test_every_number_of_ranks(experts, run_processes, tmp_path):
    reshard(run_processes, tmp_path, SAVED, LOADED, experts)
