"""Images with equal bytes: copies between training and validation, and one image with two labels.

Only equal files are found. An image that was encoded again or resized is another image here: to
find it, every image would have to be decoded.

N images
"""

import copy
import hashlib
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from moe_core.files import open_regular, read_chunks
from swinv2_moe.data.images import is_of_the_machine

_NUM_READERS = 16  # threads; a network's disk takes milliseconds to answer
_END = 1 << 14  # bytes at the end of a file that are compared first


class Files(Protocol):
    """N files, in folders or in shards."""

    def __len__(self) -> int: ...

    def size(self, index: int) -> int:
        """Bytes of a file; 0 if it cannot be read."""

    def checksum(self, index: int, last: int | None = None) -> int:
        """64 bits of a file, or of its last bytes; 0 if it cannot be read."""


def first_copies(*sources: Files) -> np.ndarray:
    """For each of N files of all sources the index of the first file with the same bytes, int64
    [N].

    A file is read if others have its size, and read as a whole if their ends are equal, too. Empty
    files and files that cannot be read have no copies.
    """
    starts = np.cumsum([0, *map(len, sources)])
    values = np.zeros(starts[-1], np.uint64)
    rows = np.arange(starts[-1])  # files that may have a copy
    measures: tuple[Callable[[Files, int], int], ...] = (
        lambda source, index: source.size(index),
        lambda source, index: source.checksum(index, _END),
        lambda source, index: source.checksum(index),
    )
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        for measure in measures:

            def measure_all(
                part: np.ndarray, measure: Callable[[Files, int], int] = measure
            ) -> list[int]:
                own = list(map(copy.copy, sources))  # with open shards of this thread
                numbers = np.searchsorted(starts, part, "right") - 1
                pairs = zip(numbers.tolist(), (part - starts[numbers]).tolist(), strict=True)
                return [measure(own[number], index) for number, index in pairs]

            parts = pool.map(measure_all, np.array_split(rows, _NUM_READERS))
            values[:] = 0
            values[rows] = np.array([value for part in parts for value in part], np.uint64)
            _, numbers, counts = np.unique(values[rows], return_inverse=True, return_counts=True)
            rows = rows[(values[rows] > 0) & (counts[numbers] > 1)]
    return first_equal(values)


def first_equal(values: np.ndarray) -> np.ndarray:
    """For each of N values the index of the first equal one, int64 [N]. Zeros have no equal."""
    first = np.arange(len(values))
    rows = np.flatnonzero(values)
    _, starts, numbers = np.unique(values[rows], return_index=True, return_inverse=True)
    first[rows] = rows[starts[numbers]]
    return first


def digest(content: bytes | memoryview) -> int:
    """A checksum of 64 bits; 0 for no bytes."""
    if not content:
        return 0
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def size_of(path: str) -> int:
    """The size of a regular file; 0 for others, and if it cannot be read."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # it does not exist; NUL in its name
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def digest_of(path: str, last: int | None = None) -> int:
    """A checksum of a file, or of its last bytes; 0 if it cannot be read."""
    checksum = hashlib.blake2b(digest_size=8)
    try:
        with open_regular(path) as file:
            if last is not None:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - last))
            for chunk in read_chunks(file, last or 1 << 18):
                checksum.update(chunk)
    except OSError as error:
        if is_of_the_machine(error):
            raise
        return 0
    return int.from_bytes(checksum.digest(), "big")


def contradictions(first: np.ndarray, targets: np.ndarray, num_train: int) -> np.ndarray:
    """The images [n] that are in validation and copies of a training image, or that have another
    label than the first of their copies.

    Args:
        first: as of `first_equal`, of the training images and then the validation images [N].
        targets: integers [N].
    """
    is_across = (np.arange(len(first)) >= num_train) & (first < num_train)
    return np.flatnonzero(is_across | (targets != targets[first]))


def copies_note(
    first: np.ndarray, targets: np.ndarray, num_train: int, name: Callable[[int], str]
) -> list[str]:
    """A warning that counts the `contradictions`; [] if there are none.

    Args:
        name: the name of an image, for messages.
    """
    rows = contradictions(first, targets, num_train)
    if not len(rows):
        return []
    parts = []
    across = rows[(rows >= num_train) & (first[rows] < num_train)]
    if len(across):
        num_val = len(first) - num_train
        parts.append(f"{len(across):,} of the {num_val:,} validation images are also in training")
    several = np.unique(first[rows[targets[rows] != targets[first[rows]]]])
    if len(several):
        parts.append(f"{len(several):,} with several labels")
    return [
        f"warning: copies (equal bytes): {', '.join(parts)}; the first: {name(rows[0])} ="
        f" {name(first[rows[0]])}; `train --check-files` lists them"
    ]
