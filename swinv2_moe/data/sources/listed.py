"""list: the images that two list files name, one `path label` or `path,label` per line, or Swin's
JSON map, `[["folder/image.JPEG", 0], ...]`.

The JSON form is that of ILSVRC2011fall_whole_map_train.txt, which Swin-Transformer's
data/imagenet22k_dataset.py reads. The first element of an entry is the path, the second is the
label. Further elements are ignored.

N images
"""

import codecs
import io
import json
import os
import re
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import BinaryIO, TextIO

import numpy as np

from moe_core.files import open_regular
from swinv2_moe.data.section import DataConfig, register_dataset
from swinv2_moe.data.sources.base import ImageFiles, Sources, copies_of_files
from swinv2_moe.errors import UserError, short, shortened

_JSON = re.compile(r"""\s*\[\s*([\[{]\s*"|\]\s*$)""")
_SPACE = re.compile(r"\s*")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
# A path, perhaps in quotation marks, and a label
_CSV = [re.compile(f'(?:"((?:[^"]|"")+)"\\s*|([^"{sign}]+)){sign}([^{sign}]+)') for sign in ",;"]
_HEADINGS = {"label", "labels", "class", "class_id", "target", "category", "category_id"}
# Byte order marks. That of UTF-32 begins with that of UTF-16.
_ENCODINGS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_ENCODINGS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_MAX_LABEL = 2**31 - 1
_BLOCK = 100_000  # entries
_MAX_LINE = 8192  # limit of a line, in characters: systems allow paths of up to 4096 bytes
_MAX_JSON_BYTES = 1 << 32  # ImageNet-22K's has 0.8 GB
# In an array of paths, each path takes as much memory as the longest path. The array may take
# _SMALL bytes, or _MAX_PADDING times the bytes of all paths.
_MAX_PADDING = 64
_SMALL = 1 << 28

# (place, path, label) of an image. The place is "file:line" or similar, for messages. Labels from a
# text file are text.
Entry = tuple[str, str, object]


@register_dataset("list", needs_path=False, needs_lists=True)
def listed(config: DataConfig) -> Sources:
    """Load the images of the lists. Classes are numbers: MODEL.NUM_CLASSES of them or, if it is 0,
    those in the training list."""
    num_classes = config.num_classes
    train = _image_files("DATA.TRAIN_LIST", config.train_list, num_classes, config)
    if not num_classes:
        num_classes = _count_classes(config.train_list, train.targets)
    val = _image_files("DATA.VAL_LIST", config.val_list, num_classes, config)
    names = [str(label) for label in range(num_classes)]
    return Sources(train, val, names, tuple(copies_of_files(train, val)))


def _image_files(key: str, file: str, num_classes: int, config: DataConfig) -> ImageFiles:
    root, paths, targets = read_list(key, file, config.path, num_classes)
    return ImageFiles(root, paths, targets)


def _count_classes(file: str, targets: np.ndarray) -> int:
    """The number of classes of a training list.

    Raises:
        UserError: a label below the highest one has no image.
    """
    labels = np.unique(targets)
    num_classes = int(labels[-1]) + 1
    if len(labels) == num_classes:
        return num_classes
    # Labels may be huge. The first few candidates suffice, since the message names three at most.
    candidates = np.arange(min(num_classes, len(labels) + 3))
    missing = np.setdiff1d(candidates, labels).tolist()
    raise UserError(
        f"DATA.TRAIN_LIST is {file!r}: of the labels 0 to {num_classes - 1},"
        f" {num_classes - len(labels)} have no image ({shortened(missing)}); close the gaps, or set"
        " MODEL.NUM_CLASSES"
    )


def read_list(
    key: str, file: str, root: str, num_classes: int
) -> tuple[str, np.ndarray, np.ndarray]:
    """Read a list file.

    Args:
        key: the configuration key that names `file`, for messages.
        file: path of the list file; also searched in `root`.
        root: DATA.PATH; empty: the list file's folder.
        num_classes: labels must be smaller; 0: any label that is not negative.

    Returns:
        The directory that paths are relative to; the paths, bytes [N]; the labels, int64 [N].

    Raises:
        UserError: the file does not exist or has no lines, a line or label cannot be used, or there
            are no images at the paths.
    """
    file = _find(key, file, root)
    images = _images(key, file, num_classes)
    # ImageNet-22K has 14 million lines; lists of Python objects would take gigabytes.
    blocks = []
    labels = array("q")
    longest_path = total_bytes = 0
    while block := list(islice(images, _BLOCK)):
        paths = _encoded(file, [path for path, _ in block])
        labels.extend(label for _, label in block)
        lengths = [len(path) for path in paths]
        longest_path = max(longest_path, max(lengths))
        total_bytes += sum(lengths)
        if longest_path * len(labels) > max(_SMALL, _MAX_PADDING * total_bytes):
            raise UserError(
                f"{file}: has a path of {longest_path:,} bytes, among many that are far shorter"
            )
        blocks.append(np.array(paths))
    if not blocks:
        raise UserError(f"{key} is {file!r}: the list is empty")
    root = root or os.path.dirname(file)
    all_paths = np.concatenate(blocks)
    _check_some_exist(key, file, root, all_paths)
    return root, all_paths, np.array(labels, np.int64)


def _find(key: str, file: str, root: str) -> str:
    for path in (file, os.path.join(root, file)):
        if os.path.exists(path) and not os.path.isdir(path):
            return path
    if os.path.isdir(file):
        raise UserError(f"{key} is {file!r}: a directory, it must be a file")
    also = ""
    if root and not os.path.isabs(file):
        also = f", nor in DATA.PATH ({root!r})"
    raise UserError(f"{key} is {file!r}: no such file{also}")


def _images(key: str, file: str, num_classes: int) -> Iterator[tuple[str, int]]:
    """Path and label of each image."""
    for place, path, label in _entries(key, file):
        yield path, _label(place, label, num_classes)


def _entries(key: str, file: str) -> Iterator[Entry]:
    try:
        with open_regular(file) as content:
            size = os.fstat(content.fileno()).st_size
            lines = _decoded(file, content)
            is_json = _JSON.match(lines.read(1000))
            lines.seek(0)
            if not is_json:
                yield from _text_entries(file, lines)
            elif size > _MAX_JSON_BYTES:
                raise UserError(
                    f"{file}: has {size:,} bytes, a JSON list may have {_MAX_JSON_BYTES:,}"
                )
            else:
                yield from _json_entries(file, lines.read())
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not valid JSON ({error.msg})") from error
    except RecursionError as error:
        raise UserError(f"{file}: not valid JSON (nested too deeply)") from error
    except UnicodeDecodeError as error:  # of UTF-16 and UTF-32
        raise UserError(f"{file}: not valid {error.encoding}; save it as UTF-8") from error
    except ValueError as error:  # for example an integer of thousands of digits
        raise UserError(f"{file}: not valid JSON ({error})") from error
    except OSError as error:
        raise UserError(f"{key} is {file!r}: cannot be read ({error.strerror})") from error


def _decoded(file: str, content: BinaryIO) -> TextIO:
    """The text of a list, in UTF-8 or what its byte order mark says."""
    start = content.read(1000)
    content.seek(0)
    for mark, encoding in _ENCODINGS.items():
        if start.startswith(mark):
            return io.TextIOWrapper(content, encoding)
    if start.count(0) > len(start) // 4:
        raise UserError(f"{file}: looks like UTF-16 without its mark; save it as UTF-8")
    # Paths may have any encoding.
    return io.TextIOWrapper(content, "utf-8-sig", "surrogateescape")


def _text_entries(file: str, lines: TextIO) -> Iterator[Entry]:
    bounded_lines = iter(partial(lines.readline, _MAX_LINE), "")
    for number, line in enumerate(bounded_lines, start=1):
        if len(line) == _MAX_LINE:
            raise UserError(
                f"{file}:{number}: a line of more than {_MAX_LINE:,} characters, it begins"
                f" {line[:60]!r}"
            )
        fields = line.strip().rsplit(maxsplit=1)
        is_plain = len(fields) == 2 and _INTEGER.fullmatch(fields[1])
        if fields and not (is_plain and fields[0][-1] not in ",;"):
            columns = _columns(line.strip())
            if columns or is_plain:
                fields = columns or [line]
        if number == 1 and len(fields) == 2 and fields[1].lower() in _HEADINGS:
            continue
        if len(fields) == 2:
            yield f"{file}:{number}", fields[0], fields[1]
        elif fields:
            raise UserError(
                f"{file}:{number}: expected a path and a label, found {line.strip()[:60]!r}"
            )


def _columns(line: str) -> list[str]:
    """Path and label in a line of CSV, with a comma or a semicolon; [] if it is none."""
    found: list[str] = []
    for pattern in _CSV:
        match = pattern.fullmatch(line)
        if match:
            path = match[1].replace('""', '"') if match[1] else match[2].strip()
            columns = [path, match[3].strip(' "')]
            if not found or _INTEGER.fullmatch(columns[1]):  # a path may hold the other sign
                found = columns
    return found


def _json_entries(file: str, text: str) -> Iterator[Entry]:
    for number, entry in enumerate(_json_array(text)):
        if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[0], str):
            raise UserError(
                f"{file}: entry {number}: expected [path, label], found {short(entry, 60)}"
            )
        yield f"{file}: entry {number}", entry[0], entry[1]


def _json_array(text: str) -> Iterator[object]:
    """Yield the elements of a JSON array one by one, so that they are not all in memory.

    Args:
        text: must match _JSON, that is, begin with "[".

    Raises:
        json.JSONDecodeError: the text is not a JSON array.
    """
    decoder = json.JSONDecoder()

    def skip_space(position: int) -> int:
        space = _SPACE.match(text, position)
        assert space is not None  # it may be empty
        return space.end()

    position = skip_space(0) + len("[")
    position = skip_space(position)
    is_at_end = text.startswith("]", position)
    while not is_at_end:
        entry, position = decoder.raw_decode(text, position)
        yield entry
        position = skip_space(position)
        is_at_end = text.startswith("]", position)
        if is_at_end:
            break
        if not text.startswith(",", position):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        position = skip_space(position + len(","))
    position = skip_space(position + len("]"))
    if position != len(text):
        raise json.JSONDecodeError("Extra data", text, position)


def _encoded(file: str, paths: list[str]) -> list[bytes]:
    try:
        encoded = [os.fsencode(path) for path in paths]
    except UnicodeEncodeError as error:
        raise UserError(f"{file}: {short(error.object)} is not the name of a file") from error
    if all(encoded) and b"\0" not in b"".join(encoded):
        return encoded
    invalid = next(path for path in paths if "\0" in path or not path)
    raise UserError(f"{file}: {short(invalid)} is not the name of a file")


def _label(place: str, value: object, num_classes: int) -> int:
    """The label as a number.

    Args:
        num_classes: labels must be smaller; 0: smaller than _MAX_LABEL.
    """
    text = value
    if not isinstance(text, str):
        text = short(value, 60)
    if not _INTEGER.fullmatch(text):
        raise UserError(
            f"{place}: label {text[:60]!r} is not an integer; a list numbers its classes from 0, or"
            " put the images of each class into a folder with its name (DATA.DATASET folder)"
        )
    label = int(text)
    if label < 0:
        raise UserError(f"{place}: label {label} is negative, labels count from 0")
    num_classes = num_classes or _MAX_LABEL
    if label >= num_classes:
        raise UserError(f"{place}: label {label} is out of range, with {num_classes} classes")
    return label


def _check_some_exist(key: str, file: str, root: str, paths: np.ndarray) -> None:
    """Raise UserError if none of about 16 sampled images exists, for example with a wrong
    `root`."""
    sample = paths[:: len(paths) // 16 + 1]
    for path in sample:
        if os.path.exists(os.path.join(os.fsencode(root), path)):
            return
    first = os.path.join(root, os.fsdecode(sample[0]))
    first = first.encode(errors="surrogateescape").decode(errors="replace")
    raise UserError(
        f"{key} is {file!r}: none of the {len(sample)} listed images looked for exists, for"
        f" example {first}; DATA.PATH must be the directory that the paths are relative to"
    )
