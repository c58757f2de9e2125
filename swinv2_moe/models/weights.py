"""Weights into a model: all of them or none, and dense SwinV2 weights into one with experts."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_core import ExpertShard, moe_layers
from swinv2_moe.errors import UserError
from swinv2_moe.models.protocol import MoEModel
from swinv2_moe.models.weight_files import read_weights, unwrapped

_DENSE_FFN = re.compile(r"(?P<block>(.+\.)?blocks\.\d+)\.mlp\.(?P<name>fc[12]\.(weight|bias))")
_EMBEDDING = "patch_embed.proj.weight"
# Buffers that every program recomputes; other files may hold them.
RECOMPUTED = ("relative_coords_table", "relative_position_index", "attn_mask")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IN_EXPERTS = {"fc1.weight": "w1", "fc1.bias": "b1", "fc2.weight": "w2", "fc2.bias": "b2"}


def load_strict(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load `state` if it fits the model exactly; otherwise change nothing.

    Raises:
        UserError: names `source` and every missing key, unexpected key, key of another shape and
            key that holds no floating-point numbers; or the first value that is NaN or infinite.
    """
    _check_fit(model, state, source)
    check_finite(state, source)
    model.load_state_dict(state)


def _check_fit(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    problems = compare(model.state_dict(), state)
    if problems:
        raise UserError(f"{source} does not fit the model: {problems}; nothing was loaded")


def compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """What keeps `found` from taking the place of `expected`, in one line; empty if nothing
    does."""
    common = {key: found[key] for key in expected if key in found}
    missing = [key for key in expected if key not in found]
    unexpected = [_printable(key) for key in found if key not in expected]
    reshaped = [
        f"{key} ({list(tensor.shape)} there, {list(expected[key].shape)} in the model)"
        for key, tensor in common.items()
        if tensor.shape != expected[key].shape
    ]
    other_kind = [
        key
        for key, tensor in common.items()
        if expected[key].is_floating_point() and tensor.dtype not in _FLOATS
    ]
    parts = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("of another shape", reshaped),
        ("not of floating point", other_kind),
    )
    return "; ".join(f"{len(keys)} {what}: {', '.join(keys)}" for what, keys in parts if keys)


def check_finite(tensors: dict[str, Tensor], source: str) -> None:
    """Raise UserError where a value is NaN or infinite, or is so in single precision; names the
    first such tensor."""
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.dtype not in _FLOATS:
            continue
        # either is NaN where any value is
        extremes = torch.stack(tensor.detach().aminmax()).float()
        if not extremes.isfinite().all():
            raise UserError(f"{source}: {_printable(name)} holds values that are NaN or infinite")


def _printable(name: str) -> str:
    if name.isprintable():
        return name
    return repr(name)


def load_dense(
    model: MoEModel,
    source: str | Path | dict[str, Tensor],
    upcycle: bool = False,
    noise: float = 0.0,
    seed: int = 0,
    fit: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda found: found,
) -> list[str]:
    """Load dense weights (a dict, .safetensors or .pth) into a model with experts.

    The layouts are those of the model's `convert_dense`.

    The trunk loads as it is. In MoE blocks the dense FFN goes into every expert if `upcycle`,
    otherwise it is left out and the experts keep their own values; routers keep theirs. (Sparse
    upcycling: arXiv 2212.05055.)

    Args:
        noise: std of what is added to each expert's two weights, in units of the dense weight's own
            std. It follows from `seed`, the layer and the expert's number in it, so it is the same
            on any number of ranks.
        fit: what is done to the weights, under timm's names, before they are compared with the
            model's.

    Returns:
        The model's keys that the dense weights do not cover.

    Raises:
        UserError: a file that cannot be read, weights that do not fit; nothing is loaded then.
    """
    name = "the given weights" if isinstance(source, dict) else f"weights {source}"
    dense = unwrapped(source) if isinstance(source, dict) else read_weights(Path(source))
    _check_values(dense, name)
    dense = fit(model.convert_dense(dense, name))
    expected = model.state_dict()
    layers, kept, ffns = moe_layers(model), [], {}
    for key in list(dense):
        match = _DENSE_FFN.fullmatch(key)
        layer = ""
        if match:
            layer = f"{match['block']}.mlp.moe"
        if layer in layers:
            tensor = dense.pop(key)
            if upcycle:
                target = f"{layer}.experts.{_IN_EXPERTS[match['name']]}"
                # w2 is stored transposed
                ffns[target] = tensor.t() if target.endswith("w2") else tensor
                dense[target] = _to_experts(ffns[target], layers[layer].shard)
    for key in expected:
        # else missing, which is reported
        is_covered = key in dense or (upcycle and ".mlp.moe.experts." in key)
        if ".mlp.moe." in key and not is_covered:
            kept.append(key)
            dense[key] = expected[key]
    _check_fit(model, dense, name)
    model.load_state_dict(dense)
    for target, tensor in ffns.items():
        if noise and target.endswith(("w1", "w2")):
            shard = layers[target.rpartition(".experts.")[0]].shard
            _add_noise(
                model.get_parameter(target), shard, noise * tensor.std().item(), f"{seed} {target}"
            )
    return kept


def _check_values(dense: dict[str, Tensor], source: str) -> None:
    """Raise UserError where timm's filter could not work with the weights, or would hide what is
    wrong with them."""
    used = {name: tensor for name, tensor in dense.items() if not name.endswith(RECOMPUTED)}
    for name, tensor in used.items():
        if tensor.dtype not in _FLOATS:
            raise UserError(
                f"{source}: {_printable(name)} is of {tensor.dtype}, not of floating point"
            )
        if _EMBEDDING in name and tensor.ndim != 4:
            raise UserError(
                f"{source}: {_printable(name)} has shape {list(tensor.shape)}, it must have 4"
                " dimensions"
            )
    check_finite(used, source)


def _to_experts(tensor: Tensor, shard: ExpertShard) -> Tensor:
    """The rank's part of a dense FFN's tensor (of its first dim), repeated for each of its experts
    without a copy."""
    part = tensor.tensor_split(shard.num_parts)[shard.part]
    return part.expand(shard.num_experts, *part.shape)


@torch.no_grad()
def _add_noise(weight: nn.Parameter, shard: ExpertShard, std: float, seed: str) -> None:
    """Noise for weight [E, H, M], or [E, H/s, M] where s ranks share an expert: drawn for whole
    experts, one by one."""
    shape = (weight.shape[1] * shard.num_parts, weight.shape[2])
    for e, own in enumerate(weight):
        digest = hashlib.sha256(f"{seed} {shard.first_expert + e}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        noise = torch.randn(shape, generator=generator).tensor_split(shard.num_parts)[shard.part]
        own.add_(noise.to(own), alpha=std)
