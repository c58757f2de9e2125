"""Cache of compiled libraries in the user's cache directory, with checksums."""

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from moe_core.files import (
    atomic_write,
    exclusive_lock,
    fsync,
    fsync_and_hash,
    open_regular,
    read_chunks,
    sha256,
)


def compiled_library(name: str, compile_to: Callable[[Path], None]) -> Path:
    """The library `name`, from the cache or compiled by `compile_to(path)`.

    A compiled library needs no lock and no writable cache. If several processes call this, only one
    compiles, unless the file system has no locks. A library is compiled again in two cases: its
    checksum differs from the recorded one (loading a truncated library would crash the process), or
    another user owns the file or can write to it.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be compiled or written.
    """
    for directory in _candidates():
        library = directory / name
        if _is_private(directory) and _is_as_written(library):
            return library
    directory = cache_directory()
    library = directory / name
    with exclusive_lock(directory / ".lock") as is_locked:
        if not _is_as_written(library):
            unfinished = directory / f"{name}.unfinished"
            if not is_locked:  # another process may compile at the same time
                unfinished = directory / f"{name}.{socket.gethostname()}.{os.getpid()}.unfinished"
            unfinished.unlink(missing_ok=True)
            compile_to(unfinished)
            unfinished.chmod(0o700)
            digest = fsync_and_hash(unfinished)["sha256"]
            with atomic_write(_checksum(library), mode=0o600) as file:
                file.write(str(digest).encode())
            unfinished.replace(library)
            fsync(directory)
    return library


def cache_directory() -> Path:
    """The user's cache directory; if it is not writable or not private, a temporary directory."""
    for directory in _candidates():
        with contextlib.suppress(OSError):
            return _private(directory)
    return Path(tempfile.mkdtemp(prefix="moe_core-"))


def _candidates() -> list[Path]:
    """The directories that may hold the cache, the preferred one first."""
    candidates = [Path(tempfile.gettempdir(), f"moe_core-{os.getuid()}")]
    # Path.home raises RuntimeError for a user without a home, as in some containers.
    with contextlib.suppress(RuntimeError):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        candidates.insert(0, home / "moe_core")
    return candidates


def _private(directory: Path) -> Path:
    """Create the directory if necessary, and check that only this user can write in it.

    Raises:
        OSError: this user cannot write in the directory, or others can.
    """
    directory.mkdir(0o700, parents=True, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(f"{directory} belongs to another user, or others can write in it")
    (directory / ".lock").touch()
    return directory


def _is_private(directory: Path) -> bool:
    """Whether this is a directory of this user in which nobody else can write."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and _belongs_to_this_user(status)


def _belongs_to_this_user(status: os.stat_result) -> bool:
    """Whether this user owns a file or directory and nobody else can write to it."""
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _checksum(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _is_as_written(library: Path) -> bool:
    """Whether the library exists, belongs to this user, and has its recorded checksum."""
    checksum = _checksum(library)
    try:
        for file in (library, checksum):
            status = file.lstat()
            if not stat.S_ISREG(status.st_mode) or not _belongs_to_this_user(status):
                return False
        with open_regular(library) as content:
            digest = sha256(read_chunks(content))
        return checksum.read_bytes() == digest.encode()
    except OSError:
        return False
