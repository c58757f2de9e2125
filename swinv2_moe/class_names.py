"""Classes of a checkpoint and of a dataset, matched by name."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from swinv2_moe.errors import UserError, shortened

NO_CLASS = -1


class ClassMatch(NamedTuple):
    """The classes of a dataset in the numbering of a checkpoint."""

    numbers: list[int]  # for each class of the data, its number in the checkpoint, or NO_CLASS
    unknown: list[str]  # names that only the data has
    missing: list[str]  # names that only the checkpoint has
    # the names of one side are only numbers ("0", "1", ...), so the classes are matched by number
    by_number: bool = False


def map_classes(pretrained: Sequence[str], classes: Sequence[str]) -> list[int]:
    """For each name in `classes`, its number in `pretrained`, or NO_CLASS. Two Unicode forms of a
    name are the same name."""
    numbers = {_normal(name): number for number, name in enumerate(pretrained)}
    return [numbers.get(_normal(name), NO_CLASS) for name in classes]


def match_classes(trained: Sequence[str], names: Sequence[str], where: str) -> ClassMatch:
    """Match the classes of a dataset with those of a checkpoint.

    Args:
        trained: names of the checkpoint's classes.
        names: names of the dataset's classes.
        where: the checkpoint, for messages.

    Raises:
        UserError: no class is in both, or a name comes twice in one of them.
    """
    if list(trained) == list(names):
        return ClassMatch(list(range(len(names))), [], [])
    for classes in (trained, names):
        repeated = _repeated(classes)
        if repeated:
            raise UserError(
                f"{where}: cannot be matched with the classes of the data, since a name comes"
                f" twice: {repeated}"
            )
    numbers = map_classes(trained, names)
    used = set(numbers)
    if used == {NO_CLASS}:
        if len(trained) == len(names) and (are_numbers(trained) or are_numbers(names)):
            return ClassMatch(list(range(len(names))), [], [], by_number=True)
        raise UserError(
            f"{where}: has none of the classes of the data. The {len(trained):,} of the checkpoint:"
            f" {shortened(trained)}; the {len(names):,} of the data: {shortened(names)}"
        )
    unknown = [name for name, number in zip(names, numbers, strict=True) if number == NO_CLASS]
    missing = [name for number, name in enumerate(trained) if number not in used]
    return ClassMatch(numbers, unknown, missing)


def are_numbers(names: Sequence[str]) -> bool:
    """Whether the names only count the classes, as of a dataset without names."""
    return list(names) == [str(number) for number in range(len(names))]


def difference(trained: Sequence[str], names: Sequence[str], where: str) -> str:
    """How the classes of a dataset differ from those of a checkpoint, in one line; "" if they are
    the same in the same order. Arguments and exceptions as of `match_classes`."""
    match = match_classes(trained, names, where)
    parts = []
    for side, classes in (("checkpoint", match.missing), ("data", match.unknown)):
        if classes:
            parts.append(f"only the {side} has {shortened(classes)}")
    if not parts:
        for number, (old, new) in enumerate(zip(trained, names, strict=True)):
            if old != new:
                return f"class {number} is {old!r} in the checkpoint, {new!r} in the data"
    return "; ".join(parts)


def _repeated(names: Sequence[str]) -> str:
    """The first name that comes twice; "" if there is none."""
    seen = set()
    for name in names:
        if _normal(name) in seen:
            return repr(name)
        seen.add(_normal(name))
    return ""


def _normal(name: str) -> str:
    """The name in Unicode's composed form. macOS writes decomposed names into archives."""
    return unicodedata.normalize("NFC", name)
