"""List files: one `path label` a line, or Swin's JSON map, `[["folder/image.JPEG", 0], ...]`.

The JSON form is that of ILSVRC2011fall_whole_map_train.txt, which Swin-Transformer's
data/imagenet22k_dataset.py reads: entry[0] is the path, entry[1] the label; what follows is
ignored. N images
"""

import io
import json
import os
import re
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TextIO

import numpy as np

from moe_core.files import open_regular
from swinv2_moe.errors import UserError, short

_JSON = re.compile(r"""\s*\[\s*([\[{]\s*"|\]\s*$)""")
_SPACE = re.compile(r"\s*")
_MAX_LABEL = 2**31 - 1
_BLOCK = 100_000  # entries
_MAX_LINE = 8192  # characters: systems take paths of up to 4096 bytes
_MAX_JSON_BYTES = 1 << 32  # ImageNet-22K's has 0.8 GB
_MAX_PADDING = 64  # times the bytes of all paths that an array as wide as the longest may take ...
_SMALL = 1 << 28  # ... beyond so many


def read_list(
    key: str, file: str, root: str, num_classes: int
) -> tuple[str, np.ndarray, np.ndarray]:
    """`file` -> the directory its paths are relative to, paths bytes [N], labels int64 [N].

    Args:
        key: the configuration key that names `file`, for messages.
        file: looked for as given, then in `root`.
        root: DATA.PATH; empty: the list file's folder.
        num_classes: labels must be below it; 0: any label that is not negative.

    Raises:
        UserError: no such file, no lines, a line or label that cannot be used, no image where the
            paths point.
    """
    file = _find(key, file, root)
    # ImageNet-22K has 14 million lines: lists of objects would take gigabytes
    blocks, labels = [], array("q")
    images = (
        (path, _label(where, label, num_classes)) for where, path, label in _entries(key, file)
    )
    width = length = 0  # of the longest path, of all together
    while block := list(islice(images, _BLOCK)):
        paths = _encoded(file, [path for path, _ in block])
        labels.extend(label for _, label in block)
        width, length = max(width, max(map(len, paths))), length + sum(map(len, paths))
        if width * len(labels) > max(_SMALL, _MAX_PADDING * length):
            raise UserError(
                f"{file}: has a path of {width:,} bytes, among many that are far shorter"
            )
        blocks.append(np.array(paths))
    if not blocks:
        raise UserError(f"{key} is {file!r}: the list is empty")
    root, paths = root or os.path.dirname(file), np.concatenate(blocks)
    _check_some_exist(key, file, root, paths)
    return root, paths, np.array(labels, np.int64)


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


def _entries(key: str, file: str) -> Iterator[tuple[str, str, object]]:
    """(where, path, label) of each image; where is "file:line"."""
    try:
        with open_regular(file) as content:
            size = os.fstat(content.fileno()).st_size
            # paths may be of any encoding
            lines = io.TextIOWrapper(content, "utf-8-sig", "surrogateescape")
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
    except ValueError as error:  # an integer of thousands of digits
        raise UserError(f"{file}: not valid JSON ({error})") from error
    except OSError as error:
        raise UserError(f"{key} is {file!r}: cannot be read ({error.strerror})") from error


def _text_entries(file: str, lines: TextIO) -> Iterator[tuple[str, str, str]]:
    for number, line in enumerate(iter(partial(lines.readline, _MAX_LINE), ""), start=1):
        if len(line) == _MAX_LINE:
            raise UserError(
                f"{file}:{number}: a line of more than {_MAX_LINE:,} characters, it begins"
                f" {line[:60]!r}"
            )
        fields = line.strip().rsplit(maxsplit=1)
        if len(fields) == 2:
            yield f"{file}:{number}", *fields
        elif fields:
            raise UserError(
                f"{file}:{number}: expected a path and a label, found {fields[0][:60]!r}"
            )


def _json_entries(file: str, text: str) -> Iterator[tuple[str, str, object]]:
    for number, entry in enumerate(_json_array(text)):
        if not (isinstance(entry, list) and len(entry) >= 2 and isinstance(entry[0], str)):
            raise UserError(
                f"{file}: entry {number}: expected [path, label], found {short(entry, 60)}"
            )
        yield f"{file}: entry {number}", entry[0], entry[1]


def _json_array(text: str) -> Iterator[object]:
    """The elements of a JSON array, one by one.

    Raises:
        json.JSONDecodeError: it is not one.
    """
    decode = json.JSONDecoder().raw_decode

    def skip(position: int) -> int:
        return _SPACE.match(text, position).end()

    position = skip(skip(0) + 1)  # behind "[", which _JSON has seen
    more = text[position : position + 1] != "]"
    while more:
        entry, position = decode(text, position)
        yield entry
        position = skip(position)
        more = text[position : position + 1] == ","
        if not more and text[position : position + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
        position = skip(position + 1) if more else position
    if (end := skip(position + 1)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _encoded(file: str, paths: list[str]) -> list[bytes]:
    try:
        encoded = [os.fsencode(path) for path in paths]
    except UnicodeEncodeError as error:
        raise UserError(f"{file}: {short(error.object)} is not the name of a file") from error
    if b"\0" in b"".join(encoded) or not all(encoded):
        wrong = next(path for path in paths if "\0" in path or not path)
        raise UserError(f"{file}: {short(wrong)} is not the name of a file")
    return encoded


def _label(where: str, label: object, num_classes: int) -> int:
    text = label if isinstance(label, str) else short(label, 60)
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise UserError(f"{where}: label {text[:60]!r} is not an integer")
    label = int(label)
    if label < 0:
        raise UserError(f"{where}: label {label} is negative, labels count from 0")
    if label >= (num_classes or _MAX_LABEL):
        raise UserError(
            f"{where}: label {label} is out of range, with {num_classes or _MAX_LABEL} classes"
        )
    return label


def _check_some_exist(key: str, file: str, root: str, paths: np.ndarray) -> None:
    """A wrong root makes every path wrong: say so at once, not image by image."""
    sample = paths[:: len(paths) // 16 + 1]
    if not any(os.path.exists(os.path.join(os.fsencode(root), path)) for path in sample):
        first = os.path.join(root, os.fsdecode(sample[0]))
        first = first.encode(errors="surrogateescape").decode(errors="replace")
        raise UserError(
            f"{key} is {file!r}: none of the {len(sample)} listed images looked for exists, for"
            f" example {first};"
            " DATA.PATH must be the directory that the paths are relative to"
        )
