"""Files with the measured speed of a machine, for the planner."""

import math
from dataclasses import asdict
from pathlib import Path

from moe_core.parallel import Link, Machine
from swinv2_moe.errors import UserError
from swinv2_moe.files import read_json, write_json
from swinv2_moe.forms import NON_NEGATIVE_NUMBER, POSITIVE_NUMBER, form, or_null, record

_MAX_BYTES = 1 << 16
_MAX_NAME = 80  # characters
_NAME = form(
    f"a printable name of 1 to {_MAX_NAME} characters",
    lambda value: isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_NAME,
)
# Earlier versions have neither delay nor reduce_scatter.
_LINK = record(
    {"latency": POSITIVE_NUMBER, "bandwidth": POSITIVE_NUMBER}, {"delay": NON_NEGATIVE_NUMBER}
)
_PROFILE = record(
    {
        "name": _NAME,
        "intra": _LINK,
        "inter": _LINK,
        "flops": POSITIVE_NUMBER,
        "flops_fp32": POSITIVE_NUMBER,
        "memory_bandwidth": POSITIVE_NUMBER,
        "kernel_overhead": POSITIVE_NUMBER,
        "memory": or_null(POSITIVE_NUMBER),  # null: not known
    },
    {"reduce_scatter": POSITIVE_NUMBER},
)


def save_profile(machine: Machine, path: str | Path) -> None:
    """Write a machine as JSON, in the units of `moe_core.parallel.Machine`.

    Raises:
        UserError: the file cannot be written.
    """
    content = asdict(machine)
    if math.isinf(machine.memory):
        content["memory"] = None
    write_json(path, content)


def load_profile(path: str | Path) -> Machine:
    """Read a machine from a file of `save_profile`.

    Raises:
        UserError: the file cannot be read, or has an invalid value.
    """
    try:
        content = read_json(path, _MAX_BYTES)
        _PROFILE(content, "the profile")
    except OSError as error:
        raise UserError(f"--profile {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"--profile {path}: {error}") from error
    memory = content["memory"]
    if memory is None:
        memory = math.inf
    return Machine(
        content["name"],
        _link(content["intra"]),
        _link(content["inter"]),
        content["flops"],
        content["flops_fp32"],
        content["memory_bandwidth"],
        content["kernel_overhead"],
        memory,
        content.get("reduce_scatter", 1.0),
    )


def _link(content: dict[str, float]) -> Link:
    return Link(content["latency"], content["bandwidth"], content.get("delay", 0.0))
