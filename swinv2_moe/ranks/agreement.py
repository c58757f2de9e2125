"""Checks that all ranks of a run have the same configuration, data and code."""

import hashlib
from collections.abc import Mapping
from itertools import zip_longest

import numpy as np

from swinv2_moe.data.sources import Source
from swinv2_moe.errors import UserError, short
from swinv2_moe.ranks.environment import code_versions
from swinv2_moe.ranks.world import World

# Paths may differ between machines. `check_same_data` compares the data at these paths instead.
DATA_PATHS = frozenset({"DATA.PATH", "DATA.TRAIN_LIST", "DATA.VAL_LIST"})
_MAX_NAMED_KEYS = 3  # in a message
_PART = 4096  # images


def check_same_start(values: Mapping[str, object], world: World) -> None:
    """Check that all ranks were started with the same values, except for `DATA_PATHS`. Collective.

    Args:
        values: configuration keys and options by name. Their `repr` is compared.

    Raises:
        UserError: on every rank, if a rank has another value than rank 0. The message names the key
            and both values.
    """
    texts = {key: repr(value) for key, value in values.items() if key not in DATA_PATHS}
    digests = world.gather(_digest(texts))
    if len(set(digests)) == 1:
        return
    all_texts = world.gather(texts)
    first = all_texts[0]
    for rank, other in enumerate(all_texts):
        if other != first:
            differences = _differences(first, other, rank)
            raise UserError(f"the ranks were started differently: {differences}")


def _digest(values: Mapping[str, str]) -> str:
    text = "\n".join(f"{key}: {value}" for key, value in sorted(values.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _differences(first: dict[str, str], other: dict[str, str], rank: int) -> str:
    keys = [key for key in first | other if first.get(key) != other.get(key)]
    clauses = []
    for key in keys[:_MAX_NAMED_KEYS]:
        clauses.append(f"{key} is {first.get(key)} on rank 0, {other.get(key)} on rank {rank}")
    num_unnamed = len(keys) - len(clauses)
    if num_unnamed > 0:
        clauses.append(f"and {num_unnamed} more")
    return "; ".join(clauses)


def check_same_data(
    path: str, world: World, train: Source, val: Source, class_names: list[str]
) -> None:
    """Check that all ranks read the same data, perhaps from different disks. Collective.

    Args:
        path: DATA.PATH, for messages.

    Raises:
        UserError: on every rank, if a rank has other images or classes than rank 0.
    """
    digest = hashlib.sha256("\n".join(class_names).encode())
    for source in (train, val):
        digest.update(np.ascontiguousarray(source.targets, dtype=np.int64).data)
    num_images = f"{len(train):,} + {len(val):,}"
    summaries = world.gather((num_images, digest.hexdigest()))
    if len(set(summaries)) == 1:
        return
    for rank, summary in enumerate(summaries):
        if summary[0] != summaries[0][0]:
            raise UserError(
                f"DATA.PATH is {path!r}: rank {rank} finds {summary[0]} images there, rank 0"
                f" {summaries[0][0]}; their number and their classes must be the same"
            )
    difference = _difference_of_classes(world, class_names)
    for split, source in (("training", train), ("validation", val)):
        if not difference:
            difference = _difference_of_targets(world, split, source, class_names)
    raise UserError(f"DATA.PATH is {path!r}: the ranks find different data there: {difference}")


def _difference_of_classes(world: World, class_names: list[str]) -> str:
    """The first class whose name differs between ranks; "" if none does. Collective."""
    names_of_ranks = world.gather(class_names)
    first = names_of_ranks[0]
    for rank, names in enumerate(names_of_ranks):
        for i, (one, other) in enumerate(zip_longest(first, names)):
            if one != other:
                return f"class {i} is {short(one)} on rank 0, {short(other)} on rank {rank}"
    return ""


def _difference_of_targets(world: World, split: str, source: Source, class_names: list[str]) -> str:
    """The first image whose class differs between ranks; "" if there is none. Collective.

    The ranks exchange checksums of parts, then the first part that differs.
    """
    targets = np.ascontiguousarray(source.targets, dtype=np.int64)
    starts = range(0, len(targets), _PART)
    digests = [hashlib.sha256(targets[start : start + _PART].data).digest() for start in starts]
    digests_of_ranks = world.gather(digests)
    parts = [len(set(part)) > 1 for part in zip(*digests_of_ranks, strict=True)]
    if not any(parts):
        return ""
    start = starts[parts.index(True)]
    labels_of_ranks = world.gather(targets[start : start + _PART].tolist())
    first = labels_of_ranks[0]
    rank = next(rank for rank, labels in enumerate(labels_of_ranks) if labels != first)
    pairs = zip(first, labels_of_ranks[rank], strict=True)
    i = next(i for i, (one, other) in enumerate(pairs) if one != other)
    names = world.gather(source.name(start + i))
    classes = [class_names[labels[i]] for labels in (first, labels_of_ranks[rank])]
    return (
        f"{split} image {start + i} is of class {short(classes[0])} on rank 0"
        f" ({short(names[0])}), {short(classes[1])} on rank {rank} ({short(names[rank])})"
    )


def differing_versions(world: World) -> list[str]:
    """A line for each version or commit that differs between ranks. Collective."""
    if world.size == 1:
        return []
    versions_of_ranks = world.gather(code_versions())
    lines = []
    for name, first in versions_of_ranks[0].items():
        for rank, versions in enumerate(versions_of_ranks):
            if versions[name] != first:
                lines.append(f"rank 0 runs {name} {first}, rank {rank} {versions[name]}")
                break
    return lines
