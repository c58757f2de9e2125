"""Validators of JSON values, for checking a file where it is read.

POINT = record({"x": NUMBER, "y": NUMBER})
list_of(POINT)(value, "points")  # ValueError: points/3/x is 'a', it must be a finite number
"""

import math
from collections.abc import Callable
from typing import Any, TypeGuard

from swinv2_moe.files import check_plain_name

Form = Callable[[Any, str], None]  # arguments: value and name of its place; raises ValueError

_LARGEST = 2**53  # up to here, every JSON reader represents integers exactly
_SHOWN = 40  # characters of a wrong value in a message


def form(what: str, accepts: Callable[[object], bool]) -> Form:
    """A form of values for which `accepts` returns True. `what`: a description of the values for
    messages."""

    def check(value: object, place: str) -> None:
        if not accepts(value):
            raise ValueError(f"{place} is {shown(value)}, it must be {what}")

    return check


def list_of(item: Form, length: int | None = None) -> Form:
    """Lists of items of one form; `length` None means any length."""

    def check(value: Any, place: str) -> None:
        LIST(value, place)
        if length is not None and len(value) != length:
            raise ValueError(f"{place} has {len(value)} items, it must have {length}")
        for i, inner in enumerate(value):
            item(inner, f"{place}/{i}")

    return check


def object_of(name: Form, item: Form) -> Form:
    """Objects whose names have the form `name` and whose values have the form `item`."""

    def check(value: Any, place: str) -> None:
        OBJECT(value, place)
        for key, inner in value.items():
            name(key, f"a name in {place}")
            item(inner, f"{place}/{key}")

    return check


def record(required: dict[str, Form], optional: dict[str, Form] | None = None) -> Form:
    """Objects with the required names; `optional` ones may be missing, others are not checked."""

    def check(value: Any, place: str) -> None:
        OBJECT(value, place)
        for name, inner in (required | (optional or {})).items():
            where = f"{place}/{name}" if place else name
            if name in value:
                inner(value[name], where)
            elif name in required:
                raise ValueError(f"{where} is missing")

    return check


def or_null(inner: Form) -> Form:
    def check(value: object, place: str) -> None:
        if value is not None:
            inner(value, place)

    return check


def fits(form: Form, value: object) -> bool:
    """Whether a value has the form."""
    try:
        form(value, "")
    except ValueError:
        return False
    return True


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_number(value: object) -> TypeGuard[float]:
    if type(value) is int:
        return abs(value) <= _LARGEST
    return type(value) is float and math.isfinite(value)


def is_text(value: object) -> TypeGuard[str]:
    """Whether the value is text that can be encoded. JSON may contain unpaired surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_relative_path(value: object) -> bool:
    if not is_text(value) or not value.isprintable():
        return False
    try:
        for name in value.split("/"):
            check_plain_name(name)
    except ValueError:
        return False
    return True


def shown(value: object) -> str:
    """A short representation of a value, in one line, for messages."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}..."
    text = "null"
    if value is not None:
        text = repr(value)
    if len(text) <= 2 * _SHOWN:
        return text
    return f"{text[:_SHOWN]}..."


TEXT = form("text", is_text)
FLAG = form("true or false", lambda value: isinstance(value, bool))
COUNT = form(f"a whole number from 0 to {_LARGEST}", _is_count)
POSITIVE_COUNT = form(
    f"a whole number from 1 to {_LARGEST}", lambda value: _is_count(value) and value > 0
)
NUMBER = form("a finite number", _is_number)
POSITIVE_NUMBER = form("a positive number", lambda value: _is_number(value) and value > 0)
NON_NEGATIVE_NUMBER = form("a number of at least 0", lambda value: _is_number(value) and value >= 0)
LIST = form("a list", lambda value: isinstance(value, list))
OBJECT = form("an object", lambda value: isinstance(value, dict))
RELATIVE_PATH = form("the name of a file below this directory", _is_relative_path)
