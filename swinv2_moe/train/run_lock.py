"""The lock of a run directory, which one run at a time may write to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from moe_core.files import try_lock
from swinv2_moe.errors import UserError
from swinv2_moe.train.distributed import World

_NAME = ".lock"
_TRIES = 100  # each fails only where another run ends at that moment and removes the lock


@contextmanager
def only_run(directory: Path, world: World, option: str = "--output") -> Iterator[None]:
    """Keep other runs out of `directory` until the end of the block. Every rank calls this.

    Take the lock before looking at what lies in the directory: until then another run may write or
    remove checkpoints. Directories that are missing are made. If the block leaves nothing in them,
    they are removed again.

    Args:
        option: what messages call the directory.

    Raises:
        UserError: another run is there, or the directory cannot be made or written to.
    """
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    lock, problem = None, None
    if world.is_main:
        try:
            lock = _acquire(directory, option)
        except UserError as error:
            problem = str(error)
    try:
        if problem := world.agree(problem):
            raise UserError(problem)
        yield
    finally:
        if lock is not None:
            _release(lock, directory, missing)


def _acquire(directory: Path, option: str) -> TextIO:
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise UserError(f"{option} {directory}: {existing} is a file, a run needs a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{option} {directory}: permission denied to write in {existing}")
    try:
        lock = _lock(directory)
    except OSError as error:
        raise UserError(f"{option} {directory}: cannot be written ({error.strerror})") from error
    if lock is None:
        raise UserError(f"{option} {directory}: another run is writing there")
    return lock


def _lock(directory: Path) -> TextIO | None:
    """The locked file in `directory`; None if another process holds the lock."""
    for _ in range(_TRIES):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            file = (directory / _NAME).open("a")
        except FileNotFoundError:  # a run that ends has just removed the directory
            continue
        if not try_lock(file.fileno(), inherited=False):
            file.close()
            return None
        if _is_file_at(file, directory / _NAME):
            return file
        file.close()  # a run that ended removed this file after it was opened here
    return None


def _is_file_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _release(lock: TextIO, directory: Path, missing: list[Path]) -> None:
    """Unlock, after removing what `only_run` has made if nothing else lies there."""
    with suppress(OSError):
        if os.listdir(directory) == [_NAME]:
            (directory / _NAME).unlink()
            for path in missing:
                path.rmdir()
    lock.close()
