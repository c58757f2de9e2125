"""Compiled libraries in the user's cache directory: compiled once, and loaded only as they were
written."""

import contextlib
import os
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
    """The library `name`, from the cache or made by `compile_to(path)`. Of several processes one
    compiles it.

    A library whose checksum differs from the recorded one is compiled again: loading a truncated
    one would end the process. So is one that another user owns or can write to.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be compiled or written.
    """
    directory = cache_directory()
    library, checksum = directory / name, directory / f"{name}.sha256"
    with exclusive_lock(directory / ".lock"):
        if not _is_as_written(library, checksum):
            unfinished = directory / f"{name}.unfinished"
            unfinished.unlink(missing_ok=True)
            compile_to(unfinished)
            unfinished.chmod(0o700)
            digest = fsync_and_hash(unfinished)["sha256"]
            with atomic_write(checksum, mode=0o600) as file:
                file.write(str(digest).encode())
            unfinished.replace(library)
            fsync(directory)
    return library


def cache_directory() -> Path:
    """The user's; where that cannot be written or trusted, a temporary one that all of the user's
    processes share."""
    # a container's user may have no home: Path.home raises the latter
    with contextlib.suppress(OSError, RuntimeError):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _private(home / "moe_core")
    with contextlib.suppress(OSError):
        return _private(Path(tempfile.gettempdir(), f"moe_core-{os.getuid()}"))
    return Path(tempfile.mkdtemp(prefix="moe_core-"))


def _private(directory: Path) -> Path:
    """The directory, made if need be, in which this user alone can write.

    Raises:
        OSError: it cannot be written, or others can write in it.
    """
    directory.mkdir(0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _belongs_to_this_user(found):
        raise PermissionError(f"{directory} belongs to another user, or others can write in it")
    (directory / ".lock").touch()
    return directory


def _belongs_to_this_user(found: os.stat_result) -> bool:
    """Whether this user owns a file or directory and nobody else can write to it."""
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_as_written(library: Path, checksum: Path) -> bool:
    """Whether the library is there, belongs to this user, and has its recorded checksum."""
    try:
        for file in (library, checksum):
            found = file.lstat()
            if not stat.S_ISREG(found.st_mode) or not _belongs_to_this_user(found):
                return False
        with open_regular(library) as content:
            digest = sha256(read_chunks(content))
        return checksum.read_bytes() == digest.encode()
    except OSError:
        return False
