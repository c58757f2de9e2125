"""Tensors named like a model's parameters, on disk: one safetensors file for the trunk, one per
expert.

    model.safetensors                     what every rank holds
    experts/<layer>/<expert>.safetensors  each expert, under its number in the whole layer

Each rank writes the experts it owns and reads those it needs, so a file says nothing of how many
ranks there were.
"""

# E experts on this rank

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from moe_core.config import ExpertShard
from moe_core.files import open_regular
from moe_core.parallel.gather import join_parts
from moe_core.training import moe_layers

TRUNK = "model.safetensors"


def expert_file(layer: str, expert: int) -> str:
    """The file of an expert, relative to the directory of `model.safetensors`."""
    return f"experts/{layer or 'layer'}/{expert:04d}.safetensors"


def tensors_by_file(
    model: nn.Module,
    tensors: dict[str, Tensor],
    writes_trunk: bool = True,
    only: Collection[str] | None = None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(file, its tensors) of all that this rank has to write of `tensors`, one file after the
    other.

    Every rank runs through it to the end: an expert that several ranks share is joined when its
    turn comes, so no more than one is in memory. It is for the rank with its first part to write;
    of replicas, for the first.

    Args:
        tensors: named as in `model.state_dict()`, any subset; expert tensors are [E, ...]. They
            come back as views.
        writes_trunk: whether what is not an expert's is this rank's to write.
        only: the expert files to go through; None: all.
    """
    trunk = dict(tensors)
    for layer_name, layer in moe_layers(model).items():
        prefix, shard = _prefix(layer_name), layer.shard
        owned = {
            name.removeprefix(prefix): trunk.pop(name)
            for name in tensors
            if name.startswith(prefix)
        }
        for e in range(shard.num_experts if owned else 0):
            file = expert_file(layer_name, shard.first_expert + e)
            if only is None or file in only:
                parts = {name: tensor[e : e + 1] for name, tensor in owned.items()}
                expert = {
                    name: join_parts(part, shard, layer.group)[0] for name, part in parts.items()
                }
                if layer.group.replica == 0 and shard.part == 0:
                    yield file, expert
    if writes_trunk:
        yield TRUNK, trunk


def save_tensors(
    directory: Path, model: nn.Module, tensors: dict[str, Tensor], is_main: bool = True
) -> None:
    """Write `tensors` below `directory`, as `load_tensors` reads them; every rank calls this.

    Raises:
        OSError: a file cannot be written.
    """
    for file, content in tensors_by_file(model, tensors, is_main):
        write_tensors(directory / file, content)


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file; `moe_core.files.fsync` makes it durable.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:  # what it makes of a full disk, for one
        raise OSError(f"{file} cannot be written ({error})") from error


def load_tensors(
    directory: Path, model: nn.Module, like: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Everything below `directory` that concerns this rank, on the CPU, named like
    `model.state_dict()`.

    What the files hold is returned as it is; comparing it with the model is the caller's part. Of
    an expert that several ranks share, only this rank's part is read.

    Args:
        like: tensors of the same names, of which some may be sharded (DTensors on their first dim,
            as FSDP2 makes them): of those only this rank's rows are read, and come back sharded
            likewise.

    Raises:
        FileNotFoundError: no such file, named.
        ValueError: a file that is not safetensors, experts whose files hold different names, or a
            tensor that does not divide over the ranks of an expert; the file is named.
    """
    tensors = _read(
        directory / TRUNK, lambda name, content: _read_like(content, (like or {}).get(name))
    )
    for layer_name, layer in moe_layers(model).items():
        if not (directory / "experts").is_dir():
            continue  # a dense model's: the comparison will tell
        shard = layer.shard
        files = [
            directory / expert_file(layer_name, shard.first_expert + e)
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
    """How many expert files each layer has below `directory`."""
    layers = sorted(directory.glob("experts/*"))
    return {layer.name: len(list(layer.glob("*.safetensors"))) for layer in layers}


def _forms(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _prefix(layer: str) -> str:
    """What the names of a layer's expert parameters begin with; "" is a layer that is the whole
    model."""
    if layer:
        return f"{layer}.experts."
    return "experts."


def _read(file: Path, read: Callable[[str, Any], Tensor]) -> dict[str, Tensor]:
    """What `read` takes of each tensor of a file, given its name and what reads slices of it."""
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
    except ValueError as error:  # read's
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
    return content[
        shard.part * length // shard.num_parts : (shard.part + 1) * length // shard.num_parts
    ]


def _read_like(content, like: Tensor | None) -> Tensor:
    """The whole tensor, or this rank's rows of it where `like` has only those."""
    shape = content.get_shape()
    if (
        not isinstance(like, DTensor)
        or list(like.shape) != shape
        or list(like.placements) != [Shard(0)]
    ):
        return content[...]
    mesh = like.device_mesh
    each = -(-shape[0] // mesh.size())  # as torch.chunk cuts, and so FSDP2
    first = min(mesh.get_local_rank() * each, shape[0])
    local = content[first : first + each].to(like.device)
    return DTensor.from_local(local, mesh, like.placements, shape=like.shape, stride=like.stride())
