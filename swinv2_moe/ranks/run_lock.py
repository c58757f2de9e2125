"""A lock that keeps two runs from writing to the same directory.

On a file system without locks it is an owner file.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from moe_core.files import try_lock
from swinv2_moe.errors import UserError
from swinv2_moe.owner_file import owner_file
from swinv2_moe.ranks.world import World

_NAME = ".lock"
# An attempt fails only if another run ends at that moment and removes the lock file.
_MAX_ATTEMPTS = 100


@contextmanager
def only_run(directory: Path, world: World) -> Iterator[None]:
    """Lock `directory` until the end of the block. Collective.

    Take the lock before reading the directory, since another run may write or remove checkpoints
    until then. Missing directories are created, and removed at the end if they are still empty.

    Raises:
        UserError: another run holds the lock, or the directory cannot be created or written to.
    """
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    lock = None
    problem = None
    if world.is_main:
        try:
            lock = _acquire(directory)
        except UserError as error:
            problem = str(error)
    try:
        problem = world.agree(problem)
        if problem:
            raise UserError(problem)
        yield
    finally:
        if lock is not None:
            _release(lock, directory, missing)


def _acquire(directory: Path) -> ExitStack:
    name = f"--output {directory}"
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise UserError(f"{name}: {existing} is a file, a run needs a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{name}: permission denied to write in {existing}")
    try:
        lock = _lock(directory, name)
    except OSError as error:
        raise UserError(f"{name}: cannot be written ({error.strerror})") from error
    if lock is None:
        raise UserError(f"{name}: another run is writing there")
    return lock


def _lock(directory: Path, name: str) -> ExitStack | None:
    """The lock of `directory`, to be closed; None if another process holds it."""
    for _ in range(_MAX_ATTEMPTS):
        directory.mkdir(parents=True, exist_ok=True)
        lock = ExitStack()
        try:
            file = lock.enter_context((directory / _NAME).open("a"))
        except FileNotFoundError:  # a run has just ended and removed the directory
            continue
        try:
            is_locked = try_lock(file.fileno(), inherited=False)
        except OSError as error:
            lock.enter_context(owner_file(directory, error, name))
            return lock
        if not is_locked:
            lock.close()
            return None
        if _is_file_at(file, directory / _NAME):
            return lock
        lock.close()  # a run has ended and removed this file since it was opened
    return None


def _is_file_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _release(lock: ExitStack, directory: Path, missing: list[Path]) -> None:
    """Remove the lock, which says to others that the run has ended, and the directories that
    `only_run` created if they are empty."""
    with suppress(OSError):
        (directory / _NAME).unlink()
    lock.close()
    with suppress(OSError):
        if not os.listdir(directory):
            for path in missing:
                path.rmdir()
