"""Classes of datasets: their names, and a match by name with those of a checkpoint.

A class map has the number in one dataset of each class of another one. MODEL.CLASS_MAP names a file
of such numbers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from timm.data import ImageNetInfo
from timm.utils.misc import natural_key

from swinv2_moe.data.images import (
    normal_name,
    numbers_in,
    repeated_name,
    subfolders,
    whole_number,
)
from swinv2_moe.errors import UserError, short, shortened
from swinv2_moe.files import parse_json, read_bounded

NO_CLASS = -1
IMAGENETS = (
    "imagenet-1k",
    "imagenet-12k",
    "imagenet-21k-goog",
    "imagenet-21k-miil",
    "imagenet-22k",
    "imagenet-22k-ms",
)
_WORDNET_ID = re.compile(r"n[0-9]{8}")
_MAX_BYTES = 1 << 26  # limit of a file with names


class ClassMatch(NamedTuple):
    """The classes of a dataset in the numbering of a checkpoint."""

    numbers: list[int]  # for each class of the data, its number in the checkpoint, or NO_CLASS
    unknown: list[str]  # names that only the data has
    missing: list[str]  # names that only the checkpoint has
    # only one side has names, the other one counts its classes (`_places`)
    by_number: bool = False
    hint: str = ""  # as of `check_counting`


def map_classes(pretrained: Sequence[str], classes: Sequence[str]) -> list[int]:
    """For each name in `classes`, its number in `pretrained`, or NO_CLASS. Names are compared as in
    `normal_name`."""
    numbers = {normal_name(name): number for number, name in enumerate(pretrained)}
    return [numbers.get(normal_name(name), NO_CLASS) for name in classes]


def match_classes(trained: Sequence[str], names: Sequence[str], where: str) -> ClassMatch:
    """Match the classes of a dataset with those of a checkpoint.

    Args:
        trained: names of the checkpoint's classes; empty if it has none, but as many classes.
        names: names of the dataset's classes.
        where: the checkpoint, for messages.

    Raises:
        UserError: no class is in both, a name comes twice in one of them, or as `check_counting`.
    """
    if not trained:
        return ClassMatch(_places(names) or _in_order(names), [], [], by_number=True)
    if list(trained) == list(names):
        return ClassMatch(list(range(len(names))), [], [])
    for classes in (trained, names):
        repeated = repeated_name(classes)
        if repeated:
            raise UserError(
                f"{where}: cannot be matched with the classes of the data, since a name comes"
                f" twice: {repeated}"
            )
    hint = check_counting(trained, names, where)
    numbers = map_classes(trained, names)
    used = set(numbers)
    if used == {NO_CLASS}:
        in_order = _by_number(trained, names)
        if in_order:
            return ClassMatch(in_order, [], [], by_number=True)
        raise UserError(
            f"{where}: the data have other classes. The {len(trained):,} of the checkpoint:"
            f" {shortened(trained)}; the {len(names):,} of the data: {shortened(names)}"
        )
    unknown = [name for name, number in zip(names, numbers, strict=True) if number == NO_CLASS]
    missing = [name for number, name in enumerate(trained) if number not in used]
    return ClassMatch(numbers, unknown, missing, hint=hint)


def known_classes(trained: Sequence[str], names: Sequence[str]) -> list[int]:
    """For each class of the data its number among those of a model, or NO_CLASS. Classes of
    ImageNet are matched by WordNet id or by one of their English names.

    A name that several classes of the model have is matched with none of them.

    Args:
        trained: names of the model's classes.
        names: names of the data's classes.
    """
    counts = Counter(map(normal_name, trained))
    once = [name if counts[normal_name(name)] == 1 else "" for name in trained]
    numbers = map_classes(once, names)
    if NO_CLASS in numbers:
        by_name = _english_names(trained)
        for i, name in enumerate(names):
            if numbers[i] == NO_CLASS:
                numbers[i] = by_name.get(_plain(name), NO_CLASS)
    return numbers


def match_all(trained: Sequence[str], names: Sequence[str], where: str) -> list[int]:
    """The number of each class of the data among the classes of a teacher.

    The classes of ImageNet are matched by WordNet id or by one of their English names.

    Args:
        trained: names of the teacher's classes.
        names: names of the data's classes.
        where: the teacher, for messages.

    Raises:
        UserError: the teacher does not know a class, or two classes are the same one for it.
    """
    numbers = known_classes(trained, names)
    unknown = [name for name, number in zip(names, numbers, strict=True) if number == NO_CLASS]
    in_order = _by_number(trained, names)
    if unknown and in_order:
        return in_order
    if unknown:
        raise UserError(
            f"{where}: does not know {len(unknown):,} of the {len(names):,} classes of the data:"
            f" {shortened(unknown)}; its {len(trained):,} classes: {shortened(trained)}"
        )
    first: dict[int, str] = {}
    for name, number in zip(names, numbers, strict=True):
        if number in first:
            raise UserError(
                f"{where}: the classes {first[number]!r} and {name!r} of the data are both its"
                f" class {trained[number]!r}"
            )
        first[number] = name
    return numbers


def imagenet_names(num_classes: int) -> list[str]:
    """The WordNet ids of the ImageNet with so many classes; numbers as text if there is none."""
    for subset in IMAGENETS:
        names = ImageNetInfo(subset).label_names()
        if len(names) == num_classes:
            return list(names)
    return [str(number) for number in range(num_classes)]


def english_name(class_name: str) -> str:
    """The first English name of a class that is named by its WordNet id; other names stay."""
    if not _WORDNET_ID.fullmatch(class_name):
        return class_name
    return _descriptions().get(class_name, class_name).split(",")[0].strip()


@cache
def _descriptions() -> dict[str, str]:
    """The English names of ImageNet's classes, divided by commas, by WordNet id."""
    known: dict[str, str] = {}
    for subset in ("imagenet-22k", "imagenet-1k"):  # the second has a class that the first lacks
        info = ImageNetInfo(subset)
        known |= zip(info.label_names(), info.label_descriptions(), strict=True)
    return known


def _english_names(trained: Sequence[str]) -> dict[str, int]:
    """English name -> class number, for classes named by WordNet ids. A name that several classes
    have is omitted."""
    known = _descriptions()
    numbers: dict[str, int] = {}
    repeated = set()
    for number, wordnet_id in enumerate(trained):
        for name in {_plain(part) for part in known.get(wordnet_id, "").split(",")} - {""}:
            if name in numbers:
                repeated.add(name)
            numbers[name] = number
    return {name: number for name, number in numbers.items() if name not in repeated}


def _plain(name: str) -> str:
    """The name in small letters, with spaces for underscores and hyphens."""
    return " ".join(normal_name(name).casefold().replace("_", " ").replace("-", " ").split())


def are_numbers(names: Sequence[str]) -> bool:
    """Whether the names only count the classes, from 0 or 1, as of a dataset without names."""
    return _places(names) is not None


def check_counting(trained: Sequence[str], names: Sequence[str], where: str) -> str:
    """Compare classes that are whole numbers on both sides. 1, 2, ... may count the same classes as
    0, 1, ..., and each would be compared with its neighbour.

    Arguments as of `match_classes`.

    Returns:
        a remark, for the end of a message, about the data's 1 to N - 1 where the checkpoint has 0
        to N - 1: 0 may be missing, or all numbers may be shifted; "" otherwise.

    Raises:
        UserError: some numbers are unknown, and more would be known if all were shifted by 1.
    """
    known, asked = _numbers(trained), _numbers(names)
    for shift, change in ((1, "lower"), (-1, "raise")):
        shifted = len({number - shift for number in asked} & known)
        if asked - known and len(asked & known) < shifted and len(asked) <= 2 * shifted:
            raise UserError(
                f"{where}: its classes are {min(known)} to {max(known)}, those of the data"
                f" {min(asked)} to {max(asked)}: both seem to count the same classes, from"
                f" different numbers; {change} the numbers of the data by 1 or, if equal numbers"
                f" are the same class, leave out {shortened(sorted(asked - known))}"
            )
    if asked and known == asked | {0} and 0 not in asked and min(asked) == 1:
        return " (if the data count the same classes from 1, lower their numbers by 1)"
    return ""


def _by_number(trained: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """For each class of the data its number in the checkpoint, if at least one side only counts its
    classes; those of a side with names are taken in their order. Otherwise None."""
    places, asked = _places(trained), _places(names)
    if len(trained) != len(names) or (places is None and asked is None):
        return None
    numbers = {place: number for number, place in enumerate(places or _in_order(trained))}
    return [numbers[place] for place in asked or _in_order(names)]


def _in_order(names: Sequence[str]) -> list[int]:
    """For each name its place among them: by its number if they differ in nothing else."""
    numbers = numbers_in(names) or list(range(len(names)))
    places = {number: place for place, number in enumerate(sorted(numbers))}
    if len(places) < len(names):  # two forms of one number
        return list(range(len(names)))
    return [places[number] for number in numbers]


def other_order(names: Sequence[str]) -> str:
    """A remark, for the end of a message, about weights without names that are matched with `names`
    in this order: where torchvision (as text) or timm (by numbers in the names, capitals as small
    letters) has another one, a program may have trained them in that. "" where all agree."""
    for other in (sorted(names), sorted(names, key=natural_key)):
        for number, (here, there) in enumerate(zip(names, other, strict=True)):
            if here != there:
                return (
                    f"; programs order such names differently: class {number} may be {there!r}, not"
                    f" {here!r}"
                )
    return ""


def _places(names: Sequence[str]) -> list[int] | None:
    """For each name its place among them, if they are consecutive whole numbers from 0 or 1, in any
    order; otherwise None."""
    numbers = list(map(whole_number, names))
    for first in (0, 1):
        if set(numbers) == set(range(first, first + len(names))):
            return [number - first for number in numbers if number is not None]
    return None


def _numbers(names: Iterable[str]) -> set[int]:
    """The names as numbers; empty unless all of them are whole numbers."""
    numbers = set(map(whole_number, names))
    return set() if None in numbers else {number for number in numbers if number is not None}


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
            if normal_name(old) != normal_name(new):
                return f"class {number} is {old!r} in the checkpoint, {new!r} in the data"
    return "; ".join(parts)


def class_names(source: str) -> list[str]:
    """The names of a dataset's classes in the order of their labels.

    Args:
        source: one of IMAGENETS (timm's lists of WordNet ids); a run or a checkpoint; shards; a
            folder of images, or its train/; a text file with one name per line.

    Raises:
        UserError: `source` is none of these, or has a duplicate name.
    """
    if source in IMAGENETS:
        return ImageNetInfo(source).label_names()
    path = Path(source)
    try:
        names = _names_in(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source}: no class names can be read ({error}); known lists: {', '.join(IMAGENETS)}"
        ) from error
    if not names:
        raise UserError(f"{source}: no class names in it")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        times = f"{count} times"
        if count == 2:
            times = "twice"
        raise UserError(f"{source}: the class {short(name)} comes {times}")
    return names


def _names_in(path: Path) -> list[str]:
    latest = path / "checkpoints" / "latest"
    if latest.is_dir():
        path = latest
    for file in (path / "meta.json", path / "index.json"):  # a checkpoint or shards
        if file.is_file():
            return _names_in_json(read_bounded(file, _MAX_BYTES))
    train = path / "train"
    if train.is_dir() and (path / "val").is_dir():
        path = train
    if path.is_dir():
        return subfolders(str(path))
    lines = read_bounded(path, _MAX_BYTES).decode().splitlines()
    return [line.strip() for line in lines if line.strip()]


def _names_in_json(text: bytes) -> list[str]:
    content = parse_json(text)
    names = None
    if isinstance(content, dict):
        names = content.get("class_names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class_names is {short(names)}, it must be a list of strings")
    return names
