"""What pretrained weights record of themselves: configuration, classes, architecture."""

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from yacs.config import CfgNode

from swinv2_moe.config import config_from_text
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import MAX_YAML_CHARS, parse_json, read_bounded, read_json
from swinv2_moe.models.bundled import PREFIX, bundled_file

_MAX_META = 1 << 28  # bytes of a checkpoint's meta.json


def trained_config(name: str) -> tuple[CfgNode, list[str]]:
    """The configuration that weights were trained with, and the names of their classes, empty if
    they are not known: of a run, of a checkpoint, or of a file of `convert-checkpoint export
    single`.

    Raises:
        UserError: there is no configuration.
    """
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    if name.startswith(PREFIX):
        path = bundled_file(name)
    where = f"MODEL.PRETRAINED {name}"
    if not path.exists() and not name.startswith("hf-hub:"):
        raise UserError(f"{where}: no such file or directory")
    try:
        text, class_names = _recorded(path)
    except (OSError, ValueError, SafetensorError, MemoryError) as error:
        raise UserError(f"{where}: cannot be read ({one_line(str(error))})") from error
    if text is None:
        named, _ = described(name)
        if named:
            raise UserError(
                f"{where}: is a {one_line(named)}; without --cfg only a dense model of timm can"
                " be used"
            )
        raise UserError(
            f"{where}: does not say what its model is; name a configuration by --cfg, or put"
            " timm's config.json beside it"
        )
    return config_from_text(text, where), class_names


def _recorded(path: Path) -> tuple[str | None, list[str]]:
    """The configuration, as YAML, and the names of the classes, as far as they are recorded."""
    content: dict[str, object] = {}
    if path.is_file() and path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            content |= file.metadata() or {}
        content["class_names"] = parse_json(str(content.get("class_names", "[]")))
    has_yaml = (path / "config.yaml").is_file()
    for meta in (path / "checkpoints" / "latest" / "meta.json", path / "meta.json"):
        if not meta.is_file():
            continue
        try:
            read = read_json(meta, _MAX_META)
        except (OSError, ValueError):
            if not has_yaml:
                raise
            continue  # a damaged checkpoint of a run, which may have others
        if isinstance(read, dict):
            content = read
    if has_yaml:
        content["config"] = read_bounded(path / "config.yaml", MAX_YAML_CHARS).decode()
    text, names = content.get("config"), content.get("class_names")
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        names = []
    return text if isinstance(text, str) else None, names


def described(name: str) -> tuple[str, list[str]]:
    """The architecture and the class names in a config.json of timm, in a folder or beside a file;
    empty without them."""
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    folder = path
    if path.is_file():
        folder = path.parent
    if not os.path.lexists(folder / "config.json"):
        return "", []
    from swinv2_moe.models.hub import label_names, read_timm_config  # imports torch

    content = read_timm_config(folder / "config.json")
    architecture = content.get("architecture")
    return architecture if isinstance(architecture, str) else "", label_names(content)
