"""Read and check the lines of metrics.jsonl. Imports no torch, so that `swinv2-moe watch` starts
fast."""

import json
from typing import Any

NUMBER = int | float
_NO_NUMBERS = ("environment", "moe_layers", "strategy")
_LIMIT = 2**63  # larger than any number that a run logs
# Required keys and types of a line of metrics.jsonl, by the key that identifies its kind.
_LINES: dict[str, dict] = {
    "environment": {"environment": dict},
    "loss": {"epoch": int, "images_per_second": NUMBER},
    "moe_layers": {"moe_layers": dict, "moe/dropped_share": NUMBER, "moe/load_max": NUMBER},
    "val_top1": {"epoch": int, "val_top1": NUMBER, "val_top5": NUMBER, "seconds": NUMBER},
    "strategy": {"strategy": dict},
}
_STRATEGY = {
    "event": str,
    "layers": str,
    "from": str | None,
    "to": str,
    "ms": NUMBER | None,
    "ms_before": NUMBER | None,
}


def parse_entry(line: str | bytes) -> dict | None:
    """The values of a complete line that `swinv2_moe.train.record` has written; None for any other
    text."""
    entry = parse(line)
    if _is_entry(entry):
        return entry
    return None


def parse(text: str | bytes) -> Any:
    """The value of a JSON document; None for any other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def fits(entry: Any, types: dict) -> bool:
    """Whether `entry` has these keys, with values of these types."""
    return isinstance(entry, dict) and all(
        _is_a(entry.get(key), kind) for key, kind in types.items()
    )


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value has a type. A number must also be finite and below a limit."""
    return isinstance(value, kind) and (not isinstance(value, NUMBER) or -_LIMIT < value < _LIMIT)


def _is_entry(entry: Any) -> bool:
    """Whether this is a complete line of metrics.jsonl, as `swinv2_moe.train.record` writes it."""
    if not fits(entry, {"step": int}):
        return False
    kinds = [types for key, types in _LINES.items() if key in entry]
    numbers = [value for key, value in entry.items() if key not in _NO_NUMBERS]
    return (
        bool(kinds)
        and all(fits(entry, types) for types in kinds)
        and all(_is_a(value, NUMBER | None) for value in numbers)
        and all(_is_load(layer) for layer in entry.get("moe_layers", {}).values())
        and ("strategy" not in entry or fits(entry["strategy"], _STRATEGY))
    )


def _is_load(layer: Any) -> bool:
    return fits(layer, {"load": list}) and all(_is_a(load, NUMBER) for load in layer["load"])
