"""Checkpoints on disk: what makes a directory one, how it is found and checked, and reading it into
a model.

    checkpoints/step-00001200/   meta.json   step, configuration, state of the training, every file
    with its checksum
                                 model.safetensors, experts/...   the weights (moe_core.checkpoint)
                                 ema/..., optimizer/<kind>/...    the same files of the averaged
                                 weights and the moments
    checkpoints/latest, best     links to the ones to use

A directory appears under its name when it is complete (swinv2_moe.train.saver), and none is
trusted before each of its files has the size and checksum that meta.json holds.
"""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moe_core import expert_parameters, load_strategy_decisions, moe_layers
from moe_core.checkpoint import TRUNK, count_experts, load_tensors, save_tensors
from moe_core.files import damage, fsync_and_hash
from swinv2_moe.config import ModelConfig
from swinv2_moe.errors import UserError
from swinv2_moe.files import publish_directory
from swinv2_moe.model_types import model_types
from swinv2_moe.models.positions import check_windows
from swinv2_moe.models.weights import check_finite, compare
from swinv2_moe.train.distributed import World
from swinv2_moe.train.meta import DamagedError, read_meta, write_meta

Fit = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found whole, and what was found wrong with newer ones."""

    directory: Path
    meta: dict
    skipped: tuple[str, ...] = ()

    def has(self, section: str) -> bool:
        """Whether it holds anything of a section ("ema", "optimizer/exp_avg")."""
        return any(file.startswith(f"{section}/") for file in self.meta["files"])

    def optimizer_sections(self) -> list[str]:
        """Such as "optimizer/exp_avg"."""
        parts = [file.split("/") for file in self.meta["files"] if file.startswith("optimizer/")]
        return sorted({"/".join(part[:2]) for part in parts})

    def expert_ages(self) -> str | None:
        """How many steps older than the rest the experts of a partial save are; None if none is."""
        ages = [
            self.meta["step"] - step for steps in self.meta["experts"].values() for step in steps
        ]
        old = [age for age in ages if age]
        if not old:
            return None
        return (
            f"{len(old)} of {len(ages)} experts are older than the rest, by up to {max(old)} steps"
            " (partial saves)"
        )


def checkpoints_below(root: Path) -> list[Path]:
    """The complete checkpoints in `root`, the newest step first."""
    found = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=order_of, reverse=True)


def order_of(directory: Path) -> tuple[int, int]:
    """The step in a checkpoint's name, and which of that step it is: larger is newer."""
    step, again = _NAME.fullmatch(directory.name).groups(default="0")
    return int(step), int(again)


def free_name(path: Path) -> Path:
    """`path`, or the first of path-1, path-2, ... that does not exist."""
    return next(
        p
        for i in itertools.count()
        if not (p := path.with_name(path.name + f"-{i}" * (i > 0))).exists()
    )


def find_checkpoint(
    resume: str,
    root: Path,
    world: World = _ALONE,
    key: str = "--resume",
    weights_only: bool = False,
) -> Checkpoint | None:
    """The checkpoint that `--resume` means, every file of it checked. Every rank calls this; they
    share the work.

    "auto" and a run directory mean the newest whole checkpoint by step ("auto" in `root`, where
    there may be none); another directory is the checkpoint itself.

    Args:
        key: what messages call the option.
        weights_only: leaves the optimiser's files unchecked.

    Raises:
        UserError: there is none, or none that is whole; the damaged file is named.
    """
    path = root if resume == "auto" else Path(resume)
    if resume != "auto" and not world.agree(
        (path / "checkpoints").is_dir() or bool(checkpoints_below(path))
    ):
        return open_checkpoint(path, world, key, weights_only)
    path = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    skipped: list[str] = []
    for directory in world.agree(checkpoints_below(path)):
        try:
            found = open_checkpoint(directory, world, key, weights_only)
            if found.meta["step"] != order_of(directory)[0]:
                raise DamagedError(f"checkpoint {directory} is one of step {found.meta['step']}")
            return Checkpoint(directory, found.meta, tuple(skipped))
        except DamagedError as error:
            skipped.append(str(error))
    if skipped:
        raise UserError(f"{key} {resume}: no checkpoint in {path} is whole: {'; '.join(skipped)}")
    if resume == "auto":
        return None
    raise UserError(f"{key} {resume}: holds no checkpoint (a directory with meta.json)")


def open_checkpoint(
    path: Path, world: World = _ALONE, key: str = "checkpoint", weights_only: bool = False
) -> Checkpoint:
    """The checkpoint in the directory `path`. Arguments as in `find_checkpoint`.

    Raises:
        UserError: not a checkpoint, or of a newer format.
        DamagedError: meta.json or a file that it lists is missing or not as it was written.
    """
    meta, error = None, None
    try:
        meta = read_meta(path, key)
        if world.is_main:
            _check_listing(path, meta["files"])
        files = [
            file for file in meta["files"] if not (weights_only and file.startswith("optimizer/"))
        ]
        for file in sorted(files)[world.rank :: world.size]:
            if found := damage_of(path, file, meta["files"][file]):
                raise DamagedError(f"checkpoint {path}: {file} {found}")
    except UserError as problem:
        error = problem
    except PermissionError as problem:
        error = UserError(
            f"checkpoint {path}: {problem.filename} cannot be read ({problem.strerror})"
        )
    for problem in world.gather(error):
        if problem is not None:
            raise problem
    return Checkpoint(path, meta)


def damage_of(directory: Path, file: str, record: dict[str, int | str]) -> str | None:
    """What is wrong with a checkpoint's file, in a phrase; None if nothing is. `record` is that of
    meta.json.

    Raises:
        PermissionError: it may be whole, but must not be read.
    """
    if _leads_outside(directory, directory / file):
        return "is a link that leads out of the checkpoint"
    return damage(directory / file, record)


def _leads_outside(directory: Path, path: Path) -> bool:
    """Whether links take `path`, in the directory, to another place; one that leads nowhere does
    not."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))


def _check_listing(directory: Path, files: Collection[str]) -> None:
    """Raise DamagedError where there is something that could be read without a checksum."""
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_symlink() and _leads_outside(directory, path):
            raise DamagedError(
                f"checkpoint {directory}: {name!r} is a link that leads out of the checkpoint"
            )
        if "/" in name and path.suffix == ".safetensors" and name not in files:
            raise DamagedError(f"checkpoint {directory}: meta.json does not list {name!r}")


def write_weights(
    directory: Path,
    model: nn.Module,
    tensors: dict[str, Tensor],
    config: str,
    class_names: list[str],
    step: int = 0,
) -> None:
    """A checkpoint of weights alone, written by this one process.

    Args:
        model: tells which names are experts'; may be on the meta device.
        tensors: all of `model.state_dict()`'s.
        config: the whole configuration, as YAML.

    Raises:
        UserError: `directory` exists or cannot be written; nothing is left behind.
    """
    if directory.exists():
        raise UserError(f"{directory} already exists")
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        temporary.mkdir(parents=True)
        save_tensors(temporary, model, tensors)
        files = {
            str(path.relative_to(temporary)): fsync_and_hash(path)
            for path in sorted(temporary.rglob("*.safetensors"))
        }
        write_meta(temporary, describe(model, step, config, class_names) | {"files": files})
        publish_directory(temporary, directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{directory} cannot be written ({error})") from error


def describe(
    model: nn.Module,
    step: int,
    config: str,
    class_names: list[str],
    training: dict | None = None,
) -> dict:
    """What meta.json says, besides its files, of a checkpoint whose experts are all of this
    step."""
    return {
        "step": step,
        "training": training,
        "class_names": class_names,
        "experts": {
            name: [step] * layer.config.num_experts for name, layer in moe_layers(model).items()
        },
        "windows": model.position_windows(),
        "config": config,
    }


def read_section(
    checkpoint: Checkpoint,
    section: str,
    model: nn.Module,
    expected: dict[str, Tensor],
    fit: Fit = lambda found: found,
) -> dict[str, Tensor]:
    """A section's tensors for this rank, which are exactly the `expected` ones by name and shape.

    Args:
        fit: what is done to the tensors that were found, before they are compared.

    Raises:
        UserError: files missing or unreadable, weights of other windows, or every key that is
            missing, unexpected or of another shape.
    """
    directory = checkpoint.directory
    check_windows(model, checkpoint.meta.get("windows"), f"checkpoint {directory}")
    wrong_experts = _compare_expert_counts(directory / section, model)
    if wrong_experts:  # some files may be missing; the trunk's keys are still to be listed
        experts = expert_parameters(model)
        expected = {name: tensor for name, tensor in expected.items() if name not in experts}
    tensors = fit(
        read_tensors(checkpoint, section, nn.Module() if wrong_experts else model, expected)
    )
    problems = "; ".join(filter(None, [*wrong_experts, compare(expected, tensors)]))
    if problems:
        what = "it"
        if section:
            what = f"its {section} state"
        raise UserError(
            f"checkpoint {directory}: {what} does not fit the model: {problems}; nothing was loaded"
        )
    return tensors


def read_tensors(
    checkpoint: Checkpoint, section: str, model: nn.Module, like: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """A section's tensors as they are in its files; `model` and `like` as in
    `moe_core.load_tensors`.

    Raises:
        UserError: files missing or unreadable.
    """
    try:
        return load_tensors(checkpoint.directory / section, model, like)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"checkpoint {checkpoint.directory}: {error}; nothing was loaded"
        ) from error


def read_weights_of(
    checkpoint: Checkpoint, model: nn.Module, fit: Fit = lambda found: found
) -> dict[str, Tensor]:
    """The weights to deploy, named as in the model: the averaged ones where there are any. `fit` as
    in `read_section`.

    Raises:
        UserError: they do not fit.
    """
    return read_section(
        checkpoint, "ema" if checkpoint.has("ema") else "", model, model.state_dict(), fit
    )


def read_dense(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The weights to deploy of a model without experts, for one that has them.

    Raises:
        UserError: it has experts, or knows other windows.
    """
    check_windows(model, checkpoint.meta.get("windows"), f"checkpoint {checkpoint.directory}")
    if checkpoint.meta["experts"]:
        raise UserError(
            f"checkpoint {checkpoint.directory} has experts, MODEL.UPCYCLE True needs dense weights"
        )
    return read_tensors(checkpoint, "ema" if checkpoint.has("ema") else "", nn.Module())


def load_weights(
    checkpoint: Checkpoint, model: nn.Module, fit: Fit = lambda found: found, finite: bool = True
) -> None:
    """`read_weights_of` a checkpoint into the model, and the strategies found with it.

    Args:
        finite: whether NaN and infinity are refused.

    Raises:
        UserError: they do not fit; nothing is loaded then.
    """
    tensors = read_weights_of(checkpoint, model, fit)
    if finite:
        check_finite(tensors, f"checkpoint {checkpoint.directory}")
    load_strategies(checkpoint, model)
    model.load_state_dict(tensors)


def load_strategies(checkpoint: Checkpoint, model: nn.Module) -> None:
    """The strategies that a training has found, if any, into the model's layers.

    Raises:
        UserError: they are not such ones.
    """
    decisions = (checkpoint.meta["training"] or {}).get("strategies", [])
    try:
        load_strategy_decisions(model, decisions)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint {checkpoint.directory}: its strategies cannot be used ({error})"
        ) from error


def count_classes(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """The number of outputs of the classifier of a checkpoint of this model.

    Raises:
        UserError: there is none.
    """
    weight = f"{model_types()[config.type].model.classifier}.weight"
    try:
        with safe_open(checkpoint.directory / TRUNK, "pt") as trunk:
            shape = trunk.get_slice(weight).get_shape()
    except SafetensorError as error:
        raise UserError(
            f"checkpoint {checkpoint.directory}: has no classifier ({error})"
        ) from error
    if len(shape) != 2:
        raise UserError(
            f"checkpoint {checkpoint.directory}: its classifier ({weight}) has shape {shape}"
        )
    return shape[0]


def _compare_expert_counts(section: Path, model: nn.Module) -> list[str]:
    """The layers whose number of experts differs, one phrase each; a dense checkpoint's are told by
    its keys."""
    found, layers = count_experts(section), moe_layers(model)
    wanted = {name: layer.config.num_experts for name, layer in layers.items()} if found else {}
    return [
        f"{name}.experts: {found.get(name, 0)} there, {wanted.get(name, 0)} in the model"
        for name in sorted({*found, *wanted})
        if found.get(name, 0) != wanted.get(name, 0)
    ]
