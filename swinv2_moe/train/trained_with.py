"""What weights were trained with: the preparation of images and the windows of position biases.

A run that begins with weights takes these values over, unless the user has set other ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from yacs.config import CfgNode

from swinv2_moe.config import config_from_text, flatten, given_keys, model_config
from swinv2_moe.config.checks import check_config
from swinv2_moe.errors import UserError
from swinv2_moe.model_types import model_section, model_type
from swinv2_moe.models import build_model
from swinv2_moe.models.hub import (
    description,
    is_hub_name,
    local_file,
    read_timm_config,
    timm_config,
    windows_of_config,
)
from swinv2_moe.models.positions import windows_of_tables
from swinv2_moe.models.weight_files import read_one_of
from swinv2_moe.train.checkpoint import checkpoints_below
from swinv2_moe.train.meta import read_meta

_KEYS = ("DATA.MEAN", "DATA.STD", "DATA.INTERPOLATION", "TEST.CROP", "TEST.CROP_RATIO")


@dataclass(frozen=True)
class TrainedWith:
    """Values of the keys in `_KEYS`, and the window side of each stage; empty: not known. `line`
    says which of several state dicts in a file is used."""

    values: dict[str, object] = field(default_factory=dict)
    windows: list[int] = field(default_factory=list)
    line: str = ""


def of_checkpoint(meta: dict, name: str) -> TrainedWith:
    """The values in the meta.json of a checkpoint."""
    return _of_yaml(meta["config"], meta.get("windows"), name)


def of_weights(pretrained: str, stages: int) -> TrainedWith:
    """The values that belong to MODEL.PRETRAINED, as far as they are known.

    Args:
        stages: number of stages of the model.

    Raises:
        UserError: an unknown name, or a file that cannot be read.
    """
    if is_hub_name(pretrained):
        content = timm_config(pretrained)
        return TrainedWith(of_timm(description(content)), windows_of_config(content))
    path = Path(local_file(pretrained))
    if path.is_dir():
        return _of_run(path)
    if path.suffix == ".safetensors" and path.is_file():
        try:
            with safe_open(path, "pt") as content:
                metadata = content.metadata() or {}
        except Exception:  # the reader of the weights says what is wrong
            return TrainedWith()
        if "config" in metadata:
            return _of_yaml(metadata["config"], None, str(path))
    content = read_timm_config(path.parent / "config.json")
    tensors, line = read_one_of(path)
    windows = windows_of_tables(tensors, stages) or windows_of_config(content)
    return TrainedWith(of_timm(description(content)), windows, line)


def _of_run(path: Path) -> TrainedWith:
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    newest = [*checkpoints_below(path), path][0]
    try:
        return of_checkpoint(read_meta(newest, "MODEL.PRETRAINED"), f"checkpoint {newest}")
    except UserError:  # the reader of the weights says what is wrong
        return TrainedWith()


def _of_yaml(text: str, windows: list[int] | None, name: str) -> TrainedWith:
    config = config_from_text(text, name)
    values = flatten(config)
    if windows is None:
        windows = _windows_of(config)
    return TrainedWith({key: values[key] for key in _KEYS}, windows)


def of_timm(described: Mapping) -> dict[str, object]:
    """Configuration values from timm's pretrained_cfg. Entries of an unknown form are ignored."""
    values: dict[str, object] = {}
    for name in ("mean", "std"):
        numbers = described.get(name)
        if isinstance(numbers, (list, tuple)) and all(type(x) in (int, float) for x in numbers):
            values[f"DATA.{name.upper()}"] = [float(number) for number in numbers]
    if described.get("interpolation") in ("nearest", "bilinear", "bicubic"):
        values["DATA.INTERPOLATION"] = described["interpolation"]
    mode, ratio = described.get("crop_mode", "center"), described.get("crop_pct")
    if mode == "squash":
        values["TEST.CROP"] = False
    elif mode in ("center", None) and type(ratio) in (int, float):
        values |= {"TEST.CROP": True, "TEST.CROP_RATIO": float(ratio)}
    return values


def take_over(config: CfgNode, trained: TrainedWith, name: str) -> tuple[CfgNode, list[str]]:
    """The configuration with the values of the weights for the keys that the user has not set.

    Args:
        name: of the weights, for the messages.

    Returns:
        The configuration, and messages for the log: what was taken over, and what differs.
    """
    given, present = given_keys(config), flatten(config)
    config = config.clone()
    config.defrost()
    taken, differing = [], []
    for key, value in trained.values.items():
        if present[key] == value or len(str(value)) > 200:
            continue
        if given is None or key in given:
            differing.append(f"{key} is {present[key]}, its weights were trained with {value}")
            continue
        group, _, last = key.rpartition(".")
        config[group][last] = value
        taken.append(f"{key} {value}")
    if _needs_windows(config, trained.windows):
        section = model_type(config).section.name
        config.MODEL[section].PRETRAINED_WINDOW_SIZES = list(trained.windows)
        taken.append(f"MODEL.{section}.PRETRAINED_WINDOW_SIZES {list(trained.windows)}")
    try:
        check_config(config)
    except UserError as error:
        raise UserError(f"{name}: its weights were trained so: {error}") from error
    config.freeze()
    notes = [f"{name}: {trained.line}"] if trained.line else []
    notes += [f"warning: {name}: {line}" for line in differing]
    if taken:
        notes.append(f"taken over from {name}, whose weights were trained so: {', '.join(taken)}")
    return config, notes


def _needs_windows(config: CfgNode, windows: list[int]) -> bool:
    """Whether the weights' windows are not those that the model would use, and none are set."""
    configured = model_section(config).get("PRETRAINED_WINDOW_SIZES", [1])
    if any(configured) or len(configured) != len(windows):
        return False
    return _windows_of(config) not in ([], list(windows))


def _windows_of(config: CfgNode) -> list[int]:
    """The windows of the position biases of a configured model."""
    with torch.device("meta"):
        return build_model(model_config(config), num_classes=1).position_windows()
