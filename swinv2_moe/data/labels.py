"""A folder of labelled photographs: COCO JSON, Pascal VOC XML or YOLO text, also as Label Studio
and Roboflow export them.

`read_folder` turns each of them into COCO's form, in pixels of the upright picture. A label that
cannot be meant is left out, with a line that names it.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from swinv2_moe.data.copies import first_copies
from swinv2_moe.data.images import find_images, left_out_line, normal_name, upright_size
from swinv2_moe.data.label_files import (
    FORMATS,
    Label,
    LabelFile,
    read_coco,
    read_names,
    read_voc,
    read_yolo,
)
from swinv2_moe.data.sources import ImageFiles
from swinv2_moe.data.sources.folder import groups_of_copies
from swinv2_moe.errors import UserError, one_line, short, shortened
from swinv2_moe.files import read_bounded

SPLITS = ("train", "val", "test")
HELD_OUT = 0.2  # share of the pictures that validate where the folder has no split
# Share of a picture's side by which a box may exceed it: people draw over the edge, and exports
# round. Such a box ends at the edge.
_OVERHANG = 0.02
_MAX_LEFT_OUT = 0.1  # share of the labels
_MAX_LIST = 1 << 26  # bytes of a list of pictures
_SHOWN = 10  # lines about labels that are left out
# Names of folders, of lists and in the names of JSON files
_SPLIT_OF = {"train": "train", "training": "train", "val": "val", "valid": "val"}
_SPLIT_OF |= {"trainval": "train", "validation": "val", "test": "test", "testing": "test"}
_AUGMENTED = re.compile(rb"\.rf\.[0-9a-zA-Z]+\.[a-zA-Z]+$")  # Roboflow's copies of one picture


@dataclass
class Labelled:
    """What a folder holds.

    Attributes:
        format: "COCO JSON", "Pascal VOC XML" or "YOLO text".
        splits: content of a COCO annotation file by name, of "train", "val" and perhaps "test".
            Names of pictures are relative to `root`. Classes have the ids 1, 2, ...
        left_out: a line for each label that cannot be meant.
        notes: other remarks, for the terminal.
    """

    root: Path
    format: str
    class_names: list[str]
    splits: dict[str, dict[str, list[dict]]]
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What was found, for the terminal."""
        parts = []
        for name, content in self.splits.items():
            count = len(content["images"])
            parts.append(f"{name} {count:,} ({len(content['annotations']):,} objects)")
        names = shortened(self.class_names)
        head = f"{self.root}: {self.format}, classes ({len(self.class_names):,}): {names}"
        lines = [head, f"pictures: {', '.join(parts)}", *self.notes]
        lines += [f"left out: {line}" for line in self.left_out[:_SHOWN]]
        if len(self.left_out) > _SHOWN:
            more = len(self.left_out) - _SHOWN
            lines.append(f"left out: {more:,} more labels, listed in data/left_out.txt of the run")
        return lines


class Pictures:
    """The pictures below a folder, and which file a label means."""

    def __init__(self, root: str, paths: Sequence[str]) -> None:
        self.root = root
        self.paths = [os.path.relpath(path, root) for path in paths]
        self._known = set(self.paths)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for path in self.paths:
            name = os.path.basename(path)
            self._by_name[normal_name(name)].append(path)
            self._by_stem[normal_name(os.path.splitext(name)[0])].append(path)

    def find(self, name: str, label_file: str) -> str | None:
        """The picture that `name` in a label file means, or that has the label file's name: beside
        it, then in the folder whose path is nearest. None: there is none."""
        name = name.replace("\\", "/")
        base = os.path.basename(name)
        folder = os.path.dirname(label_file)
        for inside in (os.path.join(folder, name), name):
            if os.path.normpath(inside) in self._known:
                return os.path.normpath(inside)
        found = self._by_name.get(normal_name(base), [])
        texts = [base, os.path.splitext(base)[0]]  # also a name without its ending
        if not label_file.endswith(".json"):  # of one picture
            texts.append(os.path.splitext(os.path.basename(label_file))[0])
        for text in texts:
            found = found or self._by_stem.get(normal_name(text), [])
        if not found:
            return None
        wanted = set(PurePath(label_file).parts) | set(PurePath(name).parts)
        split = split_in(label_file) if label_file else None
        return max(found, key=lambda path: _nearness(path, wanted, split))


def _nearness(path: str, wanted: set[str], split: str | None) -> tuple[bool, int]:
    return split is not None and split_in(path) == split, len(set(PurePath(path).parts) & wanted)


def split_in(path: str) -> str | None:
    """The split that a path is of by a folder's name or by a word of the file's name; None."""
    *folders, name = PurePath(path).parts
    for part in reversed(folders):
        word = re.sub(r"[^a-z]", "", part.lower())  # train2017, train_set
        if word.removesuffix("set") in _SPLIT_OF:
            return _SPLIT_OF[word.removesuffix("set")]
    if name.endswith(".json"):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in _SPLIT_OF:
                return _SPLIT_OF[word]
    return None


def read_folder(folder: str | os.PathLike) -> Labelled:
    """Read the pictures and labels below a folder.

    Raises:
        UserError: no such folder; no pictures, no labels or no objects in it; more than a tenth of
            the labels cannot be meant; nothing to train on, or nothing to validate.
    """
    root = os.fspath(folder)
    if not os.path.isdir(root):
        problem = "a file, it must be a folder" if os.path.exists(root) else "no such folder"
        raise UserError(f"--data {root}: {problem}")
    found = find_images(root)
    if not found.decoded:
        also = f"; {left_out_line(found.left_out)}" if found.left_out else ""
        raise UserError(f"--data {root}: holds no pictures{also}")
    pictures = Pictures(root, found.decoded)
    others = [os.path.relpath(path, root) for path in found.others]
    kind, files, class_names = _read_labels(root, others, pictures)
    collected = _Collected(pictures, class_names)
    collected.add(files)
    notes = [f"warning: {left_out_line(found.left_out)}"] if found.left_out else []
    return _arranged(Path(root), kind, collected, _listed_splits(root, others, pictures), notes)


def _read_labels(
    root: str, others: Sequence[str], pictures: Pictures
) -> tuple[str, list[LabelFile], list[str]]:
    """The format with the most labelled pictures, its files, and the names of its classes."""
    by_ending: dict[str, list[str]] = defaultdict(list)
    for path in others:
        by_ending[os.path.splitext(path)[1].lower()].append(path)
    coco: list[LabelFile] = []
    problem = None  # of a JSON file, which may be no labels where there are others
    try:
        coco += read_coco(root, by_ending[".json"])
    except UserError as error:
        problem = error
    voc = list(read_voc(root, by_ending[".xml"]))
    names, texts = read_names(root, others)
    stems = {os.path.splitext(os.path.basename(path))[0] for path in pictures.paths}
    yolo = list(read_yolo(root, by_ending[".txt"], texts, stems, names))
    kinds = dict(zip(FORMATS, (coco, voc, yolo), strict=True))
    kind = max(kinds, key=lambda one: len(kinds[one]))
    if problem and (kind == FORMATS[0] or not kinds[kind]):
        raise problem
    if not kinds[kind]:
        raise UserError(
            f"--data {root}: has {len(pictures.paths):,} pictures and no labels: a COCO JSON,"
            " Pascal VOC's XML (a file for each picture) or YOLO's text (labels/ beside images/,"
            " with data.yaml) is needed"
        )
    return kind, kinds[kind], names if kind == "YOLO text" else []


class _Collected:
    """Labels by picture, in pixels, as far as they can be meant."""

    def __init__(self, pictures: Pictures, class_names: Sequence[str]) -> None:
        self.pictures = pictures
        self.class_names = list(class_names)
        self.sizes: dict[str, tuple[int, int]] = {}
        self.rows: dict[str, list[tuple[str, list[float], int]]] = {}  # class, box, iscrowd
        self.split: dict[str, str] = {}
        self.labelled_by: dict[str, str] = {}
        self.left_out: list[str] = []
        self.count = 0  # labels

    def add(self, files: Sequence[LabelFile]) -> None:
        places = [self.pictures.find(file.picture, file.path) for file in files]
        wanted = sorted({place for place in places if place is not None})
        with ThreadPoolExecutor(16) as pool:  # a network's disk takes milliseconds to answer
            sizes = list(pool.map(self._size, wanted))
        known = dict(zip(wanted, sizes, strict=True))
        for file, place in zip(files, places, strict=True):
            self.count += len(file.labels) + len(file.problems)
            self.left_out += file.problems
            other = self.labelled_by.setdefault(place, file.path) if place else file.path
            if other != file.path:
                where = f"{file.path}: {place} is also labelled by {other}"
                self.left_out.append(where + _for_labels(len(file.labels)))
                continue
            if place is None:
                where = f"{file.path}: no picture {short(file.picture)}"
                self.left_out.append(where + _for_labels(len(file.labels)))
                continue
            size = known[place]
            if isinstance(size, str):
                self.left_out.append(f"{place}: {size}{_for_labels(len(file.labels))}")
                continue
            problem = _size_problem(file.size, size)
            if problem:
                self.left_out.append(f"{file.path}: {problem}{_for_labels(len(file.labels))}")
                continue
            self.sizes[place] = size
            rows = self.rows.setdefault(place, [])
            split = split_in(place) or split_in(file.path)
            if split:
                self.split[place] = split
            for label in file.labels:
                box = _in_pixels(label, *size)
                wrong = _box_problem(box, *size)
                if wrong:
                    self.left_out.append(f"{label.where}: {wrong}")
                else:
                    rows.append((label.class_name, _clipped(box, *size), label.is_crowd))

    def _size(self, place: str) -> tuple[int, int] | str:
        try:
            return upright_size(os.path.join(self.pictures.root, place))
        except ValueError as error:
            return f"cannot be read as a picture ({one_line(str(error))})"


def _for_labels(count: int) -> str:
    return f", for {count:,} labels" if count else ""


def _size_problem(said: tuple[float, float] | None, size: tuple[int, int]) -> str:
    """What contradicts the size in a label file; "": nothing. Some programs write 0."""
    if said is None or min(said) <= 0 or said == size:
        return ""
    turned = ""
    if said == size[::-1]:
        turned = ", perhaps by its EXIF orientation: turn the file itself and label it again"
    return (
        f"the picture is {size[0]} x {size[1]} px upright, the label says {said[0]:g} x"
        f" {said[1]:g}{turned}"
    )


def _in_pixels(label: Label, width: int, height: int) -> list[float]:
    """Left, top, right, bottom."""
    x = (width, 1)[not label.is_share]
    y = (height, 1)[not label.is_share]
    left, top, right, bottom = label.box
    return [left * x, top * y, right * x, bottom * y]


def _box_problem(box: Sequence[float], width: int, height: int) -> str:
    left, top, right, bottom = box
    shown = f"the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g})"
    if not np.isfinite(box).all():
        return f"{shown} is not finite"
    if right <= left or bottom <= top:
        return f"{shown} has no area"
    over = (-left / width, -top / height, right / width - 1, bottom / height - 1)
    clipped = _clipped(box, width, height)
    if max(over) > _OVERHANG:
        return f"{shown} reaches outside of its picture of {width} x {height} px"
    if min(clipped[2:]) <= 0:
        return f"{shown} has no area in its picture of {width} x {height} px"
    return ""


def _clipped(box: Sequence[float], width: int, height: int) -> list[float]:
    """COCO's form: left, top, width, height."""
    left, right = np.clip(box[::2], 0, width).tolist()
    top, bottom = np.clip(box[1::2], 0, height).tolist()
    return [left, top, right - left, bottom - top]


def _listed_splits(root: str, others: Sequence[str], pictures: Pictures) -> dict[str, str]:
    """Splits by picture from lists, such as VOC's ImageSets/Main/train.txt or YOLO's train.txt."""
    found: dict[str, str] = {}
    # trainval first: train and val say more
    for path in sorted(others, key=lambda path: "trainval" not in path.lower()):
        stem, ending = os.path.splitext(os.path.basename(path))
        if ending != ".txt" or stem.lower() not in _SPLIT_OF:
            continue
        try:
            text = read_bounded(os.path.join(root, path), _MAX_LIST).decode(errors="replace")
        except OSError:
            continue
        words = [line.split() for line in text.splitlines()]
        places = [pictures.find(line[0], "") for line in words if line]
        if places and None not in places:
            found |= {place: _SPLIT_OF[stem.lower()] for place in places if place}
    return found


def _arranged(
    root: Path, kind: str, found: _Collected, listed: dict[str, str], notes: list[str]
) -> Labelled:
    """The splits, in COCO's form."""
    objects = sum(map(len, found.rows.values()))
    wrong = len(found.left_out)
    if wrong > max(1, _MAX_LEFT_OUT * found.count):
        raise UserError(
            f"--data {root}: {wrong:,} of {found.count:,} labels or their pictures"
            f" cannot be used, the first: {found.left_out[0]}; at most a tenth may be wrong"
        )
    if not objects:
        why = f"; {found.left_out[0]}" if found.left_out else ""
        raise UserError(f"--data {root}: no objects: {len(found.rows):,} labelled pictures{why}")
    unlabelled = len(found.pictures.paths) - len(found.rows)
    if unlabelled:
        hint = " (an empty file says that a picture has no objects)" if kind == "YOLO text" else ""
        notes.append(f"pictures without labels are left out: {unlabelled:,}{hint}")
    places, note = _splits(root, found, listed)
    notes += note
    names = _classes(found, places["train"], notes)
    ids = {name: number for number, name in enumerate(names, 1)}
    splits = {name: _coco(paths, found, ids) for name, paths in places.items()}
    if not splits["val"]["annotations"]:
        raise UserError(f"--data {root}: the pictures to validate have no objects")
    return Labelled(root, kind, names, splits, found.left_out, notes)


def _classes(found: _Collected, train: Sequence[str], notes: list[str]) -> list[str]:
    """The classes with objects to train on; in the order of their numbers, or sorted."""
    present = {row[0] for path in train for row in found.rows[path]}
    named = found.class_names or sorted({row[0] for rows in found.rows.values() for row in rows})
    without = [name for name in named if name not in present]
    if without:
        notes.append(f"classes without objects to train on are left out: {shortened(without)}")
    return [name for name in named if name in present]


def _splits(
    root: Path, found: _Collected, listed: dict[str, str]
) -> tuple[dict[str, list[str]], list[str]]:
    """The pictures of each split, and remarks."""
    of = {path: listed.get(path) or found.split.get(path) for path in sorted(found.rows)}
    places = {name: [path for path in of if of[path] == name] for name in SPLITS}
    notes = []
    outside = [path for path in of if of[path] is None]
    if outside and any(places.values()):
        notes.append(f"pictures in no split are left out: {len(outside):,}, as {outside[0]}")
    if not any(places.values()):
        places["train"] = outside
    if not places["train"]:
        raise UserError(f"--data {root}: nothing to train on: all pictures are in val or test")
    if not places["val"] and places["test"]:
        places["val"], places["test"] = places["test"], []
        notes.append("there is no val: the pictures of test are used for validation")
    if not places["val"]:
        places["train"], places["val"] = hold_out(root, places["train"], found.rows)
        notes.append(
            f"there is no val: {len(places['val']):,} pictures are held out, equal ones together"
        )
    else:
        notes += _copies_note(root, places["train"], places["val"] + places["test"])
    if not places["test"]:
        del places["test"]
    return places, notes


def hold_out(
    root: Path, paths: Sequence[str], rows: dict[str, list]
) -> tuple[list[str], list[str]]:
    """Split off a fifth of the pictures of each class (a picture counts for its rarest one), by the
    digests of their names. Equal pictures, and Roboflow's copies of one, stay on one side.

    Raises:
        UserError: there are fewer than two different pictures with objects.
    """
    files = ImageFiles(str(root), np.array([os.fsencode(path) for path in paths]), _zeros(paths))
    first = first_copies(files)
    seen: dict[bytes, int] = {}
    for row, path in enumerate(files.paths.tolist()):
        source = _AUGMENTED.sub(b"", path)
        if source != path:
            first[row] = seen.setdefault(source, int(first[row]))
    groups = groups_of_copies(files.paths, first)
    counts = Counter(row[0] for path in paths for row in rows[path])
    rarest = {
        path: min((row[0] for row in rows[path]), key=lambda name: (counts[name], name), default="")
        for path in paths
    }
    wanted = {name: HELD_OUT * count for name, count in Counter(rarest.values()).items()}
    held: set[int] = set()
    for group in groups:
        name = rarest[paths[group[0]]]
        if len(group) <= wanted[name] + 0.5:
            wanted[name] -= len(group)
            held |= set(group)
    if not any(rows[paths[row]] for row in held):  # few pictures
        with_objects = [group for group in groups if any(rows[paths[row]] for row in group)]
        if len(with_objects) < 2:
            raise UserError(
                f"--data {root}: at least two different pictures with objects are needed, one to"
                f" train and one to validate; it has {len(with_objects)}"
            )
        held |= set(with_objects[0])
    train = [path for row, path in enumerate(paths) if row not in held]
    return train, [path for row, path in enumerate(paths) if row in held]


def _zeros(paths: Sequence[str]) -> np.ndarray:
    return np.zeros(len(paths), np.int64)


def _copies_note(root: Path, train: Sequence[str], others: Sequence[str]) -> list[str]:
    sides = [
        ImageFiles(str(root), np.array([os.fsencode(path) for path in side]), _zeros(side))
        for side in (train, others)
    ]
    first = first_copies(*sides)
    across = [row for row in range(len(train), len(first)) if first[row] < len(train)]
    if not across:
        return []
    row = across[0]
    return [
        f"warning: {len(across):,} of the {len(others):,} pictures to validate are also in"
        f" training (equal bytes); the first: {others[row - len(train)]} = {train[first[row]]}"
    ]


def _coco(
    paths: Sequence[str], found: _Collected, ids: dict[str, int]
) -> dict[str, list[dict[str, Any]]]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, path in enumerate(paths, 1):
        width, height = found.sizes[path]
        images.append({"id": number, "file_name": path, "width": width, "height": height})
        for name, box, is_crowd in found.rows[path]:
            if name in ids:
                row: dict[str, Any] = {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": ids[name],
                }
                row |= {"bbox": box, "area": box[2] * box[3], "iscrowd": is_crowd}
                annotations.append(row)
    categories = [{"id": number, "name": name} for name, number in ids.items()]
    return {"images": images, "annotations": annotations, "categories": categories}
