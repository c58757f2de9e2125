"""An owner file keeps other processes out of a directory whose file system has no locks.

`.owner` names the host and the process that writes. Its time of change is renewed every 10 seconds.
A process of this host counts as ended if the system does not know it, one of another host if the
file was not renewed for a minute (by the clock of the file system).
"""

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines

OWNER = ".owner"
_BEAT_SECONDS = 10
_SILENT_SECONDS = 60  # after so long without a beat the owner has ended
_MAX_BYTES = 4096


@contextmanager
def owner_file(directory: Path, reason: OSError, name: str) -> Iterator[None]:
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
            raise UserError(f"{name}: another run has just started to write there") from None


def _write_new(file: Path, content: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def _refuse_if_owned(file: Path, name: str) -> None:
    other = owner(file.parent)
    if other is not None:
        raise UserError(
            f"{name}: another run is writing there ({other}); if it has ended, wait"
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
            f"{name}: another run has just started to write there; if none has, remove {taking}"
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
