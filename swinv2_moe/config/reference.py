"""Markdown tables of all keys, made from the definitions of the keys and their comments.

`swinv2-moe config --markdown` prints them; docs/reference/configuration-keys.md holds the output.
"""

import inspect
import itertools
import re
import textwrap
from math import inf

from moe_core import MoEConfig
from swinv2_moe.config import sections
from swinv2_moe.config.checks import choices, ranges
from swinv2_moe.config.defaults import default_config, flatten
from swinv2_moe.config.load import nearest_key
from swinv2_moe.errors import UserError
from swinv2_moe.model_types import model_types

_SECTIONS = {
    "": (sections.RunConfig,),
    "CHECKPOINT": (sections.CheckpointConfig,),
    "DATA": (sections.DataConfig,),
    "MODEL": (sections.ModelConfig,),
    "MODEL.MOE": (sections.ExpertsConfig, MoEConfig),
    "TRAIN": (sections.TrainConfig,),
    "TRAIN.OPTIMIZER": (sections.OptimizerConfig,),
    "AUG": (sections.AugmentConfig,),
    "TEST": (sections.CropConfig,),
}
_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.*))?$")
_HEAD = """\
# Every configuration key

Made by `swinv2-moe config --markdown` from the definitions of the keys. How keys are set, schedules
and notes: [configuration](configuration.md).
"""


def markdown() -> str:
    """A document with a table for each group of keys: key, type, default and meaning."""
    lines = [_HEAD]
    by_key = meanings()
    types = _types()

    def group_of(item: tuple[str, object]) -> str:
        return item[0].rpartition(".")[0]

    for group, items in itertools.groupby(flatten(default_config()).items(), group_of):
        lines += [f"## {group or 'Run'}", "", "| key | type | default | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for key, default in items:
            cells = (f"`{key}`", types[key], f"`{default!r}`", by_key.get(key, ""))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def describe(prefix: str) -> str:
    """The default, type and meaning of each key that starts with `prefix`.

    Raises:
        UserError: no key starts with `prefix`; the message names the nearest key.
    """
    defaults = flatten(default_config())
    name = prefix.upper().rstrip(".")
    keys = [key for key in defaults if key == name or key.startswith(f"{name}.")]
    if not keys:
        raise UserError(f"no key starts with {prefix!r}{nearest_key(name)}")
    by_key, types = meanings(), _types()
    lines = []
    for key in keys:
        lines.append(f"{key}: {defaults[key]!r}")
        for text in (types[key].replace("`", ""), by_key.get(key, "").replace("`", "")):
            if text:
                lines += textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def meanings() -> dict[str, str]:
    """The meaning of each key, from the comments of the sections' fields and from model types."""
    by_key = {}
    for group, classes in _SECTIONS.items():
        for section in classes:
            for name, comment in comments(section).items():
                by_key.setdefault(".".join(filter(None, [group, name.upper()])), comment)
    for registered in model_types().values():
        section = registered.section
        for key, meaning in section.meanings.items():
            by_key[f"MODEL.{section.name}.{key}"] = meaning
    return by_key


def comments(section: type) -> dict[str, str]:
    """The comment of each field of a dataclass. Names of several words in backticks that are fields
    become keys, in capitals."""
    by_name = field_comments(inspect.getsource(section))

    def as_key(match: re.Match) -> str:
        if match[1] in by_name:
            return match[0].upper()
        return match[0]

    return {name: re.sub(r"`(\w+_\w+)`", as_key, text) for name, text in by_name.items()}


def field_comments(source: str) -> dict[str, str]:
    """The comment of each field in the source of a dataclass: after the field, or on the lines
    before it."""
    by_name = {}
    lines_before = []
    for line in source.splitlines():
        if line.startswith("    # "):
            lines_before.append(line.strip().removeprefix("# "))
            continue
        match = _FIELD.match(line)
        if match:
            by_name[match[1]] = " ".join(lines_before) or match[2] or ""
        lines_before = []
    return by_name


def _types() -> dict[str, str]:
    """The type of each key's value, or the values that it may have."""
    allowed = choices()
    limits = ranges()
    types = {}
    for key, default in flatten(default_config()).items():
        types[key] = type(default).__name__
        if isinstance(default, list):
            types[key] = f"list of {type(default[0]).__name__}"
        if key in allowed:
            types[key] = ", ".join(f"`{value}`" for value in allowed[key])
        elif key in limits:
            types[key] += _limits_text(*limits[key])
    return types


def _limits_text(low: float, high: float) -> str:
    if low == -inf:
        return ""
    if high == inf:
        return f", at least {low:,}"
    return f", {low:,} to {high:,}"
