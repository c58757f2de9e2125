"""A checkpoint's meta.json: its content, and reading and writing it.

`read_meta` checks the checksum and the form of every value, so that later code may rely on both.
"""

import hashlib
import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core import moe_layers
from moe_core.checkpoint import TRUNK, expert_file
from moe_core.files import fsync
from swinv2_moe.errors import UserError
from swinv2_moe.files import parse_json, read_bounded
from swinv2_moe.forms import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    POSITIVE_COUNT,
    POSITIVE_NUMBER,
    RELATIVE_PATH,
    TEXT,
    Form,
    form,
    is_text,
    list_of,
    object_of,
    or_null,
    record,
    shown,
)

if TYPE_CHECKING:
    from swinv2_moe.models import MoEModel

FORMAT_VERSION = 1
_NO_CHECKSUM = "0" * 64
_MAX_BYTES = 64 << 20  # some 400,000 files
_MAX_CONFIG = 1 << 20  # characters


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_config(value: object) -> bool:
    return is_text(value) and len(value) <= _MAX_CONFIG


_SHA256 = form("a SHA-256 in hexadecimal", _is_sha256)
_CONFIG = form(f"text of at most {_MAX_CONFIG:,} characters", _is_config)
_LOSS_SCALER = record({"scale": POSITIVE_NUMBER, "good_steps": COUNT, "updates": COUNT})
WINDOWS = or_null(list_of(POSITIVE_COUNT))
_LOSS_WATCH = record({"start": list_of(NUMBER), "has_warned": FLAG})
_PHASES = object_of(TEXT, NUMBER)
_COST = record({"phases": or_null(_PHASES), "joules": or_null(NUMBER)})


def _time_to_target(value: Any, place: str) -> None:
    _TIME_TO_TARGET(value, place)
    validations = len(value["validations"])
    costs = len(value.get("costs", value["validations"]))
    if costs != validations:
        raise ValueError(f"{place} has {validations} validations and {costs} costs")


_TIME_TO_TARGET = record(
    {"seconds": NUMBER, "validations": list_of(list_of(NUMBER, length=4))},
    optional={"phases": _PHASES, "costs": list_of(_COST)},
)

_STRATEGIES = list_of(record({"key": OBJECT, "strategy": OBJECT}))

_CLASSIFIER_TRAINING = record(
    {
        "epoch": COUNT,
        "epoch_step": COUNT,
        "epoch_loss": NUMBER,
        "validated_step": COUNT,
        "steps_per_epoch": POSITIVE_COUNT,
        "global_batch": POSITIVE_COUNT,
        "best_top1": NUMBER,
        "last_top1": or_null(NUMBER),
        "skipped": COUNT,
        "loss_scaler": _LOSS_SCALER,
        "strategies": _STRATEGIES,
    },
    # earlier versions have no such keys
    optional={
        "images": list_of(COUNT, length=2),  # to train on, to validate
        "validation": TEXT,  # what the validation images are (`content_id`)
        "time_to_target": _time_to_target,
        "loss_watch": _LOSS_WATCH,
        "best_by": TEXT,
        "best_score": NUMBER,
        "best_epoch": COUNT,
        "ended": TEXT,
        "dense_updates": COUNT,
        "epoch_losses": NUMBER,
        "epoch_seconds": NUMBER,
        "joules": or_null(NUMBER),
    },
)
_DETECTOR_TRAINING = record(
    {
        "epoch": COUNT,
        "iter": COUNT,
        "loss_scaler": _LOSS_SCALER,
        "param_groups": list_of(OBJECT),
        "param_schedulers": list_of(OBJECT),
    },
    optional={"strategies": _STRATEGIES},  # earlier versions lack them
)
# `swinv2_moe.checkpoints.novelty`
_NOVELTY = record(
    {
        "mean": list_of(NUMBER),
        "directions": list_of(list_of(NUMBER)),
        "variances": list_of(POSITIVE_NUMBER),
        "rest": POSITIVE_NUMBER,
        "distance": list_of(NUMBER, length=2),
        "energy": list_of(NUMBER, length=2),
        "threshold": NUMBER,
    }
)
_META = record(
    {
        "saved": TEXT,
        "step": COUNT,
        "training": or_null(OBJECT),
        "config": _CONFIG,
        "class_names": list_of(TEXT),
        "experts": object_of(RELATIVE_PATH, list_of(COUNT)),
        "files": object_of(RELATIVE_PATH, record({"bytes": COUNT, "sha256": _SHA256})),
    },
    optional={
        "windows": WINDOWS,
        "backbone_windows": WINDOWS,
        "temperature": POSITIVE_NUMBER,  # of the logits, for calibrated probabilities
        "novelty": _NOVELTY,  # which pictures are unlike those held out
    },
)


class DamagedError(UserError):
    """A checkpoint is incomplete, or differs from what was written."""


def read_meta(directory: Path, key: str = "checkpoint") -> dict:
    """A checkpoint's meta.json.

    Raises:
        UserError: the file is missing, cannot be read, or has a newer format.
        DamagedError: the file is damaged, or was written by another program.
    """
    if directory.is_file():
        raise UserError(f"{key} {directory}: is a file; a checkpoint is a directory with meta.json")
    try:
        text = read_bounded(directory / "meta.json", _MAX_BYTES)
        meta = parse_json(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(
            f"{key} {directory}: holds no checkpoint (a directory with meta.json)"
        ) from error
    except PermissionError as error:
        raise UserError(
            f"checkpoint {directory}: meta.json cannot be read ({error.strerror})"
        ) from error
    except OSError as error:
        raise DamagedError(
            f"checkpoint {directory}: meta.json cannot be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise DamagedError(f"checkpoint {directory}: meta.json is damaged ({error})") from error
    _check_checksum(directory, text, meta)
    if meta.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {directory} has format version {shown(meta.get('format_version'))},"
            f" this program knows {FORMAT_VERSION}"
        )
    _check_form(directory, meta)
    return meta


def describe(
    model: "MoEModel",
    step: int,
    config: str,
    class_names: list[str],
    training: dict | None = None,
) -> dict:
    """The content of meta.json without "files", for a checkpoint that is not partial.

    Args:
        config: the complete configuration, as YAML.
        training: the state of the training; None for weights only.
    """
    expert_steps = {}
    for name, layer in moe_layers(model).items():
        expert_steps[name] = [step] * layer.config.num_experts
    return {
        "step": step,
        "training": training,
        "class_names": class_names,
        "experts": expert_steps,
        "windows": model.position_windows(),
        "config": config,
    }


def write_meta(directory: Path, meta: dict) -> dict:
    """Write meta.json with a checksum of itself, and return its content.

    The checksum is computed from the text with zeros in place of the checksum.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "saved": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        **meta,
    }
    text = json.dumps(meta | {"checksum": _NO_CHECKSUM}, indent=1)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    (directory / "meta.json").write_text(text.replace(_NO_CHECKSUM, checksum))
    fsync(directory / "meta.json")
    return meta


def split_warning(training: dict | None, num_train: int, num_val: int) -> str | None:
    """A warning if DATA.VAL_SPLIT splits a folder that has more or fewer images than in training;
    otherwise None.

    Args:
        training: the state of the training; None for weights only.
        num_train, num_val: the images of the folder now.
    """
    before = (training or {}).get("images")
    if before in (None, [num_train, num_val]):
        return None
    return (
        f"warning: the folder has {num_train:,} + {num_val:,} images, {before[0]:,} +"
        f" {before[1]:,} when it was trained on: the share that is held out was chosen anew, so"
        " some of its images may have been trained on"
    )


def check_classifier(directory: Path, training: dict) -> None:
    """Raise UserError if the state of a training is a detector's."""
    if _training_form(training) is _DETECTOR_TRAINING:
        raise UserError(
            f"checkpoint {directory}: is of the training of a detector; `swinv2-moe detect`"
            " continues it"
        )


def check_detector(directory: Path, training: dict, num_groups: int, num_schedulers: int) -> None:
    """Raise UserError unless the state of a training is a detector's, with `num_groups` parameter
    groups and `num_schedulers` schedulers."""
    if _training_form(training) is not _DETECTOR_TRAINING:
        raise UserError(f"checkpoint {directory}: is not of the training of a detector")
    for name, count in (("param_groups", num_groups), ("param_schedulers", num_schedulers)):
        if len(training[name]) != count:
            raise UserError(
                f"checkpoint {directory}: has {len(training[name])} {name}, this training has"
                f" {count}; begin anew, with another --output"
            )


def _check_checksum(directory: Path, text: bytes, meta: object) -> None:
    """Raise DamagedError unless the text matches the checksum in it."""
    checksum = None
    if isinstance(meta, dict):
        checksum = meta.get("checksum")
    if not isinstance(checksum, str):
        raise DamagedError(
            f"checkpoint {directory}: meta.json is not that of a checkpoint, it has no checksum"
        )
    if _is_sha256(checksum):
        text = text.replace(checksum.encode(), _NO_CHECKSUM.encode())
    if hashlib.sha256(text).hexdigest() != checksum:
        raise DamagedError(f"checkpoint {directory}: meta.json is damaged (its checksum differs)")


def _check_form(directory: Path, meta: dict) -> None:
    """Raise DamagedError unless every value has the required form and all files of the model are
    listed."""
    try:
        _META(meta, "")
        training = meta["training"]
        if training is not None:
            _training_form(training)(training, "training")
        _check_files(meta["files"], meta["experts"])
    except ValueError as error:
        raise DamagedError(f"checkpoint {directory}: meta.json: {error}") from error


def _training_form(training: dict) -> Form:
    if "iter" in training:
        return _DETECTOR_TRAINING
    return _CLASSIFIER_TRAINING


def _check_files(files: dict[str, dict], experts: dict[str, list[int]]) -> None:
    """Raise ValueError if a file of the weights is not listed: it has no checksum then."""
    needed = [TRUNK]
    for layer, steps in experts.items():
        needed += [expert_file(layer, expert) for expert in range(len(steps))]
    for file in needed:
        if file not in files:
            raise ValueError(f"files does not list {file}")
