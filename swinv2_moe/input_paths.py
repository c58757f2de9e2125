"""Checks of a command's paths before it imports torch, which takes seconds.

With several processes nothing is checked here, because a path may exist for some of them only. The
processes check it together later.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.data.section import DATASETS
from swinv2_moe.errors import UserError
from swinv2_moe.files import other_runs
from swinv2_moe.models.bundled import (
    PACKAGED,
    PREFIX,
    bundled_file,
    located,
    packaged_file,
)

if TYPE_CHECKING:
    from yacs.config import CfgNode

NAMES = ("timm:", "hf-hub:")  # beginnings of values of MODEL.PRETRAINED that are no paths
_SPLITS = ("train", "val", "validation", "valid", "test")


def _is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"


def check_run(run: str) -> None:
    """Raise UserError unless `run` can be a run or a checkpoint. Messages name --resume, the older
    form of RUN, if the user did."""
    option = "--resume" if any(word.startswith("--resume") for word in sys.argv) else "RUN"
    if located(run) != run:
        return
    path = Path(run)
    if not _is_alone():
        return
    if not run:
        raise UserError(f"{option} is empty, it must be a run or a checkpoint")
    if not path.exists():
        raise UserError(f"{option} {run}: no such directory; it must be a run or a checkpoint")
    if path.is_file() and path.suffix == ".safetensors":
        return
    if not path.is_dir():
        raise UserError(
            f"{option} {run}: is a file, it must be a run, a checkpoint or a file of"
            " `convert-checkpoint export single` (.safetensors)"
        )
    if not _holds_checkpoint(path):
        reason = "holds no checkpoint (a directory with meta.json)"
        raise UserError(f"{option} {run}: {reason}{other_runs(path)}")


def _holds_checkpoint(path: Path) -> bool:
    has_checkpoints = (path / "meta.json").exists() or (path / "checkpoints").is_dir()
    return has_checkpoints or any(path.glob("step-*"))


def check_files_exist(option: str, files: Sequence[str]) -> None:
    """Raise UserError for the first of `files` that does not exist."""
    for file in files:
        if _is_alone() and not (file and os.path.exists(file)):
            raise UserError(f"{option} {file or repr(file)}: no such file or directory")


def check_data(path: str | None) -> None:
    """Raise UserError unless --data is absent or a directory."""
    if path is not None and _is_alone():
        _check_directory(os.path.expanduser(path))


def check_training(config: CfgNode, resume: str | None) -> None:
    """Check the paths of a training run: of its data, its weights and its directory.

    Args:
        resume: the value of --resume.

    Raises:
        UserError: a path does not exist, or is not what the run needs.
    """
    if not _is_alone():
        return
    output = Path(config.OUTPUT)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: {output} is a file, a run needs a directory")
    if resume is None and (output / "metrics.jsonl").exists():
        raise UserError(
            f"--output {output}: already holds a run; --resume auto continues it, another directory"
            " starts anew"
        )
    if resume not in (None, "auto"):
        check_run(resume)
    _check_dataset(config)
    model = config.MODEL
    if resume is None and model.PRETRAINED.startswith(PREFIX):
        bundled_file(model.PRETRAINED)
    elif resume is None and model.PRETRAINED == PACKAGED:
        packaged_file("MODEL.PRETRAINED")
    elif resume is None and model.PRETRAINED and not model.PRETRAINED.startswith(NAMES):
        check_files_exist("MODEL.PRETRAINED", [model.PRETRAINED.removeprefix("local-dir:")])
    if resume is None and model.CLASS_MAP not in ("", "new"):
        check_files_exist("MODEL.CLASS_MAP", [model.CLASS_MAP])


def _check_dataset(config: CfgNode) -> None:
    data = config.DATA
    dataset, path = DATASETS[data.DATASET], os.path.expanduser(data.PATH)
    if dataset.needs_files and path:
        _check_directory(path)
    if data.DATASET in ("folder", "imagenet"):
        _check_is_no_split(data.PATH, path)
        if path:
            _check_is_apart(config.OUTPUT, data.PATH, path)
    if dataset.needs_lists:
        for key in ("TRAIN_LIST", "VAL_LIST"):
            file = data[key]
            if not os.path.exists(file) and not os.path.exists(os.path.join(path, file)):
                raise UserError(f"DATA.{key} is {file!r}: no such file")


def _check_is_apart(output: str, name: str, path: str) -> None:
    """Raise UserError for a run directory among the class folders."""
    folders = [path]
    if os.path.isdir(os.path.join(path, "train")):
        folders = [os.path.join(path, split) for split in _SPLITS]
    parents = {Path(output).resolve(), *Path(output).resolve().parents}
    if parents & {Path(folder).resolve() for folder in folders}:
        raise UserError(
            f"--output {output}: lies among the class folders of --data {name}; name a directory"
            " outside of them"
        )


def _check_directory(path: str) -> None:
    from swinv2_moe.data.sources import check_directory

    check_directory("DATA.PATH", path)


def _check_is_no_split(name: str, path: str) -> None:
    """Raise UserError for photos/train, photos/val or photos/train/cat in place of photos."""
    folders = [path]
    if os.path.isdir(path) and not any(entry.is_dir() for entry in os.scandir(path)):
        folders.append(os.path.normpath(os.path.join(path, "..")))  # of a class, perhaps
    for folder in folders:
        root, split = os.path.split(os.path.abspath(folder))
        is_split = split in _SPLITS and os.path.isdir(os.path.join(root, "train"))
        if is_split and not os.path.isdir(os.path.join(folder, "train")):
            raise UserError(
                f"DATA.PATH is {name!r}: one of the folders of a data set, not the data set; use"
                f" --data {os.path.normpath(os.path.join(folder, '..'))}"
            )
