"""Read the checkpoints of google-research/vmoe: PREFIX.index and PREFIX.data-00000-of-00004, ...

Each file is one MessagePack value. The index holds a tree of arrays: shape, dtype, and in which
shard each piece of an array is. A shard holds pieces by the number of their array, with their
place in it. Nothing in a file is run, and no name in it becomes a path. Memory is only used for
arrays that the shards are large enough to hold.

Source: vmoe/checkpoints (partitioned.py, serialization.py), its format of 20220622; MessagePack's
specification.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from math import nan, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_core.files import open_regular
from swinv2_moe.errors import UserError, short

_VERSIONS = ("20220622", None)
_PIECES = "__msgpack_array_chunk_a87ca2__"  # in each shard
_ARRAY, _SLICES, _INDEX_INFO = 1, 6, 8  # MessagePack extensions
_DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_MAX_INDEX = 16 << 20  # bytes
_MAX_VALUES = 1 << 20  # MessagePack values in a file
_MAX_DEPTH = 32
_MAX_DIMS = 8
_MAX_SHARDS = 1 << 12

Place = tuple[tuple[int, int], ...]  # start and stop of a piece in each dim of its array


class Extension(NamedTuple):
    """A MessagePack extension: its type and bytes."""

    code: int
    data: memoryview


class Stored(NamedTuple):
    """An array of the index."""

    name: str  # such as "Encoder/encoder_norm/scale"
    shape: tuple[int, ...]
    dtype: str  # a key of _DTYPES
    pieces: dict[Place, int]  # the shard of each piece


def read_vmoe(prefix: Path) -> dict[str, Tensor]:
    """The parameters of a checkpoint in fp32, by their names in it, such as
    "Encoder/encoderblock_5/Moe/Router/dense/kernel". What else a training state has is not read.

    Args:
        prefix: the common start of the files' names, or the index itself.

    Returns:
        The tensors. Values that no piece covers, since others overlap, are NaN.

    Raises:
        UserError: a file is missing, damaged, or holds other things than the index says.
    """
    prefix = prefix.with_name(prefix.name.removesuffix(".index"))
    index = prefix.with_name(f"{prefix.name}.index")
    arrays, num_shards = _read_index(index)
    files = [
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{num_shards:05d}")
        for shard in range(num_shards)
    ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(f"{prefix}: no shard {missing[0]}{more} beside {index.name}")
    stored = sum(file.stat().st_size for file in files)
    needed = sum(prod(array.shape) * _itemsize(array.dtype) for array in arrays.values())
    if needed > stored:
        raise UserError(
            f"{index}: its arrays have {needed:,} bytes, its {num_shards} shards {stored:,}"
        )
    tensors = {number: torch.full(array.shape, nan) for number, array in arrays.items()}
    left = {number: set(array.pieces) for number, array in arrays.items()}
    for shard, file in enumerate(files):
        with _contents(file) as content:
            _read_shard(content, shard, arrays, tensors, left)
    for number, places in left.items():
        if places:
            raise UserError(f"{prefix}: no shard holds all of {short(arrays[number].name)}")
    return {array.name: tensors[number] for number, array in arrays.items()}


def _read_index(file: Path) -> tuple[dict[int, Stored], int]:
    """The arrays of the parameters by their number, and the number of shards."""
    if not file.is_file():
        raise UserError(f"{file}: no such file; a V-MoE checkpoint is PREFIX.index and its shards")
    if file.stat().st_size > _MAX_INDEX:
        raise UserError(f"{file}: larger than {_MAX_INDEX >> 20} MB, not an index of V-MoE")
    with _contents(file) as content:
        index = content["index"]
        num_shards, version = content["shard_count"], content.get("version")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {short(version)}, not {_VERSIONS[0]}")
        if type(num_shards) is not int or not 0 < num_shards <= _MAX_SHARDS:
            raise ValueError(f"it has {short(num_shards)} shards")
        whole = isinstance(index, dict) and "params" in index
        if version is None and whole and len(index) > 1:
            raise ValueError(
                "it is a training state without a version, whose arrays cannot be numbered;"
                " parameters alone can be read"
            )
        arrays = {}
        for number, (path, leaf) in enumerate(_leaves(index, ())):
            if whole and path[0] != "params":
                continue
            name = "/".join(path[whole:])
            arrays[number] = _stored(name, leaf, num_shards)
        if not arrays:
            raise ValueError("it has no arrays")
    return arrays, num_shards


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Extension]]:
    """The arrays of a tree with their paths, in JAX's order: dictionaries by their sorted keys."""
    if isinstance(node, Extension) and node.code == _INDEX_INFO:
        yield path, node
    elif isinstance(node, dict) and all(isinstance(key, str) for key in node):
        for key in sorted(node):
            yield from _leaves(node[key], (*path, key))
    elif isinstance(node, list):
        for i, child in enumerate(node):
            yield from _leaves(child, (*path, str(i)))
    elif node is not None:
        raise ValueError(f"{short('/'.join(path))} is no array")


def _stored(name: str, info: Extension, num_shards: int) -> Stored:
    """An array of the index, checked: its pieces are inside of it and have its size in total."""
    described, places, shards = _unpack(info.data)
    shape, dtype = _unpack(described)[:2]
    dtype = _text(dtype)
    where = short(name)
    if dtype not in _DTYPES:
        raise ValueError(f"{where} is of {short(dtype)}, not of floating point")
    if len(shape) > _MAX_DIMS or any(type(size) is not int or size < 1 for size in shape):
        raise ValueError(f"{where} has the shape {short(list(shape))}")
    pieces = {}
    for place, shard in zip(map(_place, places), shards, strict=True):
        inside = len(place) == len(shape) and all(
            0 <= start < stop <= size for (start, stop), size in zip(place, shape, strict=True)
        )
        if not inside or place in pieces or not 0 <= shard < num_shards:
            raise ValueError(f"a piece of {where} {short(list(shape))} is at {short(place)}")
        pieces[place] = shard
    if sum(map(_volume, pieces)) != prod(shape):
        raise ValueError(f"the pieces of {where} do not make up its shape {list(shape)}")
    return Stored(name, tuple(shape), dtype, pieces)


def _read_shard(
    content: Any,
    shard: int,
    arrays: dict[int, Stored],
    tensors: dict[int, Tensor],
    left: dict[int, set[Place]],
) -> None:
    """Copy the pieces of a shard to their tensors, and take them from those that are `left`."""
    if content.get(_PIECES) is not True:
        raise ValueError("it is not a shard of V-MoE")
    for key, pieces in content.items():
        if key == _PIECES:
            continue
        number = int(key)
        if number not in arrays:
            continue  # not a parameter
        array = arrays[number]
        for parts, slices in pieces:
            place = _place(slices.data)
            if array.pieces.get(place) != shard or place not in left[number]:
                raise ValueError(
                    f"it has a piece of {short(array.name)} at {short(place)}, which the"
                    " index does not have"
                )
            left[number].remove(place)
            values = np.concatenate([_values(part, array) for part in parts])
            sides = [stop - start for start, stop in place]
            if values.size != prod(sides):
                raise ValueError(
                    f"a piece of {short(array.name)} has {values.size:,} values, its place"
                    f" {prod(sides):,}"
                )
            target = tensors[number].numpy()
            target[tuple(slice(*ends) for ends in place)] = values.reshape(sides)


def _values(part: Extension, array: Stored) -> np.ndarray:
    """A part of an array [n]."""
    if part.code != _ARRAY:
        raise ValueError(f"a piece of {short(array.name)} is no array")
    _, dtype, data = _unpack(part.data)
    if _text(dtype) != array.dtype:
        raise ValueError(
            f"a piece of {short(array.name)} is of {short(_text(dtype))}, not {array.dtype}"
        )
    values = np.frombuffer(data, _DTYPES[array.dtype])
    if array.dtype == "bfloat16":  # the upper half of an fp32
        return (values.astype("<u4") << 16).view("<f4")
    return values


def _itemsize(dtype: str) -> int:
    return np.dtype(_DTYPES[dtype]).itemsize


def _volume(place: Place) -> int:
    return prod(stop - start for start, stop in place)


def _place(data: memoryview | bytes) -> Place:
    """Start and stop of each dim, of an extension of slices."""
    place = []
    for one in _unpack(data):
        start, stop, step = _unpack(one)
        if type(start) is not int or type(stop) is not int or step not in (None, 1):
            raise ValueError(f"a slice is {short((start, stop, step))}")
        place.append((start, stop))
    return tuple(place)


def _text(value: Any) -> str:
    if isinstance(value, memoryview):
        return bytes(value).decode()
    return str(value)


@contextmanager
def _contents(file: Path) -> Iterator[Any]:
    """The MessagePack value of a file, whose large parts stay in the file. Within the context,
    what fails on a value of another form is a UserError about the file."""
    try:
        with open_regular(file) as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise UserError(f"{file}: cannot be read ({error})") from error
    try:
        yield _unpack(content)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = "it has a value of another form"
        if type(error) is ValueError:
            reason = str(error)
        raise UserError(f"{file}: damaged, or no checkpoint of V-MoE: {reason}") from error


def _unpack(data: memoryview | bytes | mmap.mmap) -> Any:
    """The one value that the bytes hold.

    Raises:
        ValueError: they are no MessagePack, or too large.
    """
    reader = _Reader(memoryview(data))
    value = reader.value(0)
    if reader.position != len(reader.data):
        raise ValueError(f"{len(reader.data) - reader.position} bytes too many")
    return value


class _Reader:
    """Reads MessagePack. Binary data and extensions are views into the bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0
        self.left = _MAX_VALUES

    def value(self, depth: int) -> Any:
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_VALUES:,} values, or {_MAX_DEPTH} levels")
        code = self.number("B")
        if code <= 0x7F or code >= 0xE0:
            return code if code <= 0x7F else code - 256
        if code <= 0x8F:
            return self.map(code & 0x0F, depth)
        if code <= 0x9F:
            return self.array(code & 0x0F, depth)
        if code <= 0xBF:
            return str(self.take(code & 0x1F), "utf-8")
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self.number(_NUMBERS[code])
        if code in _FIXED:
            return Extension(self.number("b"), self.take(_FIXED[code]))
        kind, form = _SIZED.get(code, ("", ""))
        if not kind:
            raise ValueError(f"byte {self.position - 1} is {code:#x}")
        size = self.number(form)
        if kind == "bin":
            return self.take(size)
        if kind == "ext":
            return Extension(self.number("b"), self.take(size))
        if kind == "str":
            return str(self.take(size), "utf-8")
        return getattr(self, kind)(size, depth)

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self.data):
            raise ValueError("it ends too early")
        part = self.data[self.position : end]
        self.position = end
        return part

    def number(self, form: str) -> Any:
        return struct.unpack(f">{form}", self.take(struct.calcsize(form)))[0]

    def array(self, size: int, depth: int) -> list:
        return [self.value(depth + 1) for _ in range(size)]

    def map(self, size: int, depth: int) -> dict:
        pairs = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int)) or key in pairs:
                raise ValueError("a key of another form, or twice")
            pairs[key] = self.value(depth + 1)
        return pairs


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# by the first byte: the form of the number that follows, as of `struct`
_NUMBERS = {0xCA: "f", 0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q"}
_NUMBERS |= {0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}  # extensions of these sizes
# what follows, and the form of its size
_SIZED = {0xC4: ("bin", "B"), 0xC5: ("bin", "H"), 0xC6: ("bin", "I")}
_SIZED |= {0xC7: ("ext", "B"), 0xC8: ("ext", "H"), 0xC9: ("ext", "I")}
_SIZED |= {0xD9: ("str", "B"), 0xDA: ("str", "H"), 0xDB: ("str", "I")}
_SIZED |= {0xDC: ("array", "H"), 0xDD: ("array", "I"), 0xDE: ("map", "H"), 0xDF: ("map", "I")}
