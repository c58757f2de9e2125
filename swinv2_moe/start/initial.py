"""What a run begins with: a checkpoint, pretrained weights, or random weights.

Pretrained weights come with the preparation of images and the windows of position biases that they
were trained with. A run takes these values over, unless the user has set other ones.

MODEL.UPCYCLE run continues a dense run as a run of a model with experts: each expert begins as
a copy of the dense FFN, with copies of its moments. Routers and shared experts are initialised at
random, and their moments are zero. Source: sparse upcycling, arXiv 2212.05055.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from yacs.config import CfgNode

from moe_core.checkpoint import TRUNK
from swinv2_moe.checkpoints.checkpoint import (
    SINGLE_FORMAT,
    Checkpoint,
    check_network,
    checkpoints_below,
    find_checkpoint,
    load_weights,
    open_file,
    read_dense,
    trained_windows,
)
from swinv2_moe.checkpoints.meta import DamagedError, read_meta
from swinv2_moe.config import changed, config_from_text, flatten, model_config
from swinv2_moe.data.classes import (
    NO_CLASS,
    are_numbers,
    check_counting,
    imagenet_names,
    known_classes,
    match_classes,
    other_order,
)
from swinv2_moe.errors import UserError, shortened
from swinv2_moe.models import MoEModel, configured_windows, load_dense
from swinv2_moe.models.bundled import PACKAGED
from swinv2_moe.models.hub import (
    NO_CONFIG,
    description,
    fetch_weights,
    is_hub_name,
    label_names,
    local_file,
    read_timm_config,
    timm_config,
    windows_of_config,
)
from swinv2_moe.models.packaged import PACKAGED_AS, packaged_weights
from swinv2_moe.models.positions import check_windows, compare_windows, windows_of_tables
from swinv2_moe.models.section import ModelConfig
from swinv2_moe.models.timm_names import settings_of_timm
from swinv2_moe.models.weight_files import read_class_names, read_one_of
from swinv2_moe.models.weights import compare, fit_head, has_dense_twin, to_experts
from swinv2_moe.ranks.world import World

_KEYS = ("DATA.MEAN", "DATA.STD", "DATA.INTERPOLATION", "TEST.CROP_RATIO")


def find_start(root: Path, resume: str | None, world: World) -> Checkpoint | None:
    """The checkpoint that the run in the directory `root` continues from. None: a new run, which
    is refused where `root` has one."""
    if resume is not None:
        return find_checkpoint(resume, root / "checkpoints", world)
    if world.agree((root / "metrics.jsonl").exists()):
        raise UserError(
            f"--output {root}: already holds a run; --resume auto continues it, another directory"
            " starts anew"
        )
    return None


def as_trained(
    config: CfgNode, source: Checkpoint | None, world: World
) -> tuple[CfgNode, list[str]]:
    """The configuration with what its weights were trained with, and messages for the log.

    A resumed run keeps its own values without a message. Every rank calls this.
    """
    model = model_config(config)
    if source is not None:
        name = f"checkpoint {source.directory}"
        if model.upcycle != "run" or source.meta["experts"]:
            world.on_every_rank(lambda: check_network(source, model, num_classes=0))
        config, notes = take_over(config, settings_of_checkpoint(source), name)
        return config, notes if model.upcycle == "run" else []
    if not model.pretrained:
        return config, []
    stages = len(getattr(model.trunk, "depths", (0,)))
    if is_hub_name(model.pretrained):
        world.on_every_rank(lambda: fetch_weights(model.pretrained), main_first=True)
    trained = world.on_every_rank(lambda: settings_of_weights(model.pretrained, stages))
    return take_over(config, world.agree(trained), model.pretrained)


@dataclass(frozen=True)
class TrainedWith:
    """Values of the keys in `_KEYS`, and the window side of each stage; empty: not known. `line`
    says which of several state dicts in a file is used."""

    values: dict[str, Any] = field(default_factory=dict)
    windows: list[int] = field(default_factory=list)
    line: str = ""


def settings_of_checkpoint(source: Checkpoint) -> TrainedWith:
    """The values in the configuration of a checkpoint.

    Raises:
        UserError: the configuration cannot be used, or is that of another model.
    """
    config = config_from_text(source.meta["config"], f"checkpoint {source.directory}")
    check_network(source, model_config(config), num_classes=0)
    values = flatten(config)
    return TrainedWith({key: values[key] for key in _KEYS}, trained_windows(source))


def settings_of_weights(pretrained: str, stages: int) -> TrainedWith:
    """The values that belong to MODEL.PRETRAINED, as far as they are known.

    Args:
        stages: number of stages of the model.

    Raises:
        UserError: an unknown name, or a file that cannot be read.
    """
    if is_hub_name(pretrained) or pretrained == PACKAGED:
        content = timm_config(_hub_name(pretrained))
        if content is None:
            return TrainedWith(line=f"{NO_CONFIG}; images are prepared as the keys of DATA say")
        return _of_timm(content, windows_of_config(content))
    path = Path(local_file(pretrained))
    owner = path if path.is_dir() else _checkpoint_of(path)
    if owner is not None:
        return _of_run(owner)
    if path.suffix == ".safetensors" and path.is_file():
        try:
            with safe_open(path, "pt") as content:
                metadata = content.metadata() or {}
        except Exception:  # the reader of the weights says what is wrong
            return TrainedWith()
        if metadata.get("format") == SINGLE_FORMAT:
            return settings_of_checkpoint(open_file(path))
    content = read_timm_config(path.parent / "config.json")
    tensors, line = read_one_of(path)
    windows = windows_of_tables(tensors, stages) or windows_of_config(content)
    return _of_timm(content, windows, line)


def _hub_name(pretrained: str) -> str:
    """The name at the hub of weights that a package has, too; other names stay."""
    return f"timm:{PACKAGED_AS}" if pretrained == PACKAGED else pretrained


def class_names_of(file: Path) -> list[str]:
    """The names of the classes of weights: in the file itself, in the checkpoint that it is a part
    of, or in timm's config.json beside it; empty if they are in none of these.

    Raises:
        UserError: a file that should hold them cannot be read.
    """
    names = read_class_names(file) if file.suffix == ".safetensors" else []
    owner = _checkpoint_of(file)
    if owner is not None:
        names = names or read_meta(owner, "MODEL.PRETRAINED")["class_names"]
    return names or label_names(read_timm_config(file.parent / "config.json"))


def _checkpoint_of(file: Path) -> Path | None:
    """The checkpoint whose trunk, also the averaged one, is this file; None if it is no such
    file."""
    folders = [file.parent]
    if file.parent.name == "ema":
        folders.append(file.parent.parent)
    for folder in folders:
        if file.name == TRUNK and (folder / "meta.json").is_file():
            return folder
    return None


def _of_run(path: Path) -> TrainedWith:
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    problem: UserError | None = None
    for directory in [*checkpoints_below(path), path]:
        try:
            meta = read_meta(directory, "MODEL.PRETRAINED")
            if "backbone_windows" in meta:  # a detector's configuration is no YAML
                return TrainedWith()
            return settings_of_checkpoint(Checkpoint(directory, meta))
        except DamagedError:  # the reader of the weights says what is wrong, and skips it, too
            continue
        except UserError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return TrainedWith()


def _of_timm(content: Mapping, windows: list[int], line: str = "") -> TrainedWith:
    """What a config.json in timm's form says; its settings without a key are in the line."""
    described = description(content)
    values = settings_of_timm(described)
    without_key = []
    if described.get("interpolation") and "DATA.INTERPOLATION" not in values:
        without_key.append(f"interpolation {described['interpolation']!r}")
    if described.get("crop_pct") and "TEST.CROP_RATIO" not in values:
        mode = described.get("crop_mode") or "center"
        without_key.append(f"crop_mode {mode!r} with crop_pct {described['crop_pct']}")
    if without_key:
        text = f"its config.json has {' and '.join(without_key)}, for which there is no key"
        line = f"{line}; {text}" if line else text
    return TrainedWith(values, windows, line)


def take_over(config: CfgNode, trained: TrainedWith, name: str) -> tuple[CfgNode, list[str]]:
    """The configuration with the values of the weights for the keys that the user has not set.

    Args:
        name: of the weights, for the messages.

    Returns:
        The configuration, and messages for the log: values that were set, and values that differ.

    Raises:
        UserError: the configuration cannot be used with these values, or asks for other windows.
    """
    present, given = flatten(config), config.given
    values: dict[str, object] = {}
    differing = []
    for key, value in trained.values.items():
        if present[key] == value or len(str(value)) > 200:
            continue
        if given is None or key in given:
            differing.append(f"{key} is {present[key]}, its weights were trained with {value}")
            continue
        values[key] = value
    windows = list(trained.windows)
    section = model_config(config)
    configured = getattr(section.trunk, "pretrained_window_sizes", (1,))
    may_change = not any(configured) and len(configured) == len(windows)
    here = configured_windows(section) if windows else []
    if may_change and here not in ([], windows):
        values[f"MODEL.{section.trunk.group}.PRETRAINED_WINDOW_SIZES"] = here = windows
    compare_windows(here, windows, name)
    try:
        config = changed(config, values)
    except UserError as error:
        raise UserError(f"{name}: the settings stored with these weights: {error}") from error
    notes = [f"{name}: {trained.line}"] if trained.line else []
    notes += [f"warning: {name}: {line}" for line in differing]
    if values:
        taken = ", ".join(f"{key} {value}" for key, value in values.items())
        notes.append(f"settings of the weights {name}: {taken}")
    return config, notes


def load_pretrained(
    config: ModelConfig,
    model: MoEModel,
    world: World,
    class_names: Sequence[str],
) -> tuple[str, ...]:
    """Load MODEL.PRETRAINED, if given.

    Args:
        class_names: of the data. The classifier is matched with them where its names are known.

    Returns:
        Messages for the log.

    Raises:
        UserError: the weights do not fit the model.
    """
    source = local_file(config.pretrained)
    if not source:
        return ()
    if source == PACKAGED:
        trained = imagenet_names(1000)
    elif is_hub_name(source):
        file = world.on_every_rank(lambda: fetch_weights(config.pretrained), main_first=True)
        content = world.agree(timm_config(source) or {} if world.is_main else {})
        check_windows(model, windows_of_config(content), source)
        trained = label_names(content)
        source = str(file)
    try:
        pretrained = None
        if source != PACKAGED and Path(source).is_dir():
            pretrained = find_checkpoint(
                source, Path(), world, "MODEL.PRETRAINED", weights_only=True
            )
        if pretrained:
            trained = pretrained.meta["class_names"]
        elif source != PACKAGED and not is_hub_name(config.pretrained):
            trained = class_names_of(Path(source))
        rows, notes = _head_rows(trained, config, class_names)
        num_names = len(trained or class_names)
        fit = partial(fit_head, model=model, config=config, rows=rows, num_names=num_names)
        if pretrained and not config.upcycle:
            load_weights(pretrained, model, fit)
        else:
            dense: str | dict[str, Tensor] = source
            if source == PACKAGED:
                dense = packaged_weights("MODEL.PRETRAINED")
            elif pretrained:
                dense = read_dense(pretrained, pretrained.weights_section, model)
            fresh = load_dense(model, dense, bool(config.upcycle), fit)
            if fresh and config.experts.freeze:
                raise UserError(
                    f"MODEL.MOE.FREEZE is True: weights {source} have no {fresh[0]}, it would stay"
                    " random"
                )
    except UserError as error:
        hint = ""
        if any(name in str(error) for name in model.classifier_names()):
            hint = (
                " (other classes? MODEL.CLASS_MAP new starts a new head, a file there takes over"
                " some of its rows)"
            )
        elif not config.experts.num_experts and ".moe." in str(error):
            hint = (
                " (MODEL.MOE.NUM_EXPERTS is 0 and the weights have experts; a dense model can"
                " learn from a run with experts: TRAIN.DISTILL.TEACHER)"
            )
        raise UserError(f"{error}{hint}") from error
    return notes


def _head_rows(
    trained: list[str], config: ModelConfig, class_names: Sequence[str]
) -> tuple[list[int] | None, tuple[str, ...]]:
    """For each class its row in the pretrained classifier, matched by name (of ImageNet also by
    English names), and a message for the log. None if the classifier is used as it is, or as
    MODEL.CLASS_MAP says.

    Args:
        trained: class names of the pretrained weights; empty if they are not known.
        class_names: of the data.
    """
    if config.class_map:
        return None, ()
    where = f"MODEL.PRETRAINED {config.pretrained}"
    if not trained:
        rows = match_classes([], class_names, where).numbers
        names = [name for _, name in sorted(zip(rows, class_names, strict=True))]
        note = f"{where}: has no class names, they are taken to be, in order: {shortened(names)}"
        remark = other_order(names)
        if remark:
            note += f"{remark} (MODEL.CLASS_MAP FILE says which row each class has)"
        return None if names == list(class_names) else rows, (note,)
    rows = known_classes(trained, class_names)
    unknown = [name for name, row in zip(class_names, rows, strict=True) if row == NO_CLASS]
    note = f"{where}: the classes are matched by number, only one side has names"
    try:
        hint = check_counting(trained, class_names, where)
        if len(unknown) == len(rows):
            named = trained if are_numbers(class_names) else class_names
            match = match_classes(trained, class_names, where)
            return match.numbers, (note + other_order(named),)
    except UserError as error:
        raise UserError(f"{error}; MODEL.CLASS_MAP new starts a new head") from error
    if rows == list(range(len(trained))):
        return None, ()
    count = len(class_names) - len(unknown)
    note = f"{where}: the classifier's rows of {count:,} classes are copied by name"
    if unknown:
        note += f", {len(unknown):,} classes are new: {shortened(unknown)}"
    return rows, (note + hint,)


def find_dense(pretrained: str, epochs: int, max_steps: int, world: World) -> Checkpoint:
    """The dense checkpoint in MODEL.PRETRAINED, from which the run continues for `epochs` epochs
    in all, and at most `max_steps` steps (0: any number). Every rank calls this.

    Raises:
        UserError: there is no checkpoint, it has experts, or no step is left.
    """
    source = find_checkpoint(pretrained, Path(), world, "MODEL.PRETRAINED")
    assert source is not None, "only --resume auto may be without one"
    if source.meta["experts"]:
        raise UserError(
            f"checkpoint {source.directory} has experts, MODEL.UPCYCLE run needs a dense run"
        )
    training, step = source.meta["training"], source.meta["step"]
    if training and training["epoch"] >= epochs:
        raise UserError(
            f"checkpoint {source.directory} has done {training['epoch']} epochs,"
            f" MODEL.UPCYCLE run needs TRAIN.EPOCHS ({epochs}) above that"
        )
    if 0 < max_steps <= step:
        raise UserError(
            f"checkpoint {source.directory} has done {step} steps,"
            f" MODEL.UPCYCLE run needs TRAIN.MAX_STEPS ({max_steps}) above that"
        )
    return source


def read_upcycled(
    source: Checkpoint, section: str, model: MoEModel, expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Read a section of a dense checkpoint for a model with experts. Arguments as in
    `swinv2_moe.checkpoints.checkpoint.read_section`.

    Parameters without a dense twin keep the values in `expected`; their moments are 0.

    Raises:
        UserError: the section does not fit the model; all differences are named.
    """
    tensors = to_experts(read_dense(source, section, model), model)
    for name, tensor in expected.items():
        if has_dense_twin(name):
            continue
        tensors[name] = tensor
        if section.startswith("optimizer/"):
            tensors[name] = torch.zeros_like(tensor)
    difference = compare(expected, tensors)
    if difference:
        raise UserError(
            f"checkpoint {source.directory}: it cannot be upcycled into the model: {difference};"
            " nothing was loaded"
        )
    return tensors
