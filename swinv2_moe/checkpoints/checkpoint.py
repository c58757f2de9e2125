"""Checkpoints on disk: their layout, how they are found and checked, and reading them into a model.

    checkpoints/step-00001200/
        meta.json                        step, configuration, state of the training; size and
                                         checksum of every file
        model.safetensors, experts/...   the weights (moe_core.checkpoint)
        ema/...                          the averaged weights, in the same files
        optimizer/<kind>/...             the moments, in the same files
    checkpoints/latest, best             links to the checkpoints to use
    checkpoints/final                    weights that were trained on all pictures (train/final.py)

A directory gets its name when it is complete (checkpoints/saver.py). Before it is used, each of its
files is compared with the size and checksum in meta.json.
"""

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moe_core import expert_parameters, load_strategy_decisions, moe_layers
from moe_core.checkpoint import TRUNK, count_experts, expert_file, load_tensors, save_tensors
from moe_core.files import damage, fsync_and_hash, publish_directory
from swinv2_moe.checkpoints.meta import WINDOWS, DamagedError, describe, read_meta, write_meta
from swinv2_moe.config import config_from_text, model_config
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import new_directory, parse_json, writing
from swinv2_moe.forms import COUNT, TEXT, list_of
from swinv2_moe.models import MoEModel
from swinv2_moe.models.build import build_model, classifier_weight, configured_windows
from swinv2_moe.models.bundled import located
from swinv2_moe.models.positions import check_windows
from swinv2_moe.models.section import ModelConfig
from swinv2_moe.models.weight_files import read_headers, read_metadata, read_weights
from swinv2_moe.models.weights import check_finite, compare, larger_than, rank_experts
from swinv2_moe.ranks.world import World

# A single file's metadata: format (this), step, config (YAML), class_names and windows (JSON); for
# timm also model_args and data_config (JSON)
SINGLE_FORMAT = "swinv2-moe single file 1"
# A function that changes the tensors of a checkpoint before they are compared with the model's.
Fit = Callable[[dict[str, Tensor]], dict[str, Tensor]]

FINAL = "final"  # the name of the checkpoint that was trained on all pictures
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_LISTINGS = 3  # of a directory whose checkpoints are replaced while they are read
_ONE_PROCESS = World(0, 1, torch.device("cpu"))


def _unchanged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are complete and undamaged."""

    directory: Path
    meta: dict  # content of meta.json
    skipped: tuple[str, ...] = ()  # why newer checkpoints were not used

    def has(self, section: str) -> bool:
        """Whether the checkpoint has files of a section ("ema", "optimizer/exp_avg")."""
        return any(file.startswith(f"{section}/") for file in self.meta["files"])

    def optimizer_sections(self) -> list[str]:
        """The names of the sections with the optimiser's moments, such as "optimizer/exp_avg"."""
        sections = set()
        for file in self.meta["files"]:
            if file.startswith("optimizer/"):
                kind = file.split("/")[1]
                sections.add(f"optimizer/{kind}")
        return sorted(sections)

    @property
    def weights_section(self) -> str:
        """The section of the weights to deploy: the averaged ones if there are any."""
        if self.has("ema"):
            return "ema"
        return ""


def checkpoints_below(root: Path) -> list[Path]:
    """The complete checkpoints in `root`, the newest step first."""
    paths = [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=order_of, reverse=True)


def order_of(directory: Path) -> tuple[int, int]:
    """Sort key of checkpoints: the step in the name, and the number among checkpoints of that step.
    A larger key is newer."""
    name = _NAME.fullmatch(directory.name)
    assert name is not None
    step, number = name.groups(default="0")
    return int(step), int(number)


def find_checkpoint(
    resume: str,
    root: Path,
    world: World = _ONE_PROCESS,
    key: str = "--resume",
    weights_only: bool = False,
) -> Checkpoint | None:
    """The checkpoint that `--resume` names, with every file checked. Every rank calls this; the
    ranks share the work.

    Args:
        resume: "auto" is the newest undamaged checkpoint in `root`, or None if there is no
            checkpoint. A run directory is the newest undamaged checkpoint of the run. Another
            directory is the checkpoint itself, and a .safetensors file is as `open_file`.
        key: the name of the option in messages.
        weights_only: do not check the optimiser's files.

    Raises:
        UserError: there is no checkpoint, or all are damaged. The message names the damaged file.
    """
    path = root
    if resume != "auto":
        path = Path(resume)
        is_run = (path / "checkpoints").is_dir() or bool(checkpoints_below(path))
        if world.agree(path.suffix == ".safetensors" and path.is_file()):
            return world.on_every_rank(lambda: open_file(path, key))
        if not world.agree(is_run):
            return open_checkpoint(path, world, key, weights_only)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    for _ in range(_LISTINGS):
        skipped: list[str] = []
        listed = world.agree(checkpoints_below(path))
        for directory in listed:
            try:
                meta = open_checkpoint(directory, world, key, weights_only).meta
                if meta["step"] != order_of(directory)[0]:
                    raise DamagedError(f"checkpoint {directory} is one of step {meta['step']}")
                return Checkpoint(directory, meta, tuple(skipped))
            except DamagedError as error:
                skipped.append(str(error))
        if world.agree(checkpoints_below(path)) == listed:
            break  # otherwise a training replaced them meanwhile
    if skipped:
        raise UserError(f"{key} {resume}: no checkpoint in {path} is whole: {'; '.join(skipped)}")
    if resume == "auto":
        return None
    raise UserError(f"{key} {resume}: holds no checkpoint (a directory with meta.json)")


def open_file(file: Path, key: str = "checkpoint") -> Checkpoint:
    """A file of `convert-checkpoint export single` as a checkpoint that holds weights alone.

    Args:
        key: what names the file, for messages.

    Raises:
        UserError: it is no such file.
    """
    if file.suffix != ".safetensors":
        raise UserError(f"{key} {file}: a single file is a .safetensors file")
    metadata = read_metadata(file)
    if metadata.get("format") != SINGLE_FORMAT:
        raise UserError(
            f"{key} {file}: its format is {metadata.get('format')!r}, not {SINGLE_FORMAT!r}"
        )
    try:
        class_names, step = parse_json(metadata["class_names"]), parse_json(metadata["step"])
        list_of(TEXT)(class_names, "class_names")
        COUNT(step, "step")
        windows = parse_json(metadata.get("windows", "null"))
        WINDOWS(windows, "windows")
        config = metadata["config"]
    except (KeyError, ValueError) as error:
        raise UserError(f"{key} {file}: its metadata cannot be used ({error})") from error
    meta = {"step": step, "config": config, "class_names": class_names, "training": None}
    return Checkpoint(file, meta | {"windows": windows, "experts": {}, "files": {}})


def open_newest(path: Path, key: str = "checkpoint") -> Checkpoint:
    """The weights of a checkpoint, or of the newest undamaged checkpoint of a run.

    Raises:
        UserError: as `find_checkpoint`.
    """
    found = find_checkpoint(str(path), path, key=key, weights_only=True)
    if found is None:  # a directory named "auto"
        raise UserError(f"{key} {path}: holds no checkpoint (a directory with meta.json)")
    return found


def open_checkpoint(
    path: Path, world: World = _ONE_PROCESS, key: str = "checkpoint", weights_only: bool = False
) -> Checkpoint:
    """The checkpoint in the directory `path`. Arguments as in `find_checkpoint`.

    Raises:
        UserError: `path` is not a checkpoint, or it has a newer format.
        DamagedError: meta.json or a file that it lists is missing or was changed.
    """
    meta: dict = {}
    error: UserError | None = None
    try:
        meta = read_meta(path, key)
        _check_files(path, meta["files"], world, weights_only)
    except UserError as problem:
        error = problem
    except PermissionError as problem:
        error = UserError(
            f"checkpoint {path}: {problem.filename} cannot be read ({problem.strerror})"
        )
    for of_rank in world.gather(error):
        if of_rank is not None:
            raise of_rank
    return Checkpoint(path, meta)


def _check_files(
    directory: Path, records: dict[str, dict], world: World, weights_only: bool
) -> None:
    """Raise DamagedError for a damaged file among this rank's share of the files in `records`."""
    if world.is_main:
        _check_listing(directory, records)
    files = sorted(records)
    if weights_only:
        files = [file for file in files if not file.startswith("optimizer/")]
    for file in files[world.rank :: world.size]:
        problem = damage_of(directory, file, records[file])
        if problem:
            raise DamagedError(f"checkpoint {directory}: {file} {problem}")


def damage_of(directory: Path, file: str, record: dict[str, int | str]) -> str | None:
    """A phrase that describes the damage of a checkpoint's file; None if the file is undamaged.

    Args:
        record: size and checksum of the file, from meta.json.

    Raises:
        PermissionError: this process may not read the file.
    """
    if _leads_outside(directory, directory / file):
        return "is a link that leads out of the checkpoint"
    return damage(directory / file, record)


def _leads_outside(directory: Path, path: Path) -> bool:
    """Whether `path`, with its links resolved, lies outside of the directory."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))


def _check_listing(directory: Path, files: Collection[str]) -> None:
    """Raise DamagedError if the directory has a file that could be read but has no checksum."""
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
    model: MoEModel,
    tensors: dict[str, Tensor],
    config: str,
    class_names: list[str],
    step: int = 0,
    temperature: float = 1.0,
    novelty: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint that holds weights only. One process calls this.

    Args:
        model: determines which tensors belong to experts; may be on the meta device.
        tensors: as in `model.state_dict()`.
        config: the complete configuration, as YAML.
        temperature: of the logits.
        novelty: which pictures are unlike those of the training: `Novelty.state`.

    Raises:
        UserError: `directory` exists or cannot be written; nothing is left behind.
    """
    if directory.exists():
        raise UserError(f"{directory} already exists")
    with new_directory(directory) as temporary, writing(directory):
        save_tensors(temporary, model, tensors)
        files = {}
        for path in sorted(temporary.rglob("*.safetensors")):
            files[str(path.relative_to(temporary))] = fsync_and_hash(path)
        meta = describe(model, step, config, class_names) | {"files": files}
        meta["temperature"] = temperature
        if novelty is not None:
            meta["novelty"] = novelty
        write_meta(temporary, meta)
        publish_directory(temporary, directory)


def check_network(checkpoint: Checkpoint, config: ModelConfig, num_classes: int) -> None:
    """Compare a model with the headers of a checkpoint's files, before it is built: the
    configuration of a checkpoint may ask for a model that fills the memory.

    Args:
        num_classes: 0: the classifier is not compared.

    Raises:
        UserError: the model has other tensors than the files, or does not fit into the memory.
    """
    directory, experts = checkpoint.directory, {}
    found = read_headers(directory if directory.is_file() else directory / TRUNK)
    if directory.is_dir():
        experts = count_experts(directory)
    for layer, count in experts.items():
        for name, like in read_headers(directory / expert_file(layer, 0)).items():
            found[f"{layer}.experts.{name}"] = like.new_empty((count, *like.shape))
    problem = larger_than(found, vars(config.trunk), f"MODEL.{config.trunk.group}.")
    if not problem:
        try:
            with torch.device("meta"):
                model = build_model(config, num_classes)
        except (RuntimeError, TypeError, OverflowError) as error:
            reason = one_line(str(error).partition("\n")[0])
            raise UserError(
                f"checkpoint {directory}: MODEL has more numbers than torch can count ({reason})"
            ) from error
        if num_classes == 0:
            found = {k: v for k, v in found.items() if k not in model.classifier_names()}
        problem = "; ".join(_compare_expert_counts(directory, model))
        problem = problem or compare(model.state_dict(), found)
    if problem:
        raise UserError(
            f"checkpoint {directory}: it does not fit the model: {problem}; nothing was loaded"
        )
    # what no file holds: tables of positions, masks of windows, and an image
    needed = sum(buffer.nbytes for buffer in model.buffers())
    needed += 4 * config.in_chans * config.img_size**2
    available = psutil.virtual_memory().total
    if needed > available:
        raise UserError(
            f"checkpoint {directory}: DATA.IMG_SIZE {config.img_size} and the windows of its model"
            f" need {needed / 1e9:,.0f} GB, this machine has {available / 1e9:,.0f} GB"
        )


def trained_windows(checkpoint: Checkpoint) -> list[int]:
    """The window of each stage that the position biases of the weights are for; empty if they do
    not depend on windows. Earlier versions did not record them: they are those of the
    configuration.

    Raises:
        UserError: the configuration is needed and is that of another model.
    """
    meta = checkpoint.meta
    if meta.get("windows") is not None or "backbone_windows" in meta:
        return meta.get("windows") or []
    config = model_config(config_from_text(meta["config"], f"checkpoint {checkpoint.directory}"))
    check_network(checkpoint, config, num_classes=0)
    return configured_windows(config)


def read_section(
    checkpoint: Checkpoint,
    section: str,
    model: MoEModel,
    expected: dict[str, Tensor],
    fit: Fit = _unchanged,
) -> dict[str, Tensor]:
    """A section's tensors for this rank, with the names and shapes of `expected`.

    Args:
        fit: called with the tensors of the checkpoint, before they are compared.

    Raises:
        UserError: files are missing or unreadable, the weights were trained with other windows, or
            tensors are missing, unexpected or have another shape. The message names all of them.
    """
    directory = checkpoint.directory
    check_windows(model, trained_windows(checkpoint), f"checkpoint {checkpoint.directory}")
    problems = _compare_expert_counts(directory / section, model)
    reader: nn.Module = model
    if problems:  # the experts cannot be read; the trunk's problems are listed as well
        reader = nn.Module()
        experts = expert_parameters(model)
        expected = {name: tensor for name, tensor in expected.items() if name not in experts}
    tensors = fit(read_tensors(checkpoint, section, reader, expected))
    difference = compare(expected, tensors)
    if difference:
        problems.append(difference)
    if problems:
        subject = "it"
        if section:
            subject = f"its {section} state"
        raise UserError(
            f"checkpoint {directory}: {subject} does not fit the model: {'; '.join(problems)};"
            " nothing was loaded"
        )
    return tensors


def read_tensors(
    checkpoint: Checkpoint, section: str, model: nn.Module, like: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """A section's tensors as stored in its files.

    Args:
        model, like: as in `moe_core.checkpoint.load_tensors`.

    Raises:
        UserError: files are missing or unreadable.
    """
    if checkpoint.directory.is_file():
        tensors = read_weights(checkpoint.directory)
        return tensors | rank_experts(tensors, model)
    try:
        return load_tensors(checkpoint.directory / section, model, like)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(
            f"checkpoint {checkpoint.directory}: {error}; nothing was loaded"
        ) from error


def read_weights_of(
    checkpoint: Checkpoint, model: MoEModel, fit: Fit = _unchanged
) -> dict[str, Tensor]:
    """The weights to deploy, named as in the model: the averaged ones if there are any. Those of
    the classifier are divided by the temperature of the checkpoint, if it has one.

    Args:
        fit: as in `read_section`.

    Raises:
        UserError: the weights do not fit the model.
    """
    temperature = checkpoint.meta.get("temperature", 1.0)

    def fit_tempered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if temperature != 1.0:
            names = [name for name in model.classifier_names() if name in tensors]
            tensors = tensors | {name: tensors[name] / temperature for name in names}
        return fit(tensors)

    section = checkpoint.weights_section
    return read_section(checkpoint, section, model, model.state_dict(), fit_tempered)


def read_dense(checkpoint: Checkpoint, section: str, model: MoEModel) -> dict[str, Tensor]:
    """A section of a dense checkpoint, to upcycle into `model`.

    Raises:
        UserError: the checkpoint has experts, or was trained with other windows.
    """
    check_windows(model, trained_windows(checkpoint), f"checkpoint {checkpoint.directory}")
    if checkpoint.meta["experts"]:
        raise UserError(
            f"checkpoint {checkpoint.directory} has experts, MODEL.UPCYCLE needs dense weights"
        )
    return read_tensors(checkpoint, section, nn.Module())


def load_weights(
    checkpoint: Checkpoint, model: MoEModel, fit: Fit = _unchanged, finite: bool = True
) -> None:
    """Load the weights to deploy and the strategies of a checkpoint into the model.

    Args:
        fit: as in `read_section`.
        finite: refuse NaN and infinity.

    Raises:
        UserError: the weights do not fit the model; nothing is loaded.
    """
    tensors = read_weights_of(checkpoint, model, fit)
    if finite:
        check_finite(tensors, f"checkpoint {checkpoint.directory}")
    load_strategies(checkpoint, model)
    model.load_state_dict(tensors)


def load_strategies(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load the strategies that the tuner found in training, if any, into the model's layers.

    Raises:
        UserError: the strategies cannot be used.
    """
    training = checkpoint.meta["training"] or {}
    decisions = training.get("strategies", [])
    try:
        load_strategy_decisions(model, decisions)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint {checkpoint.directory}: its strategies cannot be used ({error})"
        ) from error


def count_classes(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """The number of classes of a checkpoint of this model.

    Raises:
        UserError: the checkpoint has no classifier.
    """
    weight = classifier_weight(config)
    try:
        file = checkpoint.directory
        if file.is_dir():
            file = file / TRUNK
        with safe_open(file, "pt") as trunk:
            shape = trunk.get_slice(weight).get_shape()
    except (SafetensorError, MemoryError) as error:
        raise UserError(
            f"checkpoint {checkpoint.directory}: has no classifier ({error})"
        ) from error
    if not shape:
        raise UserError(
            f"checkpoint {checkpoint.directory}: its classifier ({weight}) has shape {shape}"
        )
    return shape[0]


def _compare_expert_counts(section: Path, model: nn.Module) -> list[str]:
    """One phrase for each layer whose number of experts differs.

    Empty for a dense checkpoint: the comparison of names reports the missing experts.
    """
    saved = count_experts(section)
    if not saved:
        return []
    needed = {name: layer.config.num_experts for name, layer in moe_layers(model).items()}
    differences = []
    for name in sorted(saved.keys() | needed.keys()):
        num_saved, num_needed = saved.get(name, 0), needed.get(name, 0)
        if num_saved != num_needed:
            differences.append(f"{name}.experts: {num_saved} there, {num_needed} in the model")
    return differences


def select_checkpoint(run: str, which: str = "best") -> tuple[str, str]:
    """Select the checkpoint of a run.

    Args:
        run: a run; a checkpoint, a single file or a model of the package, which are taken as they
            are. "~" is expanded.
        which: "best" (as TRAIN.BEST_BY says; the newest if none is marked), "latest" or the number
            of a step; "final": trained on all pictures, the best where the run has none.

    Returns:
        The argument for `open_deployed`, and a line about the selection. For the newest checkpoint,
        the argument is the run itself, so that damaged checkpoints are skipped. The line names the
        checkpoint and the reason; it is empty if `run` is a checkpoint.

    Raises:
        UserError: `which` is none of these, or the run has no checkpoint of that step.
    """
    if which not in ("best", "latest", FINAL) and not which.isdecimal():
        raise UserError(
            f"--checkpoint {which}: must be best, latest, {FINAL} or the number of a step"
        )
    run = os.path.expanduser(located(run))
    root = Path(run)
    if (root / "checkpoints").is_dir():
        root = root / "checkpoints"
    newest_first = checkpoints_below(root)
    if not newest_first:
        return run, ""
    if which == FINAL and (root / FINAL).is_dir():
        return str(root / FINAL), f"{FINAL}: trained on all pictures, also those held out"
    if which == FINAL:
        which = "best"
    if which == "latest":
        return run, "the newest checkpoint of the run"
    best = root / "best"
    if which == "best" and not best.is_dir():
        return run, "the newest checkpoint of the run, which has no best one"
    newest = newest_first[0].name
    if which == "best":
        name = best.resolve().name
        if name == newest:
            return run, f"{name}: the best in validation and the newest"
        return str(root / name), f"{name}: the best in validation (--checkpoint latest: {newest})"
    steps = [order_of(directory)[0] for directory in newest_first]
    if int(which) not in steps:
        listed = ", ".join(map(str, sorted(set(steps))))
        raise UserError(f"--checkpoint {which}: {run} has checkpoints of the steps {listed}")
    name = newest_first[steps.index(int(which))].name
    return str(root / name), f"{name}: as --checkpoint says"
