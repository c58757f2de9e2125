"""Checks of option values."""

from numbers import Integral


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}")
