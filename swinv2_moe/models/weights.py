"""Load weights into a model: weights that match exactly, dense weights into a model with experts,
and a classifier into a model with other classes."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from moe_core import ExpertShard, MoELayer, moe_layers
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import read_bounded
from swinv2_moe.models.ffn import as_expert
from swinv2_moe.models.moe_mlp import EXPERTS, MoEMlp
from swinv2_moe.models.protocol import MoEModel
from swinv2_moe.models.section import ModelConfig
from swinv2_moe.models.weight_files import read_weights, unwrapped, without_prefixes

_EMBEDDING = "patch_embed.proj.weight"
# Buffers that are recomputed when a model is built. Weight files of other programs may hold them.
RECOMPUTED = ("relative_coords_table", "relative_position_index", "attn_mask")
_SHOWN = 3  # names of each kind in a message about weights that do not fit
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_BYTES = 1 << 26  # limit of a class map
_MAX_DIGITS = 9


def load_strict(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Load `state` if it matches the model exactly; otherwise change nothing.

    Raises:
        UserError: `state` does not match; the message names `source` and how many keys are
            missing, unexpected, of another shape and of another kind of dtype, with the first three
            of each. Or `state`
            has a value that is NaN or infinite; the message names the first tensor with such a
            value.
    """
    _check_fit(model, state, source)
    check_finite(state, source)
    model.load_state_dict(state)


def _check_fit(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    problems = compare(model.state_dict(), state)
    if problems:
        raise UserError(f"{source} does not fit the model: {problems}; nothing was loaded")


def compare(expected: dict[str, Tensor], state: dict[str, Tensor]) -> str:
    """The differences that prevent loading `state` in place of `expected`, in one line with the
    first names of each kind; "" if there are none."""
    missing, reshaped, not_float = [], [], []
    for key, target in expected.items():
        if key not in state:
            missing.append(key)
            continue
        tensor = state[key]
        if tensor.shape != target.shape:
            shapes = f"{list(tensor.shape)} there, {list(target.shape)} in the model"
            reshaped.append(f"{key} ({shapes})")
        if target.is_floating_point() and tensor.dtype not in _FLOATS:
            not_float.append(key)
    differences = {
        "missing": missing,
        "unexpected": [_printable(key) for key in state if key not in expected],
        "of another shape": reshaped,
        "not of floating point": not_float,
    }
    parts = []
    for what, keys in differences.items():
        if keys:
            more = ", ..." if keys[_SHOWN:] else ""
            parts.append(f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{more}")
    return "; ".join(parts)


def check_finite(tensors: dict[str, Tensor], source: str) -> None:
    """Raise UserError if a value is NaN or infinite in fp32; the message names the first such
    tensor."""
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.dtype not in _FLOATS:
            continue
        # If a value is NaN, minimum and maximum are NaN.
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
    fit: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda dense: dense,
) -> list[str]:
    """Load dense weights (a dict, .safetensors or .pth) into a model with experts.

    Accepts the layouts of the model's `convert_dense`. Weights outside of MoE blocks load
    unchanged. With `upcycle`, the dense FFN of a MoE block is copied to every expert; otherwise it
    is ignored and the experts keep their values. Routers always keep their values. Source: sparse
    upcycling, arXiv 2212.05055.

    Args:
        fit: changes the weights, under timm's names, before they are compared with the model's.

    Returns:
        The model's keys that the dense weights do not cover.

    Raises:
        UserError: the file cannot be read, or the weights do not match; nothing is loaded.
    """
    if isinstance(source, dict):
        name = "the given weights"
        dense = without_prefixes(unwrapped(source), name)
    else:
        name = f"weights {source}"
        dense = read_weights(Path(source))
    _check_values(dense, model, name)
    dense = fit(model.convert_dense(dense, name))
    dense |= rank_experts(dense, model)  # for a file of a model with experts
    layers = moe_layers(model)
    if upcycle and any(EXPERTS in key for key in dense):
        raise UserError(f"{name}: has experts; MODEL.UPCYCLE makes experts of dense weights")
    ffns = _pop_ffns(dense, model)
    if upcycle:
        _check_gates(layers, ffns, name)
        for target, tensor in ffns.items():
            dense[target] = _to_experts(tensor, layers[_layer_name(target)].shard)
    kept = []
    expected = model.state_dict()
    for key in expected:
        # Any other key that `dense` lacks is reported as missing below.
        is_covered = key in dense or (upcycle and EXPERTS in key)
        if ".moe." in key and not is_covered:
            kept.append(key)
            dense[key] = expected[key]
    _check_fit(model, dense, name)
    model.load_state_dict(dense)
    return kept


def _check_gates(layers: dict[str, MoELayer], ffns: Collection[str], source: str) -> None:
    """Raise UserError where experts are gated and the dense FFN is not: it has no third weight."""
    for name, layer in layers.items():
        is_gated = f"{name}.experts.w3" in ffns
        if layer.config.gated and f"{name}.experts.w1" in ffns and not is_gated:
            raise UserError(
                f"{source}: cannot be copied to the experts of {name}: they are gated"
                " (MODEL.MOE.GATED), and a dense FFN has no third weight"
            )


def rank_experts(state: dict[str, Tensor], model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """This rank's part of expert tensors that are complete in `state` and distributed in
    `model`."""
    parts = {}
    for layer_name, layer in moe_layers(model).items():
        first, count, part, num_parts = layer.shard
        for name, parameter in layer.experts.named_parameters():
            key = f"{prefix}{layer_name}.experts.{name}"
            if key not in state or state[key].shape == parameter.shape:
                continue
            if len(state[key]) == layer.config.num_experts:
                parts[key] = state[key][first : first + count].chunk(num_parts, 1)[part]
    return parts


def to_experts(dense: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert tensors of a dense model: tensors of an MoE block's FFN are copied to each expert.

    The tensors are weights, or an optimiser's moments of the weights.

    Args:
        dense: the tensors under the dense model's names.

    Returns:
        The tensors under the names of `model`, with this rank's experts. Parameters without a dense
        twin (`has_dense_twin`) are missing.
    """
    layers = moe_layers(model)
    tensors = dict(dense)
    for target, tensor in _pop_ffns(tensors, model).items():
        experts = _to_experts(tensor, layers[_layer_name(target)].shard)
        tensors[target] = experts.contiguous()
    return tensors


def has_dense_twin(name: str) -> bool:
    """Whether a parameter is also in the dense model, or is copied from it to experts. Parameters
    of routers and shared experts have no dense twin."""
    return ".moe." not in name or EXPERTS in name


def _pop_ffns(dense: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Remove the FFNs of MoE blocks from `dense`, and return them under the names of the experts'
    parameters."""
    ffns = {}
    for prefix, mlp in model.named_modules():
        if not isinstance(mlp, MoEMlp):
            continue
        own = [key for key in dense if key.startswith(f"{prefix}.") and ".moe." not in key]
        tensors = {key.removeprefix(f"{prefix}."): dense.pop(key) for key in own}
        for name, tensor in as_expert(tensors, mlp.gate_last).items():
            ffns[f"{prefix}{EXPERTS}{name}"] = tensor
    return ffns


def _layer_name(target: str) -> str:
    """The MoE layer that an experts' parameter belongs to."""
    return target.rpartition(".experts.")[0]


def _check_values(dense: dict[str, Tensor], model: nn.Module, source: str) -> None:
    """Raise UserError for weights on which timm's filter fails, or whose errors it would hide."""
    expected = model.state_dict()  # counters of batch norms are integers there, too
    used = {
        name: tensor
        for name, tensor in dense.items()
        if not name.endswith(RECOMPUTED)
        and (name not in expected or expected[name].is_floating_point())
    }
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
    """The rank's part of a dense FFN's tensor along the first dim, expanded to the rank's
    experts."""
    part = tensor.tensor_split(shard.num_parts)[shard.part]
    return part.expand(shard.num_experts, *part.shape)


@torch.no_grad()
def upcycle_layer(layer: MoELayer, expert: Mapping[str, Tensor]) -> None:
    """Copy the tensors of one expert, as of `as_expert`, to this rank's experts."""
    for name, tensor in expert.items():
        layer.experts.get_parameter(name).copy_(_to_experts(tensor, layer.shard))


def _resampled(
    tensors: dict[str, Tensor], expected: dict[str, Tensor], patch_embed: object
) -> dict[str, Tensor]:
    """With position embeddings [1, N, M] of the model's number of patches, as timm resamples them,
    where a checkpoint has those of another one."""
    positions, target = tensors.get("pos_embed"), expected.get("pos_embed")
    grid = getattr(patch_embed, "grid_size", None)
    if positions is None or target is None or grid is None or positions.ndim != 3:
        return tensors
    if positions.shape == target.shape or positions.shape[2:] != target.shape[2:]:
        return tensors
    prefix = target.shape[1] - math.prod(grid)
    patches = positions.shape[1] - prefix
    if prefix < 0 or patches < 1 or math.isqrt(patches) ** 2 != patches:
        return tensors  # the comparison of shapes names them
    resampled = resample_abs_pos_embed(positions, list(grid), num_prefix_tokens=prefix)
    return tensors | {"pos_embed": resampled}


def fit_head(
    tensors: dict[str, Tensor],
    model: MoEModel,
    config: ModelConfig,
    rows: Sequence[int] | None = None,
    num_names: int = 0,
) -> dict[str, Tensor]:
    """Replace the head of pretrained `tensors` as MODEL.CLASS_MAP or `rows` say, and resample a
    ViT's position embeddings for images of another size.

    Without any of these the tensors are returned unchanged.

    Args:
        model: the source of the rows that the pretrained head does not have.
        rows: without this key: for each class of the model, its row in the pretrained head, or
            NO_CLASS.
        num_names: the number of class names of the pretrained head; 0: they are not known.

    Raises:
        UserError: the class map or the names do not match the model or the weights.
    """
    names, expected = model.classifier_names(), model.state_dict()
    tensors = _resampled(tensors, expected, getattr(model, "patch_embed", None))
    if config.class_map == "new":
        return tensors | {name: expected[name] for name in names}
    has_map = config.class_map or rows is not None
    if not has_map or not all(name in tensors for name in names):
        return tensors
    num_pretrained, num_classes = len(tensors[names[0]]), len(expected[names[0]])
    if not config.class_map:
        assert rows is not None
        if num_names not in (0, num_pretrained):
            raise UserError(
                f"MODEL.PRETRAINED {config.pretrained}: its classifier has {num_pretrained} rows,"
                f" with {num_names} class names"
            )
        return tensors | _head_of_rows(tensors, expected, names, rows)
    rows = read_class_map(Path(config.class_map))
    highest = max(rows, default=0)
    if len(rows) != num_classes or highest >= num_pretrained:
        raise UserError(
            f"MODEL.CLASS_MAP {config.class_map}: it has {len(rows)} lines and numbers up to"
            f" {highest}; it must have a line for each of the model's {num_classes} classes, and"
            f" numbers up to {num_pretrained - 1}, the last class of the pretrained weights"
        )
    return tensors | _head_of_rows(tensors, expected, names, rows)


def _head_of_rows(
    tensors: dict[str, Tensor],
    expected: dict[str, Tensor],
    names: Sequence[str],
    rows: Sequence[int],
) -> dict[str, Tensor]:
    """The head's tensors from rows of `tensors`, and of `expected` for rows below 0."""
    chosen = torch.tensor(rows)
    head = {name: tensors[name][chosen.clamp(min=0)] for name in names}
    for name, tensor in head.items():
        tensor[chosen < 0] = expected[name][chosen < 0].to(tensor)
    return head


def read_class_map(file: Path) -> list[int]:
    """Read a class map, such as Swin's map22kto1k.txt or one of `make-class-map`.

    It has one line for each class of the model: the number (from 0) of the class in the pretrained
    weights, or -1 if the weights do not have this class.

    Raises:
        UserError: the file cannot be read, or is not a class map.
    """
    try:
        lines = read_bounded(file, _MAX_BYTES).decode().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"MODEL.CLASS_MAP {file}: cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if line != "-1" and not (line.isdecimal() and len(line) <= _MAX_DIGITS):
            raise UserError(
                f"MODEL.CLASS_MAP {file}: line {number}: {short(line)} is not the number of a class"
            )
    return [int(line) for line in lines]


def larger_than(found: dict[str, Tensor], sizes: Mapping[str, object], group: str) -> str:
    """A phrase that names one of a model's sizes which the tensors `found` rule out; "" if there is
    none. A lower bound, before the model is built, which may take long: a width of w needs at least
    w numbers, a depth of d at least d tensors.

    Args:
        sizes: arguments of the model's class.
        group: the beginning of their names in the message.
    """
    numbers = sum(tensor.numel() for tensor in found.values())
    for name, value in sizes.items():
        limit, unit = numbers, "numbers"
        if re.search("depth|layers|blocks", name):  # each has tensors
            limit, unit = len(found), "tensors"
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if sum(part for part in parts if isinstance(part, int)) > limit:
            return f"{group}{name.upper()} is {short(value)}, the files hold {limit:,} {unit}"
    return ""
