"""Safe reading of files from other programs, atomic writing, checksums and locks.

Reading opens regular files only. A write survives a crash: it goes to a temporary name, then
fsync, rename, and fsync of the directory.
"""

import errno
import fcntl
import hashlib
import logging
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

CHUNK = 1 << 20  # bytes that are read at a time
_MAX_HOLDER = 300  # characters of the name of a process that holds a lock
_log = logging.getLogger("moe_core")


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading in binary mode.

    Opening a named pipe would wait for a writer, and reading a device may never end.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; `strerror` says which.
    """
    try:
        # O_NONBLOCK: open() does not wait on a named pipe. It has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # NUL or unencodable characters in the name
        raise OSError(errno.EINVAL, "not a file name", repr(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_chunks(file: BinaryIO, size: int = CHUNK) -> Iterator[memoryview]:
    """The rest of a file in pieces of at most `size` bytes.

    All pieces are views of one buffer: each is valid until the next is requested.
    """
    buffer = memoryview(bytearray(size))
    reader = cast(BufferedReader, file)  # BinaryIO declares no readinto
    while count := reader.readinto(buffer):
        yield buffer[:count]


def sha256(chunks: Iterable[bytes | memoryview]) -> str:
    """The SHA-256 of the concatenated chunks, as a hexadecimal string."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def fsync(path: str | Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_and_hash(path: Path) -> dict[str, int | str]:
    """Flush a file to the disk and compute its checksum.

    Returns:
        The record of the file, `{"bytes": size, "sha256": checksum}`.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": sha256(read_chunks(file))}


def damage(path: Path, record: dict[str, int | str]) -> str | None:
    """Compare a file with the record that `fsync_and_hash` returned for it.

    Returns:
        A phrase that describes the difference; None if the file matches.

    Raises:
        PermissionError: the file may be intact, but cannot be read.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record["bytes"]:
                return f"has {size:,} bytes, {record['bytes']:,} were written"
            if sha256(read_chunks(file)) != record["sha256"]:
                return "is damaged (its checksum differs)"
    except PermissionError:
        raise
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


@contextmanager
def atomic_write(path: str | Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; after the block, fsync and rename it to `path`.

    If the block raises, `path` is unchanged and the temporary file is removed. Of several writers
    of one file the last one wins, and the file is whole at any time.

    Args:
        mode: permissions of a new file, before the umask.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = temporary_name(path)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, mode)

    try:
        with open(temporary, "wb", buffering=CHUNK, opener=opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(temporary.parent)


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename a directory whose files are on the disk, after flushing all directories in it.

    Raises:
        OSError: the directory cannot be renamed.
    """
    for path in temporary.rglob("*"):
        if path.is_dir():
            fsync(path)
    fsync(temporary)
    temporary.rename(final)
    fsync(final.parent)


def temporary_name(path: str | Path) -> Path:
    """A hidden name beside `path` that no other process uses."""
    path = Path(path)
    # A name has at most 255 bytes, a character up to four.
    return path.with_name(f".{path.name[:50]}.{os.urandom(6).hex()}.tmp")


def remove_leftovers(directory: str | Path) -> None:
    """Remove what killed processes left under names of `temporary_name`, in a directory and below.

    Files that cannot be removed stay. No other process may write in the directory.
    """
    with suppress(OSError):
        for file in Path(directory).rglob(f".*.{'[0-9a-f]' * 12}.tmp"):
            file.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(path: str | Path) -> Iterator[bool]:
    """Acquire the lock of a file, and hold it until the block ends.

    The file is created if it is missing, and never removed. It names the process that holds the
    lock. If that is another one, a warning in the log names it, and this process waits.

    Yields:
        False, after a warning, if the file system has no locks.

    Raises:
        OSError: the file cannot be opened.
    """
    with open(path, "a+") as file:
        try:
            if not try_lock(file.fileno(), inherited=True):
                file.seek(0)
                name = file.read(_MAX_HOLDER)  # empty until the other process has written it
                holder = ascii(name) if name else "another process"
                _log.warning("waiting for %s, which holds %s", holder, path)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _log.warning("%s: the file system has no locks (%s)", path, error.strerror)
            yield False
            return
        with suppress(OSError):  # a full disk
            os.truncate(path, 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield True


def try_lock(descriptor: int, inherited: bool) -> bool:
    """Lock an open file without waiting.

    Args:
        inherited: whether forked processes share the lock. It is then released when the last of
            these processes ends.

    Returns:
        False if another process holds the lock.

    Raises:
        OSError: the file system has no locks.
    """
    lock = fcntl.flock if inherited else fcntl.lockf
    try:
        lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both errors
        return False
    return True
