"""Files of weights, for the whole model or for each rank.

They are found by name, read without running code in them, and written all or none.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_core.files import fsync, temporary_name
from swinv2_moe.errors import UserError
from swinv2_moe.models.weight_files import read_weights

_MEMBER = re.compile(r"(?P<stem>.+)\.(rank\d+|master|global)")


class Sources(NamedTuple):
    """The files of a model's weights.

    Either one file of the whole model (`path` itself), or one for each rank and perhaps `master`,
    which holds what the ranks share.
    """

    path: Path
    ranks: list[Path]
    master: Path | None = None

    def missing(self, num_ranks: int) -> str:
        """The names of the files that are missing for `num_ranks` ranks."""
        return _names(self.path, range(len(self.ranks), num_ranks))


def find_sources(path: Path) -> Sources:
    """Find the files of a model. `path` names one of them, or is the prefix X of the following
    names.

    X.global is the whole model. X.rank0, X.rank1, ... and X.master are the files of several ranks.
    In place of the ending, `{rank}` may stand anywhere in the file's name, as in Tutel's tools.

    Raises:
        UserError: no file, a directory, both forms, or a missing file of a rank.
    """
    match = _MEMBER.fullmatch(path.name)
    if path.is_dir():
        raise UserError(f"{path}: is a directory; name one of the files in it")
    # A .global file that does not exist is reported when it is read.
    if path.name.endswith(".global") or (match is None and path.exists()):
        return Sources(path, [path])
    stem = path
    if match is not None:
        stem = path.with_name(match["stem"])
    whole_model = stem.with_name(f"{stem.name}.global")
    ranks = _existing_ranks(stem)
    if match is None and whole_model.is_file():
        if ranks:
            other = rank_file(stem, min(ranks))
            raise UserError(f"{path}: there are both {whole_model.name} and {other.name}; name one")
        return Sources(whole_model, [whole_model])
    master = None
    if stem.with_name(f"{stem.name}.master").is_file():
        master = stem.with_name(f"{stem.name}.master")
    if not ranks and master is None:
        first = rank_file(stem, 0)
        raise UserError(
            f"{path}: no such file, and no {first.name} or {whole_model.name} beside it"
        )
    missing = [rank for rank in range(max(len(ranks), 1)) if rank not in ranks]
    if missing:
        raise UserError(f"{path}: missing {_names(stem, missing)}")
    return Sources(stem, [rank_file(stem, rank) for rank in sorted(ranks)], master)


def _names(path: Path, ranks: Iterable[int]) -> str:
    return ", ".join(rank_file(path, rank).name for rank in ranks)


def rank_file(path: Path, rank: int) -> Path:
    """The file of a rank: `path` with .rank0, ... appended, or with `{rank}` replaced."""
    return path.with_name(_template(path).replace("{rank}", str(rank)))


def _template(path: Path) -> str:
    if "{rank}" in path.name:
        return path.name
    return f"{path.name}.rank{{rank}}"


def _existing_ranks(path: Path) -> set[int]:
    pattern = re.escape(_template(path)).replace(r"\{rank\}", r"(0|[1-9]\d*)")
    try:
        matches = [re.fullmatch(pattern, name) for name in os.listdir(path.parent)]
    except OSError as error:
        raise UserError(f"{path.parent}: {(error.strerror or str(error)).lower()}") from error
    return {int(match[1]) for match in matches if match}


def read_states(sources: Sources) -> list[dict[str, Tensor]]:
    """Read the complete state dict of each rank.

    The ranks share the memory of `master`'s tensors. Tensors stay in their files until used.

    Raises:
        UserError: a file that cannot be read, a missing master file, ranks with different names.
    """
    shared = {}
    if sources.master:
        shared = read_weights(sources.master)
    states = [shared | read_weights(file) for file in sources.ranks]
    if not sources.master and all(".experts." in name for name in states[0]):
        raise UserError(
            f"{sources.ranks[0]}: holds experts alone, and {sources.path.name}.master is missing"
        )
    for file, state in zip(sources.ranks, states, strict=True):
        different = sorted(state.keys() ^ states[0].keys())
        if different:
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
    """Write all files under temporary names and rename them once all are on the disk.

    Contents are dictionaries of tensors for .safetensors, and any object for torch.save.

    Raises:
        UserError: a file cannot be written; no file is left behind.
    """
    temporaries: dict[Path, Path] = {}
    try:
        for path, content in contents:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporaries[path] = temporary_name(path)
            if path.suffix == ".safetensors":
                save_file(content, temporaries[path], metadata)
            else:
                torch.save(content, temporaries[path])
            fsync(temporaries[path])
        for path in temporaries:
            check_new(path)  # another process may have written it meanwhile
        for path, temporary in temporaries.items():
            temporary.rename(path)
    # torch and safetensors raise the last two on a full disk.
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--output {path}: cannot be written ({reason})") from error
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def compact(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that are parts of larger ones, whose whole storage torch.save would write."""
    compacted = {}
    for name, tensor in state.items():
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.contiguous().clone()
        compacted[name] = tensor
    return compacted
