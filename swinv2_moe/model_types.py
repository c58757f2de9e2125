"""Deprecated: `swinv2_moe.models.section` has the registry of model types. For one release this
module takes sections of earlier versions."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from math import inf

from yacs.config import CfgNode

from moe_core.options import option
from swinv2_moe.models.section import Trunk, check_moe_blocks, register_model_type

__all__ = ["Section", "check_moe_blocks", "register_model_type"]

warnings.warn(
    "swinv2_moe.model_types is swinv2_moe.models.section now: a section is a subclass of Trunk, and"
    " DATA.CHANNELS is the number of channels (IN_CHANS) of every type",
    FutureWarning,  # which Python shows
    stacklevel=2,
)


def Section(
    name: str,
    defaults: Mapping[str, object],
    ranges: Mapping[str, tuple[float, float]] | None = None,
    check: Callable[[CfgNode], None] = Trunk.check,
    sizes: Mapping[str, str] | None = None,
    meanings: Mapping[str, str] | None = None,
) -> type[Trunk]:
    """A subclass of Trunk from the arguments of earlier versions. IN_CHANS is left out; where files
    have it, it is read as DATA.CHANNELS."""
    fields = []
    for key, default in defaults.items():
        low, high = (ranges or {}).get(key, (-inf, inf))
        if isinstance(default, list):
            default = tuple(default)
        meaning = (meanings or {}).get(key, "")
        made = option(default, meaning, least=low, most=high)
        if key != "IN_CHANS":
            fields.append((key.lower(), type(default), made))
    shown = {title: key.lower() for title, key in (sizes or {}).items()}
    members = {"group": name, "sizes": shown, "check": staticmethod(check)}
    return make_dataclass(name, fields, bases=(Trunk,), namespace=members, frozen=True)
