"""Files that appear whole under their names or not at all, their checksums, and progress in images
and bytes."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from swinv2_moe.errors import UserError


class HashedFile:
    """A file to write to, front to back, that knows the size and checksum of what it was given."""

    def __init__(self, file: BinaryIO):
        self._file, self._digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, content) -> int:
        self._digest.update(content)
        self.bytes += len(content)
        return self._file.write(content)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


@contextmanager
def new_file(path: str) -> Iterator[HashedFile]:
    """Write to a temporary file beside `path`, which gets that name when it is on the disk; if the
    block raises, or the disk is full, nothing is left.

    Raises:
        UserError: it cannot be written (any OSError inside the block is taken for that).
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.tmp")
    try:
        try:
            with open(temporary, "wb", buffering=1 << 20) as file:
                yield HashedFile(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(folder)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def write_json(path: str, content: object) -> None:
    with new_file(path) as file:
        file.write(json.dumps(content).encode())


def make_directory(path: str) -> None:
    """Make a directory, and those above it; there may be one already.

    Raises:
        UserError: it cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be made ({error.strerror})") from error


@contextmanager
def only_process(directory: str) -> Iterator[None]:
    """Keeps others that call this for `directory` out until the end of the block, and until forked
    processes end.

    Raises:
        UserError: another is in.
    """
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UserError(f"{directory}: another process is writing there") from error
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(lock)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TransferBar(Progress):
    """A line in the terminal while it is entered: images, images/s, MB, MB/s and the time left.

    Args:
        total: what there is to do, in `unit`s: "images" or "bytes".
    """

    def __init__(self, title: str, total: int, unit: str):
        super().__init__(
            TextColumn(title), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn()
        )
        self.unit = unit
        self.task = self.add_task("", total=total, done="")

    def skip(self, images: int, bytes: int) -> None:
        """So much of it was done before."""
        self.update(
            self.task, total=self.tasks[0].total - (images if self.unit == "images" else bytes)
        )

    def show(self, images: int, bytes: int) -> None:
        """What has been done so far."""
        seconds = self.tasks[0].elapsed or 1.0
        done = f"{images:,} images, {images / seconds:,.0f}/s, " if images else ""
        done += f"{bytes / 1e6:,.0f} MB, {bytes / 1e6 / seconds:,.0f} MB/s"
        self.update(self.task, completed=images if self.unit == "images" else bytes, done=done)
