"""Tensors named like a model's parameters, on disk: one safetensors file for the trunk, one per expert.

    model.safetensors                     what every rank holds
    experts/<layer>/<expert>.safetensors  each expert, under its number in the whole layer

Each rank writes the experts it owns and reads those it needs, so a file says nothing of how many ranks there were.
"""

# E experts on this rank

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moe_core.parallel.gather import join_parts
from moe_core.training import moe_layers


def save_tensors(directory: Path, model: nn.Module, tensors: dict[str, Tensor], is_main: bool = True) -> None:
    """Write `tensors` (names of `model.state_dict()`, any subset) below `directory`; every rank calls this.

    Expert tensors [E, ...] are written by the rank that owns them (of replicas by the first, of ranks that share an
    expert by the one with its first part), the others by the main rank.
    """
    trunk = dict(tensors)
    for layer_name, layer in moe_layers(model).items():
        prefix = _prefix(layer_name)
        owned = {name.removeprefix(prefix): trunk.pop(name) for name in tensors if name.startswith(prefix)}
        owned = {name: join_parts(tensor, layer.shard, layer.group) for name, tensor in owned.items()}
        if layer.group.replica == 0 and layer.shard.part == 0:
            for e in range(layer.shard.num_experts if owned else 0):
                expert = {name: tensor[e] for name, tensor in owned.items()}
                _write(_expert_file(directory, layer_name, layer.shard.first_expert + e), expert)
    if is_main:
        _write(directory / "model.safetensors", trunk)


def load_tensors(directory: Path, model: nn.Module) -> dict[str, Tensor]:
    """Everything below `directory` that concerns this rank, on the CPU, named like `model.state_dict()`.

    What the files hold is returned as it is; comparing it with the model is the caller's part. Of an expert that
    several ranks share, only this rank's part is read.

    Raises:
        FileNotFoundError: no such file, named.
        ValueError: a file that is not safetensors, experts whose files hold different names, or a tensor that does not
            divide over the ranks of an expert; the file is named.
    """
    tensors = _read(directory / "model.safetensors")
    for layer_name, layer in moe_layers(model).items():
        if not (directory / "experts").is_dir():
            continue  # a dense model's: the comparison will tell
        shard = layer.shard
        files = [_expert_file(directory, layer_name, shard.first_expert + e) for e in range(shard.num_experts)]
        experts = [_read(file, shard.part, shard.num_parts) for file in files]
        for file, expert in zip(files, experts, strict=True):
            if {k: v.shape for k, v in expert.items()} != {k: v.shape for k, v in experts[0].items()}:
                raise ValueError(f"{file} does not hold the same tensors as {files[0].name}")
        for name in experts[0]:
            tensors[f"{_prefix(layer_name)}{name}"] = torch.stack([expert[name] for expert in experts])
    return tensors


def count_experts(directory: Path) -> dict[str, int]:
    """How many expert files each layer has below `directory`."""
    layers = sorted((directory / "experts").glob("*")) if (directory / "experts").is_dir() else []
    return {layer.name: len(list(layer.glob("*.safetensors"))) for layer in layers}


def _prefix(layer: str) -> str:
    """What the names of a layer's expert parameters begin with; "" is a layer that is the whole model."""
    return f"{layer}.experts." if layer else "experts."


def _expert_file(directory: Path, layer: str, expert: int) -> Path:
    return directory / "experts" / (layer or "layer") / f"{expert:04d}.safetensors"


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)


def _read(file: Path, part: int = 0, num_parts: int = 1) -> dict[str, Tensor]:
    """The tensors of a file, of each the given part of its first dimension."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing")
    try:
        with safe_open(file, "pt") as content:
            return {name: _part(content.get_slice(name), file, name, part, num_parts) for name in content.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file ({error})") from error


def _part(content, file: Path, name: str, part: int, num_parts: int) -> Tensor:
    if num_parts == 1:
        return content[...]
    length = content.get_shape()[0]
    if length % num_parts:
        raise ValueError(f"{file}: {name} has {length} entries, which do not divide over {num_parts} ranks")
    return content[part * length // num_parts : (part + 1) * length // num_parts]
