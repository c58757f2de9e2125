"""Options: what a field of a configuration may hold, and what it means.

The fields of `MoEConfig` and of the application's sections are made by `option`. Their default,
limits, allowed values and meaning stand there alone: checks, command lines and references of keys
read them. This module does not import torch.
"""

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field, fields
from numbers import Integral
from typing import Any

CPU_KERNELS = (
    "amx",
    "avx512_bf16",
    "avx512",
    "avx2",
    "neon_bf16",
    "neon",
)  # the fastest first
KERNELS = ("auto", "triton", "torch", *CPU_KERNELS)  # MoEConfig.kernels
EXCHANGES = ("counted", "static")  # ParallelStrategy.exchange


@dataclass(frozen=True)
class Option:
    """What a field may hold, and what it means.

    Args:
        meaning: for references; names of fields are in backticks.
        least, most: the limits of a number, both included.
        choices: the allowed values, or a function that returns them (others may be registered
            later); empty: any.
        is_key: whether it is a key of configuration files, or of the dataclass alone.
        affects: what differs in a training that goes on with another value: the "training" itself,
            the learning "rate", what an "accuracy" is measured of, what a run has at its "start",
            or nothing that is learned ("").
    """

    meaning: str
    least: float = -math.inf
    most: float = math.inf
    choices: Collection | Callable[[], Collection] = ()
    is_key: bool = True
    affects: str = "training"

    def allowed(self) -> Collection:
        """The allowed values; empty: any."""
        if callable(self.choices):
            return self.choices()
        return self.choices

    def limits(self) -> str:
        """The limits in words: "at least 1", "between 0 and 1"; empty if there are none."""
        if self.least == -math.inf:
            return ""
        if self.most == math.inf:
            return f"at least {self.least}"
        return f"between {self.least} and {self.most}"


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """A field of a dataclass. `limits` are the further arguments of `Option`.

    Args:
        default: the field's default; MISSING: it has none.
    """
    return field(default=default, metadata={"option": Option(meaning, **limits)})


@functools.cache
def options(section: type) -> tuple[tuple[Field, Option], ...]:
    """The fields of a dataclass that `option` made, in their order."""
    return tuple(
        (each, each.metadata["option"]) for each in fields(section) if "option" in each.metadata
    )


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}")
