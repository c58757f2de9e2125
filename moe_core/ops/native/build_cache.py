"""Cache of compiled libraries in the user's cache directory, with checksums."""

import contextlib
import mmap
import os
import shlex
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from moe_core.files import (
    atomic_write,
    exclusive_lock,
    fsync,
    fsync_and_hash,
    open_regular,
    read_chunks,
    sha256,
)

_Loaded = TypeVar("_Loaded")


def compiler() -> list[str]:
    """The C++ compiler: $CXX, by default g++.

    Raises:
        OSError: $CXX cannot be split into words.
    """
    command = os.environ.get("CXX") or ""
    try:
        return shlex.split(command) or ["g++"]
    except ValueError as error:
        raise OSError(f"$CXX ({command!r}) is not a command: {error}") from error


def run_compiler(command: list[str]) -> str:
    """Run a command of a compiler. Returns what it prints; bytes that are not UTF-8 are replaced.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be started, or fails.
    """
    done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    return done.stdout


def reason_of(error: Exception) -> str:
    """One line that says why a library cannot be compiled or loaded."""
    output = getattr(error, "stderr", None) or ""  # of the compiler
    lines = [line.strip() for line in f"{output}\n{error}".splitlines()]
    return next(filter(None, lines), type(error).__name__)


def compiled_library(
    name: str, compile_to: Callable[[Path], None], load: Callable[[Path], _Loaded]
) -> _Loaded:
    """What `load(path)` returns for the library `name`, from the cache or compiled by
    `compile_to(path)`.

    A compiled library needs no lock and no writable cache. If several processes call this, only one
    compiles, unless the file system has no locks. A library is compiled again in two cases: its
    checksum differs from the recorded one (loading a truncated library would crash the process), or
    another user owns the file or can write to it. One that is as it was compiled and does not load
    is not compiled again in the same directory: the result would be the same.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be compiled, written or loaded.
    """
    failed: dict[Path, OSError] = {}
    for directory in _candidates():
        library = directory / name
        if _is_private(directory) and _is_as_written(library):
            try:
                return load(library)
            except OSError as error:  # perhaps the directory does not allow execution any more
                failed[library] = error
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
        elif library in failed:
            raise failed[library]
    return load(library)


def cache_directory() -> Path:
    """The user's cache directory; a temporary directory if it is not writable or not private, or
    does not allow the execution of what is in it.

    Raises:
        OSError: no directory allows execution.
    """
    for directory in _candidates():
        with contextlib.suppress(OSError):
            return _private(directory)
    directory = Path(tempfile.mkdtemp(prefix="moe_core-"))
    try:
        _check_execution(directory)
    except OSError:
        directory.rmdir()
        raise
    return directory


def _candidates() -> list[Path]:
    """The directories that may hold the cache, the preferred one first."""
    candidates = []
    # Path.home raises RuntimeError for a user without a home, as in some containers.
    with contextlib.suppress(RuntimeError):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        candidates.append(home / "moe_core")
    with contextlib.suppress(OSError):  # no directory for temporary files is writable
        candidates.append(Path(tempfile.gettempdir(), f"moe_core-{os.getuid()}"))
    return candidates


def _private(directory: Path) -> Path:
    """Create the directory if necessary, and check that only this user can write in it, and that
    libraries in it can be loaded.

    Raises:
        OSError: this user cannot write in the directory, or others can; or it allows no execution.
    """
    directory.mkdir(0o700, parents=True, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(f"{directory} belongs to another user, or others can write in it")
    (directory / ".lock").touch()
    _check_execution(directory)
    return directory


def _check_execution(directory: Path) -> None:
    """Raise OSError unless files in the directory can be mapped for execution, as a library is."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"\0")
        file.flush()
        try:
            mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except OSError as error:
            raise PermissionError(
                f"{directory} does not allow execution (mounted with noexec?): set XDG_CACHE_HOME"
                " or TMPDIR to a directory that does"
            ) from error


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
