"""Read and check the lines of metrics.jsonl. Imports no torch, so that `swinv2-moe watch` starts
fast."""

from typing import Any

from swinv2_moe.files import parse_json
from swinv2_moe.forms import (
    COUNT,
    NUMBER,
    OBJECT,
    TEXT,
    fits,
    form,
    list_of,
    object_of,
    or_null,
    record,
)

_STRATEGY = record(
    {"event": TEXT, "layers": TEXT, "from": or_null(TEXT), "to": TEXT}
    | dict.fromkeys(("ms", "ms_before"), or_null(NUMBER))
)
_LAYERS = object_of(TEXT, record({"load": list_of(NUMBER)}))
# The form of a line of metrics.jsonl, by the key that identifies its kind. All else are numbers.
_LINES = {
    "environment": record({"environment": OBJECT}),
    "loss": record({"epoch": COUNT, "images_per_second": NUMBER}),
    "moe_layers": record(
        {"moe_layers": _LAYERS, "moe/dropped_share": NUMBER, "moe/load_max": NUMBER}
    ),
    "val_top1": record(
        {"epoch": COUNT} | dict.fromkeys(("val_top1", "val_top5", "seconds"), NUMBER)
    ),
    "strategy": record({"strategy": _STRATEGY}),
}
_NO_NUMBERS = ("environment", "moe_layers", "strategy")
_STEP = record({"step": COUNT})
_NUMBERS = object_of(
    TEXT, form("a number", lambda value: value in (None, False, True) or fits(NUMBER, value))
)


def parse_entry(line: str | bytes) -> dict | None:
    """The values of a complete line that `swinv2_moe.train.record` has written; None for any other
    text."""
    entry = parse(line)
    if not fits(_STEP, entry):
        return None
    kinds = [one for key, one in _LINES.items() if key in entry]
    numbers = {key: value for key, value in entry.items() if key not in _NO_NUMBERS}
    if kinds and fits(_NUMBERS, numbers) and all(fits(one, entry) for one in kinds):
        return entry
    return None


def parse(text: str | bytes) -> Any:
    """The value of a JSON document; None for any other text."""
    try:
        return parse_json(text)
    except ValueError:
        return None
