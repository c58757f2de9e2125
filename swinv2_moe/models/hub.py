"""Pretrained weights by name, timm:NAME or hf-hub:OWNER/NAME in MODEL.PRETRAINED, from the Hugging
Face hub.

A file in the cache is used without a connection. The cache is huggingface_hub's, with its
environment variables (HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN).
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import logging
from timm.models import get_pretrained_cfg
from timm.models.swin_transformer_v2 import SwinTransformerV2

from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import read_json
from swinv2_moe.forms import (
    COUNT,
    OBJECT,
    TEXT,
    Form,
    form,
    list_of,
    or_null,
    record,
)
from swinv2_moe.models.bundled import PREFIX, bundled_file
from swinv2_moe.models.positions import windows_of_model
from swinv2_moe.models.timm_names import settings

_TIMM = "timm:"
_HUB = "hf-hub:"
_LOCAL = "local-dir:"
NO_CONFIG = "its config.json is not in the cache and cannot be downloaded"
_MAX_DESCRIPTION = 1 << 20  # bytes of config.json
_SWIN = ("swinv2_", "swin_moe")
_WINDOW_ARGUMENTS = ("img_size", "patch_size", "window_size", "pretrained_window_sizes", "depths")
_INTERPOLATIONS = ["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random"]
_SIDE = form(
    "a whole number from 1 to 4096", lambda value: type(value) is int and 0 < value <= 2**12
)
_CROP_MODES = ["center", "squash", "border"]


def _number(least: float, most: float, hint: str = "") -> Form:
    def accepts(value: object) -> bool:
        return type(value) in (int, float) and least <= value <= most  # type: ignore[operator]

    return form(f"a number from {least} to {most}{hint}", accepts)


_SETTINGS: dict[str, Form] = {
    "input_size": list_of(_SIDE, 3),
    "mean": list_of(_number(0, 1, ", as pixels are")),
    "std": list_of(_number(0.001, 1, ", as pixels are from 0 to 1")),
    "interpolation": form("one of timm's", _INTERPOLATIONS.__contains__),
    "crop_pct": _number(0.1, 10),
    "crop_mode": form("one of timm's", _CROP_MODES.__contains__),
    "num_classes": COUNT,
}
_OPTIONAL_SETTINGS = record({}, {name: or_null(one) for name, one in _SETTINGS.items()})
_DESCRIBING = ("architecture", "pretrained_cfg", "label_names")
_CONFIG = record({}, {"pretrained_cfg": OBJECT, "model_args": or_null(OBJECT)})
_FILES = ("model.safetensors", "pytorch_model.bin")  # the second name is used in older repositories


def is_hub_name(pretrained: str) -> bool:
    """Whether a value of MODEL.PRETRAINED is a name, not a path."""
    return pretrained.startswith((_TIMM, _HUB))


def fetch_weights(name: str, key: str = "MODEL.PRETRAINED") -> Path:
    """The file of weights that `name` stands for, from the cache, or else by download.

    Processes of one machine that ask for the same file download it once: huggingface_hub locks it.

    Args:
        name: `timm:NAME`, a pretrained model of timm; or `hf-hub:OWNER/NAME`, perhaps with
            `@REVISION`.
        key: the key with this name, for messages.

    Raises:
        UserError: an unknown name, no connection, no file of weights.
    """
    repository, revision, files = _location(name, key)
    for file in files:
        try:
            return Path(hf_hub_download(repository, file, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError):
            continue  # not in the cache; the download reports an invalid name
    kept = _in_torch_cache(name)
    if kept is not None:
        return kept
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # messages about retries do not help the user
    try:
        return _download(name, key, repository, revision, files)
    finally:
        logging.set_verbosity(verbosity)


def _in_torch_cache(name: str) -> Path | None:
    """The file of `timm:NAME` that timm has downloaded from elsewhere than the hub, if any."""
    if not name.startswith(_TIMM):
        return None
    config = get_pretrained_cfg(name.removeprefix(_TIMM))
    if config is None or not config.url:
        return None
    file = Path(torch.hub.get_dir(), "checkpoints", os.path.basename(str(config.url)))
    return file if file.is_file() else None


def local_file(pretrained: str) -> str:
    """The file of weights of `bundled:NAME`, or in a directory in timm's form, `DIR` or
    `local-dir:DIR`; other values are returned unchanged.

    Raises:
        UserError: the package has no such model.
    """
    if pretrained.startswith(PREFIX):
        return str(bundled_file(pretrained))
    directory = Path(pretrained.removeprefix(_LOCAL))
    if os.path.lexists(directory / "config.json"):
        for name in _FILES:
            if (directory / name).is_file():
                return str(directory / name)
    return str(directory) if pretrained.startswith(_LOCAL) else pretrained


def timm_config(name: str) -> Mapping[str, object] | None:
    """The config.json of a name, in timm's form: from timm, or from the hub. Empty if the
    repository has none; None if it is neither in the cache nor can be downloaded.

    Raises:
        UserError: as `read_timm_config`.
    """
    if name.startswith(_TIMM):
        model = name.removeprefix(_TIMM)
        config = get_pretrained_cfg(model, allow_unregistered=True)
        return {"architecture": model, "pretrained_cfg": config.to_dict() if config else {}}
    repository, revision, _ = _location(name)
    for cached in (True, False):  # a file in the cache needs no connection
        try:
            file = hf_hub_download(
                repository, "config.json", revision=revision, local_files_only=cached
            )
        except LocalEntryNotFoundError:
            continue
        except EntryNotFoundError:
            return {}
        except (OSError, ValueError):  # the download of the weights says what is wrong
            continue
        return read_timm_config(file)
    return None


def read_timm_config(file: str | Path) -> Mapping[str, object]:
    """The content of a config.json in timm's form, which stands beside weights; empty without one.

    Raises:
        UserError: it cannot be read, or a setting in it cannot be used. Without this error, the
            images would be prepared otherwise than in the training of the weights.
    """
    try:
        content = read_json(file, _MAX_DESCRIPTION)
        _CONFIG(content, "")
        _OPTIONAL_SETTINGS(description(content), "pretrained_cfg")
        label_names(content)
        if content.keys().isdisjoint([*_SETTINGS, *_DESCRIBING]):
            raise ValueError(f"it needs one of {', '.join(_DESCRIBING)}")
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(file):
            return {}
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise UserError(
            f"{file}: does not describe the weights beside it ({reason}); mend it, or move it away"
            " and set the keys of DATA"
        ) from error
    return content


def label_names(config: Mapping) -> list[str]:
    """The class names in a config.json in the order of the classifier's outputs; empty without any.

    Raises:
        ValueError: they are no list, and no object with the names by number.
    """
    names: Any = config.get("labels")  # in older files
    for place in (config.get("pretrained_cfg") or {}, config):
        names = place.get("label_names") or names
    if isinstance(names, dict):
        names = [names.get(str(number)) for number in range(len(names))]
    list_of(TEXT)(names or [], "label_names")
    return list(names or [])


def description(config: Mapping) -> Mapping[str, object]:
    """timm's `pretrained_cfg` in a config.json. In older files its entries are outside of it."""
    return config.get("pretrained_cfg", {key: config[key] for key in _SETTINGS if key in config})


def windows_of_config(config: Mapping) -> list[int]:
    """For each stage the window side that the weights' position biases were trained with, from the
    architecture and its arguments in a config.json. Empty if not known, and for models other than
    SwinV2."""
    name, given = config.get("architecture"), config.get("model_args")
    if not isinstance(name, str) or not name.startswith(_SWIN) or not timm.is_model(name):
        return []
    arguments = {}
    if isinstance(given, dict):
        arguments = {key: given[key] for key in _WINDOW_ARGUMENTS if key in given}
    if not all(map(_has_small_counts, arguments.values())):
        return []
    if isinstance(arguments.get("depths"), list):  # one block of a stage tells its window
        ones = [1] * len(arguments["depths"])
        arguments |= {"depths": ones, "num_heads": ones}
    if "moe" in name:
        arguments["num_experts"] = 0
    try:
        model = timm.create_model(name, device="meta", **arguments)
    except Exception:  # timm raises any type for values that do not fit each other
        return []
    if isinstance(model, SwinTransformerV2):
        return windows_of_model(model)
    return []


def timm_keys(name: str, as_timms: bool = False) -> dict[str, object]:
    """The configuration keys of a dense model of timm, and of the size of its images.

    Args:
        name: `timm:NAME`.
        as_timms: also a SwinV2 is of MODEL.TYPE timm, without this project's attention.

    Raises:
        UserError: timm has no weights of this name.
    """
    _location(name)
    architecture = name.removeprefix(_TIMM)
    model = timm.create_model(architecture, device="meta")
    if as_timms or not isinstance(model, SwinTransformerV2):
        size = settings(architecture)["DATA.IMG_SIZE"]
        return {"MODEL.TYPE": "timm", "MODEL.NAME": architecture, "DATA.IMG_SIZE": size}
    stages: list[Any] = list(model.layers)
    blocks = [list(stage.blocks) for stage in stages]
    size = model.patch_embed.img_size[0]
    return {
        "DATA.IMG_SIZE": size,
        "MODEL.SWINV2.PATCH_SIZE": model.patch_embed.patch_size[0],
        "MODEL.SWINV2.EMBED_DIM": model.patch_embed.proj.out_channels,
        "MODEL.SWINV2.DEPTHS": [len(stage) for stage in blocks],
        "MODEL.SWINV2.NUM_HEADS": [stage[0].attn.num_heads for stage in blocks],
        "MODEL.SWINV2.WINDOW_SIZE": blocks[0][0].window_size[0],
        "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES": [0] * len(blocks),
        "MODEL.MOE.BLOCKS": [[] for _ in blocks],
    }


def _has_small_counts(value: object) -> bool:
    """Whether a value is an integer up to 4,096, or a short list of such values."""
    if isinstance(value, list):
        return len(value) <= 8 and all(map(_has_small_counts, value))
    return type(value) is int and 0 <= value <= 4096


def _location(name: str, key: str = "MODEL.PRETRAINED") -> tuple[str, str | None, tuple[str, ...]]:
    """Repository, revision and possible files of weights, the best first."""
    if name.startswith(_HUB):
        repository, _, revision = name.removeprefix(_HUB).partition("@")
        return repository, revision or None, _FILES
    model = name.removeprefix(_TIMM)
    try:
        config = get_pretrained_cfg(model)
    except RuntimeError:  # the model has no such tag
        config = None
    if config is None:
        similar = difflib.get_close_matches(model, timm.list_pretrained(), n=1)
        hint = ""
        if similar:
            hint = f"; did you mean timm:{similar[0]}?"
        raise UserError(f"{key} {name}: timm {timm.__version__} has no such model{hint}")
    if not config.hf_hub_id:
        reason = "has no weights of it at the hub"
        if config.url:
            reason += f"; download {config.url} and set {key} to its path"
        raise UserError(f"{key} {name}: timm {reason}")
    repository, _, revision = config.hf_hub_id.partition("@")
    files: tuple[str, ...] = _FILES
    if config.hf_hub_filename:
        files = (config.hf_hub_filename,)
    return repository, revision or None, files


def _download(
    name: str, key: str, repository: str, revision: str | None, files: tuple[str, ...]
) -> Path:
    for file in files:
        try:
            return Path(hf_hub_download(repository, file, revision=revision))
        except LocalEntryNotFoundError as error:
            raise UserError(_advice(name, key, repository, revision, "no connection")) from error
        except EntryNotFoundError:
            continue
        except (OSError, ValueError) as error:  # raised for requests, for the disk and for the name
            reason = one_line(str(error))
            raise UserError(_advice(name, key, repository, revision, reason)) from error
    raise UserError(f"{key} {name}: {repository} has no file {' or '.join(files)}")


def _advice(name: str, key: str, repository: str, revision: str | None, reason: str) -> str:
    """A message that says which file to get, and where to put it."""
    url = f"{constants.ENDPOINT}/{repository}/resolve/{revision or 'main'}/{_FILES[0]}"
    form = "the file's path"
    if key != "MODEL.PRETRAINED":
        form = "timm:NAME@PATH"
    folder = f"models--{repository.replace('/', '--')}"
    return (
        f"{key} {name}: its weights are not in the cache and cannot be downloaded"
        f" ({reason}); download {url} where there is a network and set {key} to"
        f" {form}, or copy {folder} from another machine's cache into {constants.HF_HUB_CACHE}"
    )
