"""Reading and writing files.

Input may be hostile: readers limit its size, depth and kind. Writers are atomic: a file appears
complete under its name or not at all. They use the primitives of `moe_core.files`.
"""

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from moe_core.files import atomic_write, fsync, open_regular
from swinv2_moe.errors import UserError, short

MAX_LINE = 1 << 26  # bytes of a line of metrics.jsonl
MAX_YAML_CHARS = 1 << 16
# limit of a document with expanded aliases: its characters, plus _VALUE_SIZE for each value
MAX_YAML_SIZE = 1 << 17
MAX_YAML_DEPTH = 32
_VALUE_SIZE = 16
_CHUNK = 1 << 24  # bytes
_MAX_NAME = 255  # bytes; the limit of common file systems
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f/]")


def read_bounded(path: str | os.PathLike, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: the file is unreadable, not a regular file, or larger; `strerror` says which.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b""
        if size <= max_bytes:
            content = file.read(size + 1)  # read() allocates as many bytes as it is asked for
        # The file may be growing, or report no size (/proc).
        while size < len(content) <= max_bytes:
            more = file.read(_CHUNK)
            if not more:
                break
            content += more
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: the text is not JSON, not UTF-8, nested too deeply, or has an integer with
            thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: str | Path, max_bytes: int) -> Any:
    """The value of a JSON file of at most `max_bytes` bytes.

    Raises:
        OSError: see `read_bounded`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_bounded(path, max_bytes))


def other_runs(directory: Path) -> str:
    """The end of a message that `directory` is no run: the runs in it, if there are any."""
    runs = sorted(str(path.parent) for path in directory.glob("*/metrics.jsonl"))
    if not runs:
        return ""
    return "; runs in it: " + ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")


def parse_yaml(text: str) -> Any:
    """The value of a YAML document of plain values.

    Raises:
        ValueError: the text is not YAML, too long, nested too deeply, or too large with expanded
            aliases; the message is one line.
    """
    try:
        _check_yaml_size(text)
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    # PyYAML raises AttributeError, KeyError and others for `!!bool x` and the like
    except Exception as error:
        raise ValueError("a value is not what its tag says") from error


class _Loader(yaml.SafeLoader):
    """Refuses a name that a mapping has twice: YAML forbids it, and PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value == "<<" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value!r} is there twice")
            seen.add(key.value)
        return node


def _check_yaml_size(text: str) -> None:
    if len(text) > MAX_YAML_CHARS:
        raise ValueError(f"longer than {MAX_YAML_CHARS:,} characters")
    sizes: dict[str | None, int] = {}  # by anchor
    # open collections, from the outermost: anchor, size so far
    values: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        anchor, size = values.pop()
        if isinstance(event, yaml.CollectionStartEvent):
            # Until its end is read: an alias inside its own collection would expand forever.
            sizes[event.anchor] = MAX_YAML_SIZE + 1
            values.append((anchor, size))
            anchor, size = event.anchor, _VALUE_SIZE
        elif isinstance(event, yaml.CollectionEndEvent):
            sizes[anchor], inner = size, size
            anchor, size = values.pop()
            size += inner
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = _VALUE_SIZE + len(event.value)
            size += sizes[event.anchor]
        elif isinstance(event, yaml.AliasEvent):
            size += sizes.get(event.anchor, 0)
        values.append((anchor, size))
        if size > MAX_YAML_SIZE:
            raise ValueError("too large with its aliases written out")
        if len(values) > MAX_YAML_DEPTH:
            raise ValueError(f"nested more than {MAX_YAML_DEPTH} levels deep")


def check_plain_name(name: object) -> str:
    """Return `name` if it is a file name: no separator or control character, not "." or "..".

    Raises:
        ValueError: `name` is not a file name; the message has its value.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or not _is_encodable(name)
        or _NOT_IN_NAMES.search(name)
    ):
        raise ValueError(f"{short(name)} is not a plain file name")
    return name


def _is_encodable(name: str) -> bool:
    try:
        return len(os.fsencode(name)) <= _MAX_NAME
    except UnicodeEncodeError:
        return False


def check_inner_path(path: Any) -> str:
    """Return `path` if it is a relative path of plain names, which stays below its directory.

    Raises:
        ValueError: `path` is not such a path; the message has its value.
    """
    try:
        parts = path.split(os.sep)
        check_plain_name(parts[-1])
        for folder in parts[:-1]:
            if folder != ".":
                check_plain_name(folder)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{short(path)} does not name a file below its directory") from error
    return path


class HashedFile:
    """A binary file that is read or written sequentially, with its size and checksum up to now."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._update(content)
        return content

    def write(self, content: bytes | memoryview) -> int:
        self._update(content)
        return self._file.write(content)

    def _update(self, content: bytes | memoryview) -> None:
        self._digest.update(content)
        self.bytes += len(content)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


@contextmanager
def new_file(path: str | Path) -> Iterator[HashedFile]:
    """Write a file that gets its name once it is complete on the disk.

    See `moe_core.files.atomic_write`.

    Raises:
        UserError: an OSError in the block, such as a full disk; nothing is left behind.
    """
    try:
        with atomic_write(path) as file:
            yield HashedFile(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def write_json(path: str | Path, content: object) -> None:
    """Write a JSON file. Raises what `new_file` raises."""
    with new_file(path) as file:
        file.write(json.dumps(content).encode())


def is_same_path(first: str | Path, second: str | Path) -> bool:
    """Whether two names are of one file or directory, by links or `~`, too. "" names nothing, nor
    does a name with a null character, which a stranger's checkpoint may hold."""
    if not (first and second) or "\0" in f"{first}{second}":
        return False
    one, other = (os.path.realpath(os.path.expanduser(path)) for path in (first, second))
    return one == other


def make_directory(path: str | Path) -> None:
    """Make a directory and its parents, unless they exist.

    Raises:
        UserError: the directory cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be made ({error.strerror})") from error


@contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A temporary directory next to `output`. The block renames it to `output`; otherwise it is
    removed.

    Raises:
        UserError: the directory cannot be made.
    """
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        private = tempfile.TemporaryDirectory(
            prefix=f".{output.name}.", dir=output.parent, ignore_cleanup_errors=True
        )
    with private:
        with writing(output):
            # mkdir sets the usual permissions; TemporaryDirectory does not.
            directory = Path(private.name) / output.name
            directory.mkdir()
        yield directory


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turn an OSError of the block, such as a full disk, into a UserError about --output."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error})") from error


def replace_link(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, atomically replacing an existing link.

    Raises:
        OSError: the link cannot be made.
    """
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    fsync(link.parent)
