"""What the ranks of a run must have in common, compared before they do anything together."""

import hashlib
from collections.abc import Mapping

import numpy as np

from swinv2_moe.data.sources import Source
from swinv2_moe.errors import UserError
from swinv2_moe.train.distributed import World
from swinv2_moe.train.environment import code_versions

# Where data lie on a machine's own disk. What they hold is compared instead (`check_same_data`).
PLACES_OF_DATA = frozenset({"DATA.PATH", "DATA.TRAIN_LIST", "DATA.VAL_LIST"})
_NAMED = 3  # keys in a message


def check_same_start(values: Mapping[str, object], world: World) -> None:
    """Compare what the ranks were started with, but for `PLACES_OF_DATA`. Every rank calls this.

    Args:
        values: of configuration keys and options, by name. Their `repr` is compared.

    Raises:
        UserError: on every rank, where a rank has another value than rank 0; names the key and both
            values.
    """
    own = {key: repr(value) for key, value in values.items() if key not in PLACES_OF_DATA}
    if len(set(world.gather(_digest(own)))) == 1:
        return
    everyone = world.gather(own)
    rank, other = next((rank, found) for rank, found in enumerate(everyone) if found != everyone[0])
    raise UserError(f"the ranks were started differently: {_differences(everyone[0], other, rank)}")


def _digest(values: Mapping[str, str]) -> str:
    text = "\n".join(f"{key}: {value}" for key, value in sorted(values.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _differences(first: dict[str, str], other: dict[str, str], rank: int) -> str:
    keys = [key for key in first | other if first.get(key) != other.get(key)]
    found = [
        f"{key} is {first.get(key)} on rank 0, {other.get(key)} on rank {rank}"
        for key in keys[:_NAMED]
    ]
    if len(keys) > _NAMED:
        found.append(f"and {len(keys) - _NAMED} more")
    return "; ".join(found)


def check_same_data(
    path: str, world: World, train: Source, val: Source, class_names: list[str]
) -> None:
    """Compare the data that the ranks have found, each perhaps on its machine's own disk. Every
    rank calls this.

    Args:
        path: DATA.PATH, for messages.

    Raises:
        UserError: on every rank, where one of them has found other data than rank 0.
    """
    labels = hashlib.sha256("\n".join(class_names).encode())
    for source in (train, val):
        labels.update(np.ascontiguousarray(source.targets, dtype=np.int64))
    everyone = world.gather((len(train), len(val), labels.hexdigest()))
    for rank, found in enumerate(everyone):
        if found != everyone[0]:
            here, first = (f"{train:,} + {val:,}" for train, val, _ in (found, everyone[0]))
            raise UserError(
                f"DATA.PATH is {path!r}: rank {rank} finds {here} images there, rank 0 {first};"
                " their number and"
                " their classes must be the same"
            )


def differing_versions(world: World) -> list[str]:
    """A line for each version or commit that is not the same on all ranks. Every rank calls
    this."""
    everyone = world.gather(code_versions() if world.size > 1 else {})
    lines = []
    for name, first in everyone[0].items():
        rank = next((rank for rank, found in enumerate(everyone) if found[name] != first), None)
        if rank is not None:
            lines.append(f"rank 0 runs {name} {first}, rank {rank} {everyone[rank][name]}")
    return lines
