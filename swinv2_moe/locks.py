"""One process at a time in a directory: a lock or, on a file system without locks, an owner file.

`.lock` is locked while a process writes in its directory, and removed at the end. `.owner` names
the host and the process that writes. Its time of change is renewed every 10 seconds. A process of
this host counts as ended if the system does not know it, one of another host if the file was not
renewed for a minute (by the clock of the file system).
"""

import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from moe_core.files import try_lock
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines

LOCK, OWNER = ".lock", ".owner"
# An attempt fails only if another process ends at that moment and removes the lock file.
_MAX_ATTEMPTS = 100
_BEAT_SECONDS = 10
_SILENT_SECONDS = 60  # after so long without a beat the owner has ended
_MAX_BYTES = 4096


@contextmanager
def lock(directory: str | Path, name: str = "", inherited: bool = True) -> Iterator[None]:
    """Lock `directory`, which is made if it is missing, until the end of the block.

    Args:
        name: the directory in messages; by default its path.
        inherited: whether processes forked in the block share the lock. If this process is killed,
            it is then held until all of them have ended.

    Raises:
        UserError: another process holds the lock, or the directory cannot be made or written to.
    """
    directory, name = Path(directory), name or str(directory)
    try:
        held = _acquire(directory, name, inherited)
    except OSError as error:
        raise UserError(f"{name}: cannot be written ({error.strerror})") from error
    if held is None:
        raise UserError(f"{name}: another process is writing there")
    with held:
        try:
            yield
        finally:
            with suppress(OSError):
                (directory / LOCK).unlink()


def is_locked(directory: Path) -> bool:
    """Whether another process holds the lock of `directory`. It cannot be known on a disk that is
    full or read-only and has no locks: then True."""
    try:
        with (directory / LOCK).open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):  # as in moe_core.files.try_lock
        return True
    except OSError:  # the file system has no locks
        with suppress(OSError):
            return owner(directory) is not None
        return True
    return False


def _acquire(directory: Path, name: str, inherited: bool) -> ExitStack | None:
    """The lock of `directory`, to be closed; None if another process holds it."""
    for _ in range(_MAX_ATTEMPTS):
        directory.mkdir(parents=True, exist_ok=True)
        held = ExitStack()
        try:
            file = held.enter_context((directory / LOCK).open("a"))
        except FileNotFoundError:  # a process has just ended and removed the directory
            continue
        try:
            is_held = try_lock(file.fileno(), inherited)
        except OSError as error:
            held.enter_context(_owner_file(directory, error, name))
            return held
        if not is_held:
            held.close()
            return None
        if _is_file_at(file, directory / LOCK):
            return held
        held.close()  # a process has ended and removed this file since it was opened
    return None


def _is_file_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _owner_file(directory: Path, reason: OSError, name: str) -> Iterator[None]:
    """Own `directory` until the end of the block. A line on stderr says why.

    Args:
        reason: the error of the lock that this file replaces.
        name: the directory in messages.

    Raises:
        UserError: another process owns the directory.
        OSError: the file cannot be written.
    """
    file = directory / OWNER
    content = json.dumps(_this_process()).encode()
    _create(file, content, name)
    print_lines(
        f"warning: {name}: the file system has no locks ({reason.strerror}); {OWNER} keeps other"
        " processes out",
        file=sys.stderr,
    )
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(file, ended), name="owner file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError, UserError), _taking_over(file, name):
            if file.read_bytes() == content:
                file.unlink()


def owner(directory: Path) -> str | None:
    """The process that owns the directory, for messages; None if none does.

    Raises:
        OSError: this cannot be known, for example because the disk is full.
    """
    file = directory / OWNER
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES)
        age = _now(directory) - file.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        values = json.loads(content)
        host, pid, started = str(values["host"]), int(values["pid"]), float(values["started"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        host, pid, started = "an unknown host", 0, 0.0  # being written, or damaged
    if host == socket.gethostname():
        is_alive = _start_of(pid) == started
    else:
        is_alive = age < _SILENT_SECONDS
    if not is_alive:
        return None
    return f"process {pid} on {host}, last heard of {max(age, 0):.0f} s ago"


def _create(file: Path, content: bytes, name: str) -> None:
    try:
        _write_new(file, content)
        return
    except FileExistsError:
        _refuse_if_owned(file, name)
    with _taking_over(file, name):
        _refuse_if_owned(file, name)  # another process may have taken over since
        with suppress(FileNotFoundError):
            file.unlink()
        try:
            _write_new(file, content)
        except FileExistsError:
            raise UserError(f"{name}: another process has just started to write there") from None


def _write_new(file: Path, content: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def _refuse_if_owned(file: Path, name: str) -> None:
    other = owner(file.parent)
    if other is not None:
        raise UserError(
            f"{name}: another process is writing there ({other}); if it has ended, wait"
            f" {_SILENT_SECONDS} s or remove {file}"
        )


@contextmanager
def _taking_over(file: Path, name: str) -> Iterator[None]:
    """In the block only this process may remove `file`."""
    taking = file.with_name(f"{OWNER}.taking")
    try:
        _write_new(taking, b"")
    except FileExistsError:
        raise UserError(
            f"{name}: another process has just started to write there; if none has, remove {taking}"
        ) from None
    try:
        yield
    finally:
        taking.unlink(missing_ok=True)


def _this_process() -> dict:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _start_of(pid)}


def _start_of(pid: int) -> float | None:
    """When a process of this host started, in seconds since 1970; None if there is none."""
    import psutil  # here, because commands that lock nothing do not need it

    try:
        return psutil.Process(pid).create_time()
    except (psutil.Error, ValueError, OverflowError):
        return None


def _now(directory: Path) -> float:
    """The time by the clock of the directory's file system, in seconds since 1970."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_mtime


def _renew(file: Path, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_SECONDS):
        with suppress(OSError):
            os.utime(file)
