"""Shards: images in tars of the WebDataset format, and an index of where each image is.

    SHARDS/train/000000.tar ...   <key>.cls, <key>.jpg, ...: what webdataset.WebDataset reads
    SHARDS/train/members.npy      MEMBER [N], shard by shard; opened as a memory map, which all
                                  processes of a machine share
    SHARDS/val/...                the same
    SHARDS/index.json             class names; the shards of each split with their sizes and
                                  checksums; written last

N images, S shards
"""

import errno
import glob
import os
import re
import stat
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from moe_core.files import open_regular
from swinv2_moe.data.copies import digest
from swinv2_moe.data.images import MAX_FILE_BYTES, decode, is_of_the_machine
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import check_plain_name, read_json

FORMAT_VERSION = 1
INDEX = "index.json"
SPLITS = ("train", "val")
# Offset and size refer to the image's bytes, without the header of the tar's member.
MEMBER = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("size", "<u4"), ("label", "<i4")])
MAX_INDEX_BYTES = 1 << 26  # limit of index.json: a million shards
_MAX_BYTES = 1 << 50  # limit of a shard
_MAX_OPEN = 256  # open files per split; the usual limit of a process is 1024


class ShardFile(NamedTuple):
    """A file of a directory of shards, as index.json records it."""

    name: str  # relative path: "train/000012.tar"
    bytes: int
    sha256: str


class ShardedImages:
    """N images in the shards of one split, a `Source`. Forked processes may share it.

    Args:
        split: "train" or "val".
        shards: the checked records of index.json: "name", "images", "bytes", "sha256".
        labels: [classes]: a new target for each target in the shards; None: unchanged.

    Raises:
        UserError: members.npy cannot be used.
    """

    def __init__(
        self,
        root: str,
        split: str,
        shards: list[dict],
        labels: Sequence[int] | None = None,
    ):
        self.root = root
        self.split = split
        self.shards = shards
        self.counts = np.array([shard["images"] for shard in shards], np.int64)  # [S]
        index_file = os.path.join(root, split, "members.npy")
        self.members = _read_members(index_file, int(self.counts.sum()))  # MEMBER [N]
        self.labels = labels
        self.targets: np.ndarray = self.members["label"]  # [N]
        if labels is not None:
            self.targets = np.asarray(labels)[self.targets]
        # Shard -> file descriptor, the least recently used one first.
        self._files: OrderedDict[int, int] = OrderedDict()

    def __reduce__(self):
        """Pickling: a copy in another process opens its own files."""
        return ShardedImages, (self.root, self.split, self.shards, self.labels)

    def relabelled(self, labels: Sequence[int]) -> "ShardedImages":
        """The same images, with target t replaced by `labels[t]`."""
        return ShardedImages(self.root, self.split, self.shards, labels)

    def __del__(self):
        for file in getattr(self, "_files", {}).values():
            os.close(file)

    def __len__(self) -> int:
        return len(self.members)

    def open(self, index: int) -> Image.Image:
        return decode(self.read(index))

    def read(self, index: int) -> bytes:
        shard, offset, size, _ = self.members[index].item()
        if size > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_FILE_BYTES:,} bytes", self.name(index))
        # pread does not move the file position, which forked workers share.
        return os.pread(self._file(shard), size, offset)

    def size(self, index: int) -> int:
        """Bytes of the image."""
        return int(self.members["size"][index])

    def checksum(self, index: int, last: int | None = None) -> int:
        """64 bits of the image, or of its last bytes; 0 if it cannot be read."""
        shard, offset, size, _ = self.members[index].item()
        count = min(size, last or size, MAX_FILE_BYTES)
        try:
            return digest(os.pread(self._file(shard), count, offset + size - count))
        except OSError as error:
            if is_of_the_machine(error):
                raise
            return 0

    def name(self, index: int) -> str:
        """A name for messages, such as "train/000012.tar: 00000017-n01440764_18.jpg"."""
        shard, offset, _, _ = self.members[index].item()
        try:
            header = os.pread(self._file(shard), tarfile.BLOCKSIZE, offset - tarfile.BLOCKSIZE)
            member = tarfile.TarInfo.frombuf(header, "utf-8", "replace").name
        except (OSError, tarfile.HeaderError):
            member = f"byte {offset}"
        return f"{self.split}/{self.shards[shard]['name']}: {member}"

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            if len(self._files) == _MAX_OPEN:
                os.close(self._files.popitem(last=False)[1])
            path = os.path.join(self.root, self.split, self.shards[shard]["name"])
            self._files[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files.move_to_end(shard)
        return self._files[shard]


class Shards(NamedTuple):
    train: ShardedImages
    val: ShardedImages
    class_names: list[str]


def load_shards(root: str) -> Shards:
    """Open the finished shards in `root` (DATA.PATH). Checks the size of each shard and every row
    of the indexes.

    Raises:
        UserError: the index is missing, damaged or of a newer version, a shard is missing or has
            another size, or a label is out of range.
    """
    index = read_index(root, "DATA.PATH")
    train, val = (open_split(root, split, index) for split in SPLITS)
    return Shards(train, val, index["class_names"])


def files_of(index: dict) -> list[ShardFile]:
    """The files that an index lists: first the files that describe the shards, then the shards of
    `train`, then the shards of `val`."""
    files = [_shard_file(split, index[split]["members"]) for split in SPLITS]
    for split in SPLITS:
        files += [_shard_file(split, record) for record in index[split]["shards"]]
    return files


def _shard_file(split: str, record: dict) -> ShardFile:
    return ShardFile(f"{split}/{record['name']}", record["bytes"], record["sha256"])


def read_index(root: str, key: str) -> dict:
    """Read and check SHARDS/index.json.

    Args:
        key: the name of `root` in messages.

    Returns:
        "class_names"; "train" and "val", each with the records "members" and "shards"; "made".

    Raises:
        UserError: the file does not exist, or cannot be used.
    """
    path = os.path.join(root, INDEX)
    try:
        index = read_json(path, MAX_INDEX_BYTES)
    except FileNotFoundError as error:
        raise UserError(
            f"{key} is {root!r}: it has no index.json; {_why_no_index(root)}"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error})") from error
    version = None
    if isinstance(index, dict):
        version = index.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {short(version)}, this program knows {FORMAT_VERSION}"
        )
    try:
        _check_index(index)
    except KeyError as error:
        raise UserError(
            f"{path}: is not as `swinv2-moe make-shards` writes it (KeyError: {error})"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{path}: is not as `swinv2-moe make-shards` writes it ({error})"
        ) from error
    return index


def _check_index(index: dict) -> None:
    """Raise ValueError or KeyError unless the index has all entries that this program reads."""
    for split in SPLITS:
        _check_type(split, index[split], dict)
        _check_record(f"{split}: members", index[split]["members"])
        name = index[split]["members"]["name"]
        if name != "members.npy":
            raise ValueError(f"{split}: members has the name {name!r}")
        _check_shards(split, index[split]["shards"])
    names = index["class_names"]
    if not (names and isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("no class_names, or not of its type")
    _check_type("made", index.get("made", {}), dict)


def _check_shards(split: str, shards: Any) -> None:
    _check_type(f"{split}: shards", shards, list)
    for number, shard in enumerate(shards):
        check_shard(f"{split}: shard {number}", shard)
    names = Counter(shard["name"] for shard in shards)
    for name, count in names.most_common(1):
        if count > 1:
            raise ValueError(f"{split}: {count} shards have the name {name!r}")


def check_shard(where: str, record: Any) -> None:
    """Raise ValueError unless `record` describes a shard. `where`: the record's name in
    messages."""
    _check_record(where, record, images=int, left_out=int)
    if not record["name"].endswith(".tar"):
        raise ValueError(
            f"{where} has the name {short(record['name'])}, which does not end in .tar"
        )
    for key, limit in (("images", record["bytes"] // tarfile.BLOCKSIZE), ("left_out", _MAX_BYTES)):
        if not 0 <= record[key] <= limit:
            raise ValueError(f"{where} ({record['name']}) has {key} {short(record[key])}")


def _check_record(where: str, record: Any, **more: type) -> None:
    """Raise ValueError unless `record` has the name, size and checksum of a file.

    Args:
        more: types of further entries.
    """
    _check_type(where, record, dict)
    kinds = {"name": str, "bytes": int, "sha256": str} | more
    for key, kind in kinds.items():
        if type(record.get(key)) is not kind:
            raise ValueError(f"no {key}, or not of its type")
    check_plain_name(record["name"])
    if not 0 <= record["bytes"] <= _MAX_BYTES:
        raise ValueError(f"{where} ({record['name']}) has {short(record['bytes'])} bytes")
    if not re.fullmatch("[0-9a-f]{64}", record["sha256"]):
        raise ValueError(f"{where} ({record['name']}) has the checksum {short(record['sha256'])}")


def _check_type(where: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {short(value)}")


def _why_no_index(root: str) -> str:
    if os.path.exists(os.path.join(root, "plan.json")):
        return "`swinv2-moe make-shards` has not finished there; run its command again to continue"
    for split in SPLITS:
        if glob.glob(os.path.join(glob.escape(root), split, "*.tar")):
            return (
                "shards that are being copied have none yet; for other programs' shards,"
                " `swinv2-moe make-shards --index`"
            )
    return "`swinv2-moe make-shards` makes shards"


def open_split(root: str, split: str, index: dict) -> ShardedImages:
    """Open the images of one split. Checks the sizes of its shards and every row of its index.

    Raises:
        UserError: a shard or a row cannot be used.
    """
    images = ShardedImages(root, split, index[split]["shards"])
    num_classes = len(index["class_names"])
    start = 0
    for number, shard in enumerate(images.shards):
        _check_size(os.path.join(root, split, shard["name"]), shard["bytes"])
        rows = images.members[start : start + shard["images"]]
        problem = row_problem(rows, number, shard["bytes"], num_classes)
        if problem:
            members = os.path.join(root, split, "members.npy")
            raise UserError(f"{members}: {problem} ({split}/{shard['name']})")
        start += shard["images"]
    return images


def _read_members(path: str, count: int) -> np.ndarray:
    """The rows of the index at `path`, MEMBER [count], as a memory map."""
    try:
        with open_regular(path) as file:
            shape, dtype = _read_header(file)
            if dtype != MEMBER:
                raise ValueError(f"rows of type {dtype}")
            if shape == (count,):
                return np.asarray(np.memmap(file, MEMBER, "r", file.tell(), shape))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or one_line(str(error))
        raise UserError(f"{path}: cannot be read ({problem})") from error
    rows: int | tuple[int, ...] = shape
    if len(shape) == 1:
        rows = shape[0]
    raise UserError(f"{path}: has {short(rows)} rows, index.json records {count} images")


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    """Read shape and dtype of the array in a .npy file. The file position is then at the first row.

    Raises:
        ValueError: the file is not a .npy file, or has another version than the index files.
    """
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not a .npy of version 1.0")
    start = file.tell()
    try:
        try:
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        # before Python 3.11.8 where another thread reads Python code, too (gh-106905)
        except SystemError:
            file.seek(start)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    # numpy evaluates the header as Python code, which may raise RecursionError, TypeError and
    # others besides ValueError.
    except Exception as error:
        raise ValueError(f"a damaged header: {error}") from error
    return shape, dtype


def _check_size(path: str, recorded: int) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}), index.json lists it"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is not a regular file, index.json lists it")
    if status.st_size != recorded:
        raise UserError(f"{path}: has {status.st_size:,} bytes, index.json records {recorded:,}")


def row_problem(rows: np.ndarray, shard: int, size: int, num_classes: int) -> str | None:
    """A phrase that describes an error in a shard's rows, MEMBER [n]; None if they are valid.

    Args:
        shard: number of the shard.
        size: size of the shard in bytes.
    """
    if not len(rows):
        return None
    shards, offsets, labels = rows["shard"], rows["offset"], rows["label"]
    others = shards[shards != shard]
    if len(others):
        return f"rows of shard {others[0]} where those of shard {shard} should be"
    # Offsets are checked first: the sum of an offset near 2^64 and a size would wrap around.
    if offsets.max() > size or (offsets + rows["size"]).max() > size:
        return "rows that point beyond the end of their shard"
    invalid = labels[(labels < 0) | (labels >= num_classes)]
    if len(invalid):
        return f"label {invalid[0]} is out of range, with {num_classes} classes"
    return None
