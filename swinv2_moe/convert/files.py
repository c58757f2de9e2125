"""Files of weights, one or one of each rank: found by name, read without running code in them,
written all or none."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_core.files import fsync
from swinv2_moe.errors import UserError
from swinv2_moe.models.weight_files import read_weights

_MEMBER = re.compile(r"(?P<stem>.+)\.(rank\d+|master|global)")


class Sources(NamedTuple):
    """The files that a path stands for: one whole model (`path` itself), or one a rank and what all
    ranks share."""

    path: Path
    ranks: list[Path]
    master: Path | None = None

    def missing(self, num_ranks: int) -> str:
        """The files that further ranks would have."""
        return ", ".join(
            rank_file(self.path, rank).name for rank in range(len(self.ranks), num_ranks)
        )


def find_sources(path: Path) -> Sources:
    """X, X.global or X.rank0, X.rank1, ... and X.master, whichever of them or X itself `path`
    names.

    In place of the ending, `{rank}` may stand anywhere in the file's name, as in Tutel's own tools.

    Raises:
        UserError: nothing there, a directory, both forms, or a rank's file that is missing.
    """
    match = _MEMBER.fullmatch(path.name)
    if path.is_dir():
        raise UserError(f"{path}: is a directory; name one of the files in it")
    # or not a file, which will be said
    if path.name.endswith(".global") or (match is None and path.exists()):
        return Sources(path, [path])
    stem = path.with_name(match["stem"]) if match else path
    whole, master = stem.with_name(f"{stem.name}.global"), stem.with_name(f"{stem.name}.master")
    ranks = _ranks_there(stem)
    if match is None and whole.is_file():
        if ranks:
            raise UserError(
                f"{path}: there are both {whole.name} and {rank_file(stem, min(ranks)).name}; name"
                " one"
            )
        return Sources(whole, [whole])
    if not ranks and not master.is_file():
        raise UserError(
            f"{path}: no such file, and no {rank_file(stem, 0).name} or {whole.name} beside it"
        )
    missing = [rank for rank in range(max(len(ranks), 1)) if rank not in ranks]
    if missing:
        raise UserError(
            f"{path}: missing {', '.join(rank_file(stem, rank).name for rank in missing)}"
        )
    return Sources(
        stem,
        [rank_file(stem, rank) for rank in sorted(ranks)],
        master if master.is_file() else None,
    )


def rank_file(path: Path, rank: int) -> Path:
    """The file of a rank where `path` stands for that of all: X.rank0, or what is in the place of
    `{rank}`."""
    return path.with_name(_template(path).replace("{rank}", str(rank)))


def _template(path: Path) -> str:
    if "{rank}" in path.name:
        return path.name
    return f"{path.name}.rank{{rank}}"


def _ranks_there(path: Path) -> set[int]:
    pattern = re.escape(_template(path)).replace(r"\{rank\}", r"(0|[1-9]\d*)")
    try:
        matches = [re.fullmatch(pattern, name) for name in os.listdir(path.parent)]
    except OSError as error:
        raise UserError(f"{path.parent}: {error.strerror.lower()}") from error
    return {int(match[1]) for match in matches if match}


def read_states(sources: Sources) -> list[dict[str, Tensor]]:
    """Each rank's whole state dict; what the ranks share is the same memory. Tensors stay in their
    files until used.

    Raises:
        UserError: a file that cannot be read, no file of what the ranks share, ranks that hold
            different names.
    """
    shared = read_weights(sources.master) if sources.master else {}
    states = [shared | read_weights(file) for file in sources.ranks]
    if not sources.master and all(".experts." in name for name in states[0]):
        raise UserError(
            f"{sources.ranks[0]}: holds experts alone, and {sources.path.name}.master is missing"
        )
    for file, state in zip(sources.ranks, states, strict=True):
        if different := sorted(state.keys() ^ states[0].keys()):
            raise UserError(
                f"{file} and {sources.ranks[0].name} hold different names: {', '.join(different)}"
            )
    return states


def check_new(path: Path) -> None:
    """Raise UserError unless a file or directory can be made at `path`."""
    if path.exists() or path.is_symlink():
        raise UserError(f"--output {path}: already exists")
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise UserError(f"--output {path}: {parent} is not a directory")
    if not os.access(parent, os.W_OK):
        raise UserError(f"--output {path}: no permission to write into {parent}")


def write_files(
    contents: Iterable[tuple[Path, dict]], metadata: dict[str, str] | None = None
) -> None:
    """Write each dictionary of tensors (.safetensors) or object (torch.save) and, when all are on
    the disk, name them.

    Raises:
        UserError: a file cannot be written; none is left behind.
    """
    temporaries: dict[Path, Path] = {}
    try:
        for path, content in contents:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporaries[path] = path.with_name(f".{path.name}.tmp{path.suffix}")
            if path.suffix == ".safetensors":
                save_file(content, temporaries[path], metadata)
            else:
                torch.save(content, temporaries[path])
            fsync(temporaries[path])
        for path, temporary in temporaries.items():
            temporary.rename(path)
    # torch and safetensors on a full disk
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--output {path}: cannot be written ({reason})") from error
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def compact(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, with a copy of each tensor that is a part of a larger one: torch.save would write
    all of that."""
    return {
        name: value
        if value.untyped_storage().nbytes() == value.nbytes
        else value.contiguous().clone()
        for name, value in state.items()
    }
