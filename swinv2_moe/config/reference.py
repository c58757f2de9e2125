"""Markdown tables of all keys, made from the definitions of the keys.

`swinv2-moe config --markdown` prints them; docs/reference/configuration-keys.md holds the output.
"""

import itertools
import re
import textwrap
from dataclasses import fields
from math import inf

from moe_core.options import options
from swinv2_moe.config.load import nearest_key
from swinv2_moe.config.tree import default_config, flatten, groups, key_options
from swinv2_moe.errors import UserError

_HEAD = """\
# Every configuration key

Made by `swinv2-moe config --markdown` from the definitions of the keys. How keys are set, schedules
and notes: [configuration](configuration.md).
"""


def markdown() -> str:
    """A document with a table for each group of keys: key, default, other values, meaning."""
    lines = [_HEAD]
    by_key = meanings()
    allowed = _allowed()

    def group_of(item: tuple[str, object]) -> str:
        return item[0].rpartition(".")[0]

    for group, items in itertools.groupby(flatten(default_config()).items(), group_of):
        lines += [f"## {group or 'Run'}", "", "| key | default; allowed | meaning |"]
        lines.append("| --- | --- | --- |")
        for key, default in items:
            limits = allowed[key] if allowed[key] != "at least 0" else ""  # as everybody expects
            values = "; ".join(filter(None, (f"`{default!r}`", limits)))
            cells = (f"`{key}`", values, by_key.get(key, ""))
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
    """The meaning of each key, of the sections' fields and of model types."""
    by_key: dict[str, str] = {}
    for group, section in groups():
        names = {field.name for field in fields(section)}
        for field, option in options(section):
            key = f"{group}.{field.name.upper()}".lstrip(".")
            by_key.setdefault(key, _with_keys(option.meaning, names))
    return by_key


def _with_keys(text: str, names: set[str]) -> str:
    """The text with `names` of several words in backticks as keys, in capitals."""

    def as_key(match: re.Match) -> str:
        if match[1] in names:
            return match[0].upper()
        return match[0]

    return re.sub(r"`(\w+_\w+)`", as_key, text)


def _types() -> dict[str, str]:
    """The type of each key's value and its limits, or the values that it may have."""
    by_key, defaults, types = key_options(), flatten(default_config()), {}
    for key, allowed in _allowed().items():
        default = defaults[key]
        name = type(default).__name__
        if isinstance(default, list):
            name = f"list of {type(default[0]).__name__}"
        if key in by_key and by_key[key].choices:
            types[key] = allowed
        else:
            types[key] = ", ".join(filter(None, (name, allowed)))
    return types


def _allowed() -> dict[str, str]:
    """The limits of each key's value, or the values that it may have; empty: no limits."""
    by_key, allowed = key_options(), {}
    for key in flatten(default_config()):
        option = by_key.get(key)
        if option is None:
            allowed[key] = ""
        elif option.choices:
            allowed[key] = ", ".join(f"`{value}`" for value in option.allowed())
        else:
            allowed[key] = _limits_text(option.least, option.most)
    return allowed


def _limits_text(low: float, high: float) -> str:
    if low == -inf:
        return ""
    if high == inf:
        return f"at least {low:,}"
    return f"{low:,} to {high:,}"
