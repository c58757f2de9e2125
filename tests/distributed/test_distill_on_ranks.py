"""A teacher's outputs on two ranks: the files, the losses and the errors of one process."""

import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import timm
import torch
from trainer_cases import assert_same_steps, make_distilled, train_steps

from moe_core.files import sha256
from swinv2_moe.errors import UserError
from swinv2_moe.train import distill

KEYS = (
    "AUG.MIXUP 0 AUG.CUTMIX 0 MODEL.MOE.GLOBAL_BALANCE True"
    " TRAIN.DISTILL.TEACHER timm:test_resnet@{0}/teacher.pth"
    " TRAIN.DISTILL.IMG_SIZE 32 TRAIN.DISTILL.CACHE {0}/{1}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("distilled")
    torch.manual_seed(0)
    torch.save(
        timm.create_model("test_resnet", num_classes=10).state_dict(), folder / "teacher.pth"
    )
    return folder


def files_of(cache: Path) -> dict[str, str]:
    files = sorted(cache.rglob("*.f16"))
    return {str(path.relative_to(cache)): sha256([path.read_bytes()]) for path in files}


def losses(rank: int, size: int, root: Path, cache: str) -> list:
    """Of three steps, with the parts of the loss."""
    trainer = make_distilled(rank, size, KEYS.format(root, cache))
    trainer.distillation.prepare(0, MagicMock(), trainer.check_stop)
    return train_steps(trainer, 3)


def on_two_ranks(rank: int, root: Path) -> None:
    found = losses(rank, 2, root, "two")
    if rank == 0:
        torch.save(found, root / "losses.pt")


def blind(rank: int, root: Path) -> None:
    """Rank 1 has a cache of its own, with the record and without the outputs."""
    trainer = make_distilled(rank, 2, KEYS.format(root, "blind"))
    cache = trainer.distillation.cache
    if rank == 1:
        shutil.copytree(cache.folder, root / "other" / cache.folder.name)
    trainer.world.barrier()
    if rank == 1:
        cache.folder = root / "other" / cache.folder.name
    with pytest.raises(UserError, match=r"rank 0 finds . of . files .* that all ranks see"):
        trainer.distillation.prepare(0, MagicMock(), trainer.check_stop)


def test_two_ranks_are_as_one(run_processes, root):
    run_processes(on_two_ranks, 2, root)
    assert_same_steps(torch.load(root / "losses.pt"), losses(0, 1, root, "one"))
    assert files_of(root / "one") == files_of(root / "two")
    assert len(files_of(root / "one")) == -(-1437 // distill.CHUNK)


def test_a_cache_of_each_rank_is_refused(run_processes, root):
    run_processes(blind, 2, root)
