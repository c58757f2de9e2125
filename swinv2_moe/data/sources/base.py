"""The parts of a dataset: two sources of images and the names of the classes.

N images
"""

import hashlib
import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from swinv2_moe.data.copies import copies_note, digest_of, first_copies, size_of
from swinv2_moe.data.images import Header, decode, read_file, read_header
from swinv2_moe.data.shards import ShardedImages
from swinv2_moe.errors import UserError, shortened
from swinv2_moe.output import printable

_MAX_COMPARED = 100_000  # images: reading those of equal sizes takes seconds
_SAMPLE = 100  # images whose headers are read
_FAR_FROM_SQUARE = 2  # median of the long side divided by the short side


class Source(Protocol):
    """N images that are opened one by one."""

    @property
    def targets(self) -> np.ndarray:
        """Integers [N]."""

    def __len__(self) -> int: ...

    def open(self, index: int) -> Image.Image:
        """The image in any mode.

        Raises:
            Exception: the image cannot be read, or is larger than the source allows.
        """

    def read(self, index: int) -> bytes:
        """The content of the image's file."""

    def name(self, index: int) -> str:
        """The image's path, for messages."""


class Sources(NamedTuple):
    """The images of a dataset."""

    train: Source
    val: Source
    class_names: list[str]
    notes: tuple[str, ...] = ()  # messages for the log, for example about omitted images


@dataclass(frozen=True)
class ImageFiles:
    """Image files, a `Source`.

    Args:
        root: the directory that paths are relative to.
        paths: bytes [N]. It is an array, since workers would copy the memory pages of a list of
            objects.
        targets: integers [N].
    """

    root: str
    paths: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    def open(self, index: int) -> Image.Image:
        return decode(self.read(index))

    def read(self, index: int) -> bytes:
        return read_file(self.path(index))

    def name(self, index: int) -> str:
        return printable(self.path(index))

    def path(self, index: int) -> str:
        """The image's path, for opening."""
        return os.path.join(self.root, os.fsdecode(self.paths[index]))

    def size(self, index: int) -> int:
        """Bytes of the image's file; 0 if it cannot be read."""
        return size_of(self.path(index))

    def checksum(self, index: int, last: int | None = None) -> int:
        """64 bits of the file, or of its last bytes; 0 if it cannot be read."""
        return digest_of(self.path(index), last)


@dataclass(frozen=True)
class ImageArrays:
    """Images in memory, a `Source`.

    Args:
        label: name of the dataset in messages.
        images: uint8 [N, H, W] or [N, H, W, 3].
        targets: integers [N].
    """

    label: str
    images: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    def open(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index])

    def read(self, index: int) -> bytes:
        file = io.BytesIO()
        self.open(index).save(file, "PNG")
        return file.getvalue()

    def name(self, index: int) -> str:
        return f"{self.label}[{index}]"


@dataclass(frozen=True)
class Subset:
    """Some images of a source, a `Source`.

    Args:
        indices: integers [n]: the images.
        labels: integers [classes]: a new target for each target of the source.
    """

    source: Source
    indices: Sequence[int] | np.ndarray
    labels: np.ndarray | None = None

    @cached_property
    def targets(self) -> np.ndarray:
        targets = self.source.targets[self.indices]
        if self.labels is None:
            return targets
        return self.labels[targets]

    def __len__(self) -> int:
        return len(self.indices)

    def open(self, index: int) -> Image.Image:
        return self.source.open(self.indices[index])

    def read(self, index: int) -> bytes:
        return self.source.read(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


def relabelled(source: Source, labels: Sequence[int]) -> Source:
    """The images of a source with a new target for each target; without those whose new target is
    negative.

    Args:
        labels: [classes]: the new targets.
    """
    new_targets = np.array(labels)
    if np.array_equal(new_targets, np.arange(len(labels))):
        return source
    return Subset(source, np.flatnonzero(new_targets[source.targets] >= 0), new_targets)


def copies_of_files(
    train: ImageFiles | ShardedImages, val: ImageFiles | ShardedImages
) -> list[str]:
    """A warning about copies between training and validation, or about images with several labels;
    [] if there are none, or too many images to compare them now."""
    split = len(train)
    targets = np.concatenate([train.targets, val.targets])
    if not split or len(targets) > _MAX_COMPARED:
        return []

    def name(row: int) -> str:
        return train.name(row) if row < split else val.name(row - split)

    return copies_note(first_copies(train, val), targets, split, name)


def content_id(source: Source) -> str:
    """A checksum of the images' names below their folder, targets and sizes, but not of where that
    folder is; "" for images that do not lie in files.

    Of folders the sizes of 1000 images are read.
    """
    if isinstance(source, Subset):
        inner, rows = content_id(source.source), np.asarray(source.indices, np.int64)
        parts = [inner.encode(), rows.tobytes()] if inner else []
    elif isinstance(source, ImageFiles):
        seen = np.unique(np.linspace(0, len(source) - 1, 1000).astype(int)).tolist()
        sizes = np.array([source.size(row) for row in seen], np.int64)
        parts = [b"\0".join(source.paths.tolist()), sizes.tobytes()]
    elif isinstance(source, ShardedImages):
        parts = [source.members.tobytes(), *(shard["sha256"].encode() for shard in source.shards)]
    else:
        parts = []
    if not parts:
        return ""
    targets = np.ascontiguousarray(source.targets, np.int64).tobytes()
    return hashlib.sha256(b"\0".join([*parts, targets])).hexdigest()


def sample_notes(source: Source, crop_ratio: float) -> list[str]:
    """Messages about pixels that are not used, from the headers of a sample of the images.

    Args:
        crop_ratio: TEST.CROP_RATIO.
    """
    if not isinstance(source, ImageFiles | ShardedImages):
        return []
    headers: dict[int, Header] = {}
    count = min(_SAMPLE, len(source))
    for i in range(count):
        row = i * len(source) // count
        with suppress(ValueError):  # another message counts the images that cannot be read
            if isinstance(source, ImageFiles):
                headers[row] = read_header(source.path(row))
            else:
                headers[row] = read_header(io.BytesIO(source.read(row)))
    notes = []
    for unused in sorted({header.unused for header in headers.values()} - {""}):
        rows = [row for row, header in headers.items() if header.unused == unused]
        notes.append(
            f"warning: {len(rows)} of {len(headers)} images that were looked at have {unused},"
            f" which are not used; the first: {source.name(rows[0])}"
        )
    sides = [(max(header[:2]), min(header[:2])) for header in headers.values()]
    ratio = median_low([longer / shorter for longer, shorter in sides if shorter] or [1])
    if ratio >= _FAR_FROM_SQUARE and crop_ratio:
        notes.append(
            f"most images are wide or tall ({ratio:.1f} : 1): evaluation sees the middle, about"
            f" {crop_ratio**2 / ratio:.0%} of such an image; TEST.CROP_RATIO 0 uses all of it"
        )
    return notes


def check_directory(key: str, path: str) -> None:
    """Raise UserError unless `path`, the value of a configuration key, is a readable directory."""
    if not os.path.exists(path):
        raise UserError(f"{key} is {path!r}: no such directory")
    if not os.path.isdir(path):
        raise UserError(f"{key} is {path!r}: a file, it must be a directory")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"{key} is {path!r}: permission denied")


def content_of(folder: str) -> str:
    """The first names in a folder, for messages."""
    return shortened(sorted(os.listdir(folder))) or "nothing"
