"""What timm says of a model without building it: whether there is one, and its images."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import timm
from timm.models import get_pretrained_cfg, model_entrypoint

from swinv2_moe.errors import UserError, shortened


def timm_description(name: str) -> dict[str, Any]:
    """timm's `pretrained_cfg` of a model, of its default tag if `name` has none.

    Raises:
        UserError: timm has no such model or tag, or it is a model of this project.
    """
    base, _, tag = name.partition(".")
    where = f"MODEL.NAME {name}"
    if not timm.is_model(base):
        hint = _nearest(base, timm.list_models())
        raise UserError(f"{where}: timm {timm.__version__} has no such model{hint}")
    if model_entrypoint(base).__module__.startswith("swinv2_moe."):
        raise UserError(f"{where}: is a model of this project, which MODEL.TYPE swinv2_moe builds")
    try:
        config = get_pretrained_cfg(name)
    except RuntimeError as error:
        tagged = [one for one in timm.list_pretrained() if one.startswith(f"{base}.")]
        hint = _nearest(name, tagged)
        if not hint and tagged:
            hint = f"; it has {shortened(tagged)}"
        raise UserError(f"{where}: {base} has no weights of the tag {tag!r}{hint}") from error
    return dict(config.to_dict()) if config else {}


def settings(name: str) -> dict[str, object]:
    """The keys of images that timm names for a model, with their values.

    Raises:
        UserError: as `timm_description`.
    """
    described = timm_description(name)
    _, height, _ = described.get("input_size") or (3, 224, 224)
    return settings_of_timm(described) | {"DATA.IMG_SIZE": height}


def _nearest(name: str, names: Sequence[str]) -> str:
    """The end of a message about an unknown name."""
    similar = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def settings_of_timm(described: Mapping) -> dict[str, object]:
    """Configuration values from timm's pretrained_cfg, as `read_timm_config` has checked it."""
    values: dict[str, object] = {}
    for name in ("mean", "std"):
        if described.get(name):
            values[f"DATA.{name.upper()}"] = [float(number) for number in described[name]]
    if described.get("interpolation") in ("nearest", "bilinear", "bicubic", "random"):
        values["DATA.INTERPOLATION"] = described["interpolation"]
    mode, ratio = described.get("crop_mode", "center"), described.get("crop_pct")
    if mode == "squash":
        values["TEST.CROP_RATIO"] = 0.0
    elif mode in ("center", None) and ratio is not None and ratio <= 1:
        values["TEST.CROP_RATIO"] = float(ratio)
    return values
