"""A lock that keeps two runs from writing to the same directory."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from swinv2_moe.errors import UserError
from swinv2_moe.locks import lock
from swinv2_moe.ranks.world import World


@contextmanager
def only_run(directory: Path, world: World) -> Iterator[None]:
    """Lock `directory` until the end of the block. Collective.

    Take the lock before reading the directory, since another run may write or remove checkpoints
    until then. Missing directories are created, and removed at the end if they are still empty.

    Raises:
        UserError: another run holds the lock, or the directory cannot be created or written to.
    """
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    problem = None
    with ExitStack() as held:
        if world.is_main:
            held.callback(_remove_empty, missing)
            try:
                _check_writable(directory)
                held.enter_context(lock(directory, f"--output {directory}", inherited=False))
            except UserError as error:
                problem = str(error)
        problem = world.agree(problem)
        if problem:
            raise UserError(problem)
        yield


def _check_writable(directory: Path) -> None:
    name = f"--output {directory}"
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise UserError(f"{name}: {existing} is a file, a run needs a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{name}: permission denied to write in {existing}")


def _remove_empty(directories: list[Path]) -> None:
    with suppress(OSError):
        for path in directories:
            path.rmdir()
