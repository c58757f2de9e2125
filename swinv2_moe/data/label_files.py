"""Parsers of files of labels: COCO JSON, Pascal VOC XML, YOLO text. The files may be hostile: their
size is limited, and XML that declares a document type, and so entities, is refused."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import parse_json, parse_yaml, read_bounded

FORMATS = ("COCO JSON", "Pascal VOC XML", "YOLO text")
_MAX_JSON = 1 << 33  # bytes; COCO's have 0.5 GB, the largest public ones 6 GB
_MAX_TEXT = 1 << 24
_MAX_DEPTH = 64  # of XML
_LABELLED_ONE_BY_ONE = 20  # JSON files beside pictures that make labelme's form likely
# Files of text that are no labels
_NO_LABELS = {"classes", "obj", "labels", "predefined_classes", "requirements", "license"}


class Label(NamedTuple):
    """An object: left, top, right, bottom; in pixels, or in shares of the picture's sides."""

    where: str  # the file and the line or number, for messages
    class_name: str
    box: tuple[float, float, float, float]
    is_share: bool = False
    is_crowd: int = 0  # of COCO; also objects that VOC calls difficult: not counted


class LabelFile(NamedTuple):
    """The labels of one picture.

    Attributes:
        path: the file of labels, below the folder.
        picture: name of the picture, as the file says.
        size: width and height as the file says; None: it does not.
        problems: a line for each label that cannot be meant.
    """

    path: str
    picture: str
    size: tuple[float, float] | None
    labels: list[Label]
    problems: list[str]


def read_coco(root: str, paths: Sequence[str]) -> Iterator[LabelFile]:
    """The pictures of COCO files among JSON files; other JSON is skipped.

    Raises:
        UserError: a COCO file that cannot be read; many files in labelme's form.
    """
    instances = [path for path in paths if os.path.basename(path).startswith("instances_")]
    labelme = 0
    for path in instances or paths:  # beside COCO's instances_*.json lie captions and keypoints
        try:
            content = parse_json(read_bounded(os.path.join(root, path), _MAX_JSON))
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or one_line(str(error))
            raise UserError(f"{os.path.join(root, path)}: not JSON ({problem})") from error
        tables = ("images", "annotations", "categories")
        if isinstance(content, dict) and all(isinstance(content.get(t), list) for t in tables):
            yield from _coco_pictures(os.path.join(root, path), path, content)
        labelme += isinstance(content, dict) and "shapes" in content and "imagePath" in content
    if labelme >= _LABELLED_ONE_BY_ONE or (labelme and labelme == len(paths)):
        raise UserError(
            f"--data {root}: {labelme:,} JSON files in labelme's form, which is not read; export"
            " them as COCO, Pascal VOC or YOLO"
        )


def _coco_pictures(full: str, path: str, content: dict[str, list]) -> Iterator[LabelFile]:
    names = {}
    for row in content["categories"]:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str) or "id" not in row:
            raise UserError(f"{full}: the category {short(row)} has no id and name")
        names[_key(row["id"])] = row["name"]
    files: dict[str, LabelFile] = {}
    for row in content["images"]:
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            raise UserError(f"{full}: the image {short(row)} has no file_name")
        size = (_number(row.get("width")) or 0.0, _number(row.get("height")) or 0.0)
        files[_key(row.get("id"))] = LabelFile(path, row["file_name"], size, [], [])
    without: list[str] = []
    for number, row in enumerate(content["annotations"]):
        values = row if isinstance(row, dict) else {}
        where = f"{path}: annotation {short(values.get('id', number))}"
        file = files.get(_key(values.get("image_id")))
        problems = without if file is None else file.problems
        if file is None:
            problems.append(f"{where}: there is no image {short(values.get('image_id'))}")
            continue
        name = names.get(_key(values.get("category_id")))
        box = values.get("bbox")
        numbers = [_number(value) for value in box] if isinstance(box, list) else []
        if name is None:
            problems.append(f"{where}: unknown class {short(values.get('category_id'))}")
        elif len(numbers) != 4 or None in numbers:
            problems.append(f"{where}: the box {short(box)} is not four numbers")
        else:
            x, y, width, height = (number or 0.0 for number in numbers)
            corners = (x, y, x + width, y + height)
            crowd = int(values.get("iscrowd") in (1, True))
            file.labels.append(Label(where, name, corners, is_crowd=crowd))
    yield from files.values()
    if without and files:
        first = next(iter(files.values()))
        first.problems.extend(without)


def _key(value: object) -> str:
    """An id as a key of a dictionary: it may be of any type."""
    return short(value, 200)


def _number(value: object) -> float | None:
    """A number of a file; None: it is none, or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_voc(root: str, paths: Sequence[str]) -> Iterator[LabelFile]:
    """The pictures of XML files; those that are no annotation are skipped. A file that cannot be
    read has a line among the problems."""
    for path in paths:
        try:
            tree = _parse_xml(read_bounded(os.path.join(root, path), _MAX_TEXT))
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or one_line(str(error))
            stem = os.path.splitext(os.path.basename(path))[0]
            yield LabelFile(path, stem, None, [], [f"{path}: not XML of labels ({problem})"])
            continue
        if tree.tag == "annotation":
            yield _voc_picture(path, tree)


def _parse_xml(content: bytes) -> Element:
    """The root of an XML document.

    Raises:
        ValueError: no XML, a document type (which may declare entities), or nested too deeply.
    """
    builder, depth = TreeBuilder(), 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
        builder.start(tag, attributes)

    def end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag)

    def refuse(*_: object) -> None:
        raise ValueError("declares a document type, which labels do not need")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise ValueError(str(error)) from error
    return builder.close()


def _voc_picture(path: str, tree: Element) -> LabelFile:
    stem = os.path.splitext(os.path.basename(path))[0]
    picture = (tree.findtext("filename") or "").strip() or stem
    size = tuple(_number(tree.findtext(f"size/{side}")) or 0.0 for side in ("width", "height"))
    file = LabelFile(path, picture, (size[0], size[1]), [], [])
    for number, element in enumerate(tree.findall("object"), 1):
        where = f"{path}: object {number}"
        name = (element.findtext("name") or "").strip()
        texts = [element.findtext(f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        left, top, right, bottom = map(_number, texts)
        if not name:
            file.problems.append(f"{where}: has no name of a class")
        elif left is None or top is None or right is None or bottom is None:
            file.problems.append(f"{where}: its bndbox {short(texts)} is not four numbers")
        else:
            crowd = int((element.findtext("difficult") or "").strip() == "1")
            file.labels.append(Label(where, name, (left, top, right, bottom), is_crowd=crowd))
    return file


def read_names(root: str, paths: Sequence[str]) -> tuple[list[str], set[str]]:
    """The names of YOLO's classes, from data.yaml, classes.txt, obj.names or Label Studio's
    notes.json, the nearest to the folder; and the files that hold them, which are no labels.

    Raises:
        UserError: names that cannot be read.
    """
    readers = {".yaml": _names_of_yaml, ".yml": _names_of_yaml, ".names": _names_of_lines}
    used = set()
    ordered = sorted(paths, key=lambda path: (path.count(os.sep), path))
    for path in ordered:
        stem, ending = os.path.splitext(os.path.basename(path).lower())
        reader = readers.get(ending)
        if stem == "classes" and ending == ".txt":
            reader = _names_of_lines
        elif stem == "notes" and ending == ".json":
            reader = _names_of_notes
        if reader is None:
            continue
        used.add(path)
        try:
            content = read_bounded(os.path.join(root, path), _MAX_TEXT).decode("utf-8-sig")
            names = reader(content)
        except (OSError, ValueError) as error:
            if reader is _names_of_yaml and stem not in ("data", "dataset"):
                continue  # perhaps of another program
            problem = getattr(error, "strerror", None) or one_line(str(error))
            raise UserError(f"{os.path.join(root, path)}: cannot be read ({problem})") from error
        if names:
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise UserError(f"{os.path.join(root, path)}: the class {short(twice)} comes twice")
            return names, used
    return [], used


def _names_of_yaml(text: str) -> list[str]:
    content = parse_yaml(text)
    names = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict):
        if set(names) != set(range(len(names))):
            raise ValueError(f"its names have the numbers {short(sorted(map(str, names)))}")
        names = [names[number] for number in range(len(names))]
    return [str(name) for name in names] if isinstance(names, list) else []


def _names_of_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _names_of_notes(text: str) -> list[str]:
    content = parse_json(text)
    rows = content.get("categories") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return []
    ordered = sorted(rows, key=lambda row: _number(row.get("id")) or 0.0)
    return [str(row.get("name")) for row in ordered]


def read_yolo(
    root: str, paths: Sequence[str], no_labels: set[str], stems: set[str], names: Sequence[str]
) -> Iterator[LabelFile]:
    """The pictures of text files that have a picture's name or lie in a folder `labels`.

    Args:
        no_labels: files that hold no labels.
        stems: names of the pictures, without endings.
        names: of the classes; empty: they are numbers.
    """
    for path in paths:
        stem = os.path.splitext(os.path.basename(path))[0]
        in_labels = "labels" in os.path.dirname(path).lower().split(os.sep)
        if path in no_labels or (stem not in stems and (not in_labels or stem in _NO_LABELS)):
            continue
        file = LabelFile(path, stem, None, [], [])
        try:
            text = read_bounded(os.path.join(root, path), _MAX_TEXT).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or one_line(str(error))
            file.problems.append(f"{path}: cannot be read ({problem})")
            text = ""
        for number, line in enumerate(text.splitlines(), 1):
            if line.split():
                label = _yolo_label(f"{path}: line {number}", line.split(), names)
                (file.problems if isinstance(label, str) else file.labels).append(label)  # type: ignore[arg-type]
        yield file


def _yolo_label(where: str, words: list[str], names: Sequence[str]) -> Label | str:
    """The label of a line: a class and a box (its middle and sides) or a polygon, in shares of the
    picture's sides; or what is wrong with it."""
    numbers = [_number(word) for word in words]
    if None in numbers:
        wrong = words[numbers.index(None)]
        return f"{where}: {short(wrong)} is not a number"
    index, *values = [number or 0.0 for number in numbers]
    if index != index // 1 or index < 0 or (names and index >= len(names)):
        return f"{where}: unknown class {words[0]}" + (
            f", there are {len(names)} (0 to {len(names) - 1})" if names else ""
        )
    name = names[int(index)] if names else str(int(index))
    if len(values) == 4:
        x, y, width, height = values
        if width <= 0 or height <= 0:
            return f"{where}: the box {' '.join(words[1:])} has no area"
        box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    elif len(values) >= 6 and len(values) % 2 == 0:
        xs, ys = values[::2], values[1::2]
        box = (min(xs), min(ys), max(xs), max(ys))
    else:
        return f"{where}: {len(values)} numbers after the class, not 4 (a box) or pairs (a polygon)"
    if max(map(abs, box)) > 2:
        shown = " ".join(words[1:5])
        return f"{where}: {shown} are not shares of the picture's sides, from 0 to 1"
    return Label(where, name, box, is_share=True)
