"""Saves and loads a model's tensors: a safetensors file for the trunk, and one for each expert.

    model.safetensors                     the trunk: tensors that every rank has
    experts/<layer>/<expert>.safetensors  one expert; <expert> is its number in the whole layer

Each rank writes its own experts and reads the experts that it needs. The files do not depend on
the number of ranks.

A save is complete or has no effect:

1. The ranks write and flush their files below `.save-<random>.tmp`.
2. When every rank has done so, one rank renames this directory to `.save`. The save is complete.
3. That rank moves `model.safetensors` and the folder `experts` to their names, in place of those of
   an earlier save. Files of others in the old folder go to the new one.

`load_tensors` reads what is in `.save` rather than that of an earlier save. After step 3 was not
finished, the next save to the directory begins with the rest of it.
"""

# E experts on this rank

import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from moe_core.config import ExpertShard
from moe_core.files import fsync, open_regular, publish_directory
from moe_core.layer import MoELayer
from moe_core.parallel.gather import join_parts
from moe_core.ranks import Ranks
from moe_core.training import local_tensor, moe_layers

TRUNK = "model.safetensors"
_SAVE = ".save"  # a complete save whose files do not have their names yet
_log = logging.getLogger("moe_core")


def expert_file(layer: str, expert: int) -> str:
    """The file of an expert, relative to the directory of `model.safetensors`."""
    return f"experts/{layer or 'layer'}/{expert:04d}.safetensors"


def tensors_by_file(
    model: nn.Module,
    tensors: dict[str, Tensor],
    writes_trunk: bool = True,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (file, tensors) for each file that this rank has to write.

    This is a collective: every rank must iterate to the end. If several ranks share an expert, its
    parts are joined just before it is yielded, so at most one joined expert is in memory. The rank
    with the first part writes the expert. If there are replicas, only the first replica writes.

    Args:
        tensors: any subset of `model.state_dict()`; expert tensors are [E, ...]. The results are
            views of these tensors.
        writes_trunk: whether this rank writes the trunk.

    Raises:
        ValueError: a tensor of experts is not [E, ...].
    """
    trunk = dict(tensors)
    for layer_name, layer in _layers(model).items():
        prefix, shard = _prefix(layer_name), layer.shard
        owned = {
            name.removeprefix(prefix): local_tensor(trunk.pop(name))
            for name in tensors
            if name.startswith(prefix)
        }
        if not owned:
            continue
        for name, tensor in owned.items():
            if tensor.ndim == 0 or tensor.shape[0] != shard.num_experts:
                raise ValueError(
                    f"{prefix}{name} is {list(tensor.shape)}; a tensor of experts is saved in one"
                    f" file for each expert, so it must be [{shard.num_experts}, ...]"
                )
        for e in range(shard.num_experts):
            file = expert_file(layer_name, shard.first_expert + e)
            parts = {name: tensor[e : e + 1] for name, tensor in owned.items()}
            expert = {name: join_parts(part, shard, layer.group)[0] for name, part in parts.items()}
            if layer.group.replica == 0 and shard.part == 0:
                yield file, expert
    if writes_trunk:
        yield TRUNK, trunk


def save_tensors(
    directory: Path, model: nn.Module, tensors: dict[str, Tensor], is_main: bool = True
) -> None:
    """Write `tensors` to `directory`, in the form that `load_tensors` reads.

    It replaces an earlier save in `directory`, whose files stay until all new ones are on the disk.
    If a process is killed, or a file cannot be written, `load_tensors` still reads one whole save.

    This is a collective: every rank calls it, with the same directory on a file system that all
    ranks share.

    Args:
        is_main: whether this rank writes the trunk. Of several such ranks the first one does.
            Ranks that share experts with no such rank write nothing.

    Raises:
        OSError: a file cannot be written, on any rank, or something else has its name.
        ValueError: a tensor of experts is not [E, ...].
    """
    directory = Path(directory)
    name = f"{_SAVE}-{os.urandom(6).hex()}.tmp" if is_main else None
    names = [chosen for chosen in _of_each_rank(model, name) if chosen]
    if not names:
        return
    temporary = directory / names[0]
    writes_trunk = name == names[0]
    try:
        files, error = _write_files(temporary, model, tensors, writes_trunk)
        results = _of_each_rank(model, (files, error and f"{type(error).__name__}: {error}"))
        errors = [problem for _, problem in results if problem]
        if writes_trunk and not errors:
            try:
                _publish(directory, temporary, [file for files, _ in results for file in files])
            except OSError as problem:
                error = problem
    finally:
        if writes_trunk:  # does nothing once the directory has its other name
            shutil.rmtree(temporary, ignore_errors=True)
    errors += [problem for problem in _of_each_rank(model, error and str(error)) if problem]
    if error is not None:
        raise error
    if errors:
        raise OSError(f"{directory} is not saved, since another rank failed: {errors[0]}")


def _of_each_rank(model: nn.Module, value: object) -> list:
    """The `value` of each rank that shares experts of the model with this one."""
    if not dist.is_initialized():
        return [value]
    groups: dict[dist.ProcessGroup | None, Ranks] = {}
    for layer in moe_layers(model).values():
        for ranks in (layer.group.ranks, layer.group.replicas):
            groups[ranks.process_group] = ranks
    values = {dist.get_rank(): value}
    for ranks in groups.values():
        for others in ranks.gather_objects(values, "saving tensors"):
            values |= others
    return [values[rank] for rank in sorted(values)]


def _write_files(
    directory: Path, model: nn.Module, tensors: dict[str, Tensor], writes_trunk: bool
) -> tuple[list[str], Exception | None]:
    """Write this rank's files and flush them to the disk. Returns their names, and the error."""
    files: list[str] = []
    error: Exception | None = None
    try:
        for file, content in tensors_by_file(model, tensors, writes_trunk):
            if error is not None:
                continue  # the other ranks wait for this one's parts of experts
            try:
                write_tensors(directory / file, content)
                fsync(directory / file)
                files.append(file)
            except Exception as problem:
                error = problem
    except Exception as problem:
        error = error or problem
    return files, error


def _publish(directory: Path, temporary: Path, files: list[str]) -> None:
    """Make the files below `temporary` the save in `directory`."""
    for file in files:
        if not (temporary / file).is_file():
            raise OSError(f"{temporary / file} is missing; do all ranks share {directory}?")
    _finish(directory)
    _check_free(directory, files)
    (temporary / "experts").mkdir(exist_ok=True)  # of a model without experts, none are left
    publish_directory(temporary, directory / _SAVE)
    try:
        _finish(directory)
    except OSError as error:
        _log.warning(
            "%s: the save is complete, but its files stay in %s until the next one (%s)",
            directory,
            _SAVE,
            error,
        )
    for leftover in directory.glob(f"{_SAVE}-*.tmp"):  # of killed processes
        shutil.rmtree(leftover, ignore_errors=True)


def _finish(directory: Path) -> None:
    """Move the files of a complete save to their names, if there is one in `_SAVE`."""
    save, experts = directory / _SAVE, directory / "experts"
    if not save.is_dir():
        return
    if (save / TRUNK).exists():
        (save / TRUNK).replace(directory / TRUNK)
    if (save / "experts").exists():
        # The whole folder: an earlier save may have had more layers and experts.
        if os.path.lexists(experts):
            experts.rename(save / "old")
        (save / "experts").rename(experts)
        fsync(directory)
    for path in (save / "old").rglob("*"):
        final = experts / path.relative_to(save / "old")
        is_ours = _is_expert(path) and path.parent.parent == save / "old"
        if (path.is_symlink() or not path.is_dir()) and not (is_ours or final.exists()):
            final.parent.mkdir(parents=True, exist_ok=True)
            path.rename(final)
    if not any(experts.iterdir()):
        experts.rmdir()
    fsync(directory)
    shutil.rmtree(save)


def _check_free(directory: Path, files: list[str]) -> None:
    """Raise OSError if something that is no file of a save has the name of a file, or something
    else than a folder that of its folder."""
    for file in map(Path, [*files, "experts/"]):
        for name in (file, *file.parents):
            path = directory / name
            if os.path.lexists(path) and path.is_dir() == (str(name) in files):
                kind = "a folder" if path.is_dir() else "no folder"
                raise OSError(f"{path} is {kind}, a save needs its name: move it away")


def _current(directory: Path, file: str) -> Path:
    """The path of a file of the complete save in `directory`."""
    # All experts are moved at once: none of an earlier save counts beside them.
    is_unfinished = (directory / _SAVE / Path(file).parts[0]).exists()
    return (directory / _SAVE if is_unfinished else directory) / file


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file; `moe_core.files.fsync` makes it durable.

    Tied tensors are written once for each name.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Tensor] = {}
    storages = set()  # safetensors refuses tensors that share memory
    for name, tensor in tensors.items():
        content = tensor.detach().contiguous()
        if content.untyped_storage().data_ptr() in storages:
            content = content.clone()
        storages.add(content.untyped_storage().data_ptr())
        contents[name] = content
    try:
        save_file(contents, file)
    except SafetensorError as error:  # for example if the disk is full
        raise OSError(f"{file} cannot be written ({error})") from error


def load_tensors(
    directory: Path, model: nn.Module, like: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Read this rank's tensors from `directory` to the CPU, with the names of `model.state_dict()`.

    The caller must compare the tensors with the model. If several ranks share an expert, only this
    rank's part is read.

    Args:
        like: tensors by name. Some may be DTensors, sharded along the first dim as in FSDP2. For
            a DTensor only this rank's rows are read, and the result has the same sharding.

    Raises:
        FileNotFoundError: a file is missing; the message names it.
        ValueError: a file is not a safetensors file, the files of experts have different names, or
            a tensor does not divide over the ranks of an expert. The message names the file.
    """
    directory = Path(directory)
    tensors = _read(
        _current(directory, TRUNK),
        lambda name, content: _read_like(content, (like or {}).get(name)),
    )
    for layer_name, layer in _layers(model).items():
        if not any(_current(directory, "experts").glob("*")):
            continue  # a dense checkpoint: the caller's comparison reports missing tensors
        shard = layer.shard
        files = [
            _current(directory, expert_file(layer_name, shard.first_expert + e))
            for e in range(shard.num_experts)
        ]
        experts = [
            _read(file, lambda name, content: _read_part(content, name, shard))  # noqa: B023
            for file in files
        ]
        for file, expert in zip(files, experts, strict=True):
            if _forms(expert) != _forms(experts[0]):
                raise ValueError(f"{file} does not hold the same tensors as {files[0].name}")
        for name in experts[0]:
            tensors[f"{_prefix(layer_name)}{name}"] = torch.stack(
                [expert[name] for expert in experts]
            )
    return tensors


def count_experts(directory: Path) -> dict[str, int]:
    """The number of expert files of each layer in `directory`."""
    files = _current(directory, "experts").glob("*/*")
    counts = Counter(file.parent.name for file in files if _is_expert(file) and file.is_file())
    return dict(sorted(counts.items()))


def _is_expert(file: Path) -> bool:
    return file.suffix == ".safetensors" and file.stem.isdecimal()


def _forms(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _layers(model: nn.Module) -> dict[str, MoELayer]:
    """The MoE layers by name; one with several names, as in `state_dict`, by each of them."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, MoELayer)}


def _prefix(layer: str) -> str:
    """The prefix of the names of a layer's expert parameters. For "" the model is the layer."""
    if layer:
        return f"{layer}.experts."
    return "experts."


def _read(file: Path, read: Callable[[str, Any], Tensor]) -> dict[str, Tensor]:
    """Read a file. For each tensor `read(name, slice)` returns the part to load."""
    try:
        open_regular(file).close()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{file} is missing") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from error
    try:
        with safe_open(file, "pt") as content:
            return {name: read(name, content.get_slice(name)) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, MemoryError) as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error})") from error
    except ValueError as error:  # raised by `read`
        raise ValueError(f"{file}: {error}") from error


def _read_part(content, name: str, shard: ExpertShard) -> Tensor:
    """A shard's part of one expert's tensor."""
    if shard.num_parts == 1:
        return content[...]
    shape = content.get_shape()
    if len(shape) == 0:
        raise ValueError(f"{name} is a scalar, which does not divide over {shard.num_parts} ranks")
    length = shape[0]
    if length % shard.num_parts:
        raise ValueError(
            f"{name} has {length} entries, which do not divide over {shard.num_parts} ranks"
        )
    part_length = length // shard.num_parts
    start = shard.part * part_length
    return content[start : start + part_length]


def _read_like(content, like: Tensor | None) -> Tensor:
    """The full tensor; if `like` is sharded along the first dim, this rank's rows of it."""
    shape = content.get_shape()
    if (
        not isinstance(like, DTensor)
        or list(like.shape) != shape
        or list(like.placements) != [Shard(0)]
    ):
        return content[...]
    mesh = like.device_mesh
    rows_per_rank = -(-shape[0] // mesh.size())  # rounded up, as in torch.chunk and FSDP2
    first = min(mesh.get_local_rank() * rows_per_rank, shape[0])
    local = content[first : first + rows_per_rank].to(like.device)
    return DTensor.from_local(local, mesh, like.placements, shape=like.shape, stride=like.stride())
