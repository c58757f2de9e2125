"""Checkpoints of a run: `checkpoints/epoch-0007/`, with `last` and `best` pointing at the ones to use.

A checkpoint is a directory of safetensors files and a `meta.json` (moe_core.checkpoint describes the tensors). It is
written under another name, synced and renamed, so a directory named epoch-* is complete; `last` moves after that.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_core import (
    count_experts,
    expert_parameters,
    load_strategy_decisions,
    load_tensors,
    moe_layers,
    save_tensors,
)
from swinv2_moe.engine.distributed import World
from swinv2_moe.engine.parallelize import placed_like, whole_tensors
from swinv2_moe.errors import UserError
from swinv2_moe.models.weights import compare

FORMAT_VERSION = 1
_META_KEYS = ("epoch", "step", "steps_per_epoch", "best_top1", "last_top1", "loss_scaler")


def save_checkpoint(
    root: Path, world: World, model: nn.Module, sections: dict[str, dict[str, Tensor]], meta: dict, is_best: bool
) -> None:
    """Write `root/epoch-<meta["epoch"]>` and point `last` (and `best`) at it; older, unused ones go.

    `sections` maps a folder name ("" for the model itself, "ema", "optimizer/exp_avg") to tensors named like the
    model's parameters; sharded ones are gathered. Every rank calls this.
    """
    final = root / f"epoch-{meta['epoch']:04d}"
    temporary = root / f".{final.name}.tmp"
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    for section, tensors in sections.items():
        save_tensors(temporary / section, model, whole_tensors(tensors, world.is_main), world.is_main)
    world.barrier()
    if world.is_main:
        (temporary / "meta.json").write_text(json.dumps({"format_version": FORMAT_VERSION, **meta}, indent=1))
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _point(root / "last", final.name)
        if is_best:
            _point(root / "best", final.name)
        _prune(root)
    world.barrier()


def find_checkpoint(resume: str, root: Path, key: str = "--resume") -> Path | None:
    """The checkpoint that `--resume` means: "auto" is `root/last` if there is one; a path must be a checkpoint.

    `key` is what messages call it.

    Raises:
        UserError: the path holds no checkpoint.
    """
    if resume == "auto":
        return root / "last" if (root / "last" / "meta.json").is_file() else None
    for directory in (Path(resume), Path(resume) / "checkpoints" / "last"):
        if (directory / "meta.json").is_file():
            return directory
    raise UserError(f"{key} {resume}: holds no checkpoint (a directory with meta.json)")


def read_meta(directory: Path) -> dict:
    """The checkpoint's meta.json.

    Raises:
        UserError: not readable, or of a newer format.
    """
    try:
        meta = json.loads((directory / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {directory}: meta.json cannot be read ({error})") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("format_version"), int):
        raise UserError(f"checkpoint {directory}: meta.json is not that of a checkpoint, it has no format_version")
    if meta["format_version"] > FORMAT_VERSION:
        raise UserError(
            f"checkpoint {directory} has format version {meta['format_version']}, this program knows {FORMAT_VERSION}"
        )
    missing = [
        key for key in ("epoch", "step", "steps_per_epoch", "best_top1", "last_top1", "loss_scaler") if key not in meta
    ]
    if missing:
        raise UserError(f"checkpoint {directory}: meta.json lacks {', '.join(missing)}")
    return meta


def read_section(directory: Path, section: str, model: nn.Module, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """A section's tensors for this rank, which are exactly the `expected` ones by name and shape.

    Raises:
        UserError: files missing or unreadable, or every key that is missing, unexpected or of another shape.
    """
    wrong_experts = _compare_expert_counts(directory / section, model)
    if wrong_experts:  # some files may be missing; the trunk's keys are still to be listed
        experts = expert_parameters(model)
        expected = {name: tensor for name, tensor in expected.items() if name not in experts}
    try:
        tensors = load_tensors(directory / section, nn.Module() if wrong_experts else model)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"checkpoint {directory}: {error}; nothing was loaded") from error
    problems = "; ".join(filter(None, [*wrong_experts, compare(expected, tensors)]))
    if problems:
        what = f"its {section} state" if section else "it"
        raise UserError(f"checkpoint {directory}: {what} does not fit the model: {problems}; nothing was loaded")
    return tensors


def load_weights(directory: Path, model: nn.Module) -> None:
    """A checkpoint's weights into the model: the averaged ones where it has them.

    Raises:
        UserError: they do not fit; nothing is loaded then.
    """
    load_strategy_decisions(model, read_meta(directory).get("strategies", []))
    section = "ema" if (directory / "ema").is_dir() else ""
    model.load_state_dict(read_section(directory, section, model, model.state_dict()))


def optimizer_kinds(directory: Path, optimizer: torch.optim.Optimizer, updates: int) -> list[str]:
    """The optimiser sections a checkpoint holds after `updates` steps, such as "optimizer/exp_avg".

    Raises:
        UserError: they are another optimiser's.
    """
    if isinstance(optimizer, torch.optim.AdamW):
        needed = ["exp_avg", "exp_avg_sq"]
    else:
        needed = ["momentum_buffer"] if optimizer.defaults["momentum"] else []
    needed = needed if updates else []
    found = sorted(path.name for path in (directory / "optimizer").glob("*"))
    if found != needed:
        raise UserError(
            f"checkpoint {directory}: its optimiser state is {found}, TRAIN.OPTIMIZER.NAME"
            f" {type(optimizer).__name__.lower()!r} needs {needed}; nothing was loaded"
        )
    return [f"optimizer/{name}" for name in found]


def optimizer_sections(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """`{"optimizer/exp_avg": {parameter name: tensor}, ...}`; every parameter has had
    the same number of updates, which meta.json holds."""
    sections: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            if kind != "step" and tensor is not None:
                sections.setdefault(f"optimizer/{kind}", {})[name] = tensor
    return sections


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, moments: dict[str, dict[str, Tensor]], updates: int
) -> None:
    """Put back what `optimizer_sections` gave, after `updates` optimiser steps."""
    is_adam = isinstance(optimizer, torch.optim.AdamW)
    for name, parameter in model.named_parameters():
        state = {kind.split("/")[1]: placed_like(tensors[name], parameter) for kind, tensors in moments.items()}
        if is_adam and state:
            state["step"] = torch.tensor(float(updates), device=parameter.device)
        optimizer.state[parameter] = state


def _compare_expert_counts(section: Path, model: nn.Module) -> list[str]:
    """The layers whose number of experts differs, one phrase each; a dense checkpoint's are told by its keys."""
    found, layers = count_experts(section), moe_layers(model)
    wanted = {name: layer.config.num_experts for name, layer in layers.items()} if found else {}
    return [
        f"{name}.experts: {found.get(name, 0)} there, {wanted.get(name, 0)} in the model"
        for name in sorted({*found, *wanted})
        if found.get(name, 0) != wanted.get(name, 0)
    ]


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _prune(root: Path) -> None:
    used = {os.readlink(root / name) for name in ("last", "best") if (root / name).is_symlink()}
    for directory in root.glob("epoch-*"):
        if directory.name not in used:
            shutil.rmtree(directory)
