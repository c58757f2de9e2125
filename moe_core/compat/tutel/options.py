"""Reads the dictionaries that describe gates and experts to `tutel.moe.moe_layer`."""

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from moe_core.compat.tutel.experts import FusedExpertsNetwork, LlamaFFNNetwork
from moe_core.compat.tutel.gates import CosineTopKGate, LinearTopKGate
from moe_core.compat.tutel.net import get_world_size

# Environment variables of Tutel that skip a part of the layer, for measurements of the rest.
_UNSUPPORTED_VARIABLES = ("SKIP_A2A", "SKIP_EXPERT")


class Call(NamedTuple):
    """The options of one call of a layer."""

    top_k: int
    capacity_factor: float
    alignment: int  # the capacity is rounded up to a multiple of this number
    inequivalent_tokens: bool  # whether ranks may have different numbers of tokens


GateType = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]

_GATES: dict[str, Callable[..., nn.Module]] = {
    "top": LinearTopKGate,
    "cosine_top": CosineTopKGate,
}
_EXPERTS: dict[str, Callable[..., nn.Module]] = {
    "ffn": FusedExpertsNetwork,
    "llama_ffn": LlamaFFNNetwork,
}
# Options that Tutel has removed, and the replacements that it names.
_REMOVED = {
    "fused_custom_fn": "an experts module of your own",
    "implicit_dropout_p": "dropout in activation_fn and after the layer",
}


def count_local_experts(experts: Mapping[str, Any]) -> int | float:
    """The number of experts of a rank; -n: n ranks share each expert.

    Raises:
        ValueError: the number is 0.
    """
    count = experts.get("count_per_node", experts.get("num_experts_per_device", 1))
    if count == 0:
        raise ValueError("num_experts_per_device (0) must not be 0; -n: n ranks share an expert")
    return count


def global_expert_count(num_local_experts: int | float, group=None) -> int:
    """The number of experts over all ranks of `group`.

    Args:
        num_local_experts: the number of experts of a rank; -n or 1/n: n ranks share each expert.

    Raises:
        ValueError: the number is 0, or n does not divide the number of ranks.
    """
    num_ranks = get_world_size(group)
    count = num_local_experts
    if not isinstance(count, int):
        count = -int(1 / (count + 1e-5))
    if count == 0:
        raise ValueError(f"num_local_experts ({num_local_experts}) must not be 0")
    if count > 0:
        return count * num_ranks
    if num_ranks % -count:
        raise ValueError(
            f"num_local_experts ({num_local_experts}): the {num_ranks} ranks do not divide into"
            f" groups of {-count} that share an expert"
        )
    return num_ranks // -count


def make_experts(
    experts: Mapping[str, Any], model_dim: int, num_local_experts: int, sharded_count: int
) -> nn.Module:
    """The experts module that `experts` describes.

    Raises:
        ValueError: an unknown type, or an option that the type does not have.
    """
    options = dict(experts)
    for name in ("count_per_node", "num_experts_per_device"):
        options.pop(name, None)
    kind = options.pop("type")
    for name, replacement in _REMOVED.items():
        if kind == "ffn" and name in options:
            raise ValueError(f"experts option {name} ({options[name]!r}): use {replacement}")
    options |= {"model_dim": model_dim, "sharded_count": sharded_count}
    if kind == "custom":
        return _make_custom(options.pop("module"), options, num_local_experts)
    if kind not in _EXPERTS:
        raise ValueError(f"experts type ({kind!r}) must be one of {', '.join(_EXPERTS)}, custom")
    try:
        return _EXPERTS[kind](num_experts_per_device=num_local_experts, **options)
    except TypeError as error:
        raise ValueError(f"experts of type {kind!r}: {error}") from error


def _make_custom(
    module: Callable[..., nn.Module], options: dict[str, Any], num_local_experts: int
) -> nn.Module:
    """Create a custom experts module. Older modules take the argument `local_experts`."""
    try:
        return module(num_experts_per_device=num_local_experts, **options)
    except TypeError:
        return module(local_experts=num_local_experts, **options)


def gate_descriptions(gate_type: GateType) -> list[dict[str, Any]]:
    """One dictionary for each gate.

    Raises:
        ValueError: a name does not have the form "Top2Gate".
    """
    if isinstance(gate_type, str | Mapping):
        gate_type = [gate_type]
    descriptions = []
    for description in gate_type:
        if isinstance(description, str):
            match = re.fullmatch(r"Top(\d+)Gate", description)
            if match is None:
                raise ValueError(f"gate_type ({description!r}) must be a dictionary, or 'Top2Gate'")
            description = {"type": "top", "k": int(match[1])}
            warnings.warn(f"gate_type: use {description}", FutureWarning, stacklevel=3)
        descriptions.append(dict(description))
    return descriptions


def make_gate(description: Mapping[str, Any], model_dim: int, num_global_experts: int) -> nn.Module:
    """The gate that a dictionary describes, with `gate_noise` and `capacity_factor`.

    Raises:
        ValueError: an unknown type, or an option that the type does not have.
    """
    options = dict(description)
    kind = options.pop("type")
    if kind == "custom":
        make = options.pop("module")
    elif kind in _GATES:
        make = _GATES[kind]
    else:
        raise ValueError(f"gate type ({kind!r}) must be one of {', '.join(_GATES)}, custom")
    gate = make(model_dim=model_dim, num_global_experts=num_global_experts, **options)
    if not hasattr(gate, "gate_noise"):
        gate.gate_noise = options.get("gate_noise", 0.0)
    if not hasattr(gate, "capacity_factor"):
        default = float(os.environ.get("CAP_FACTOR", 1.0))
        gate.capacity_factor = options.get("capacity_factor", default)
    return gate


def adaptive_degree(parallel_type: str, valid_rs: Sequence[int]) -> int:
    """The r that `parallel_type` names.

    Args:
        valid_rs: 0 and the divisors of the number of ranks that share an expert.

    Raises:
        ValueError: an unknown name, or an r that is not valid.
    """
    most = max(valid_rs)
    if parallel_type.startswith("adaptive:"):
        degree = min(max(int(parallel_type.removeprefix("adaptive:")), 0), most)
        if degree not in valid_rs:
            listed = ", ".join(map(str, valid_rs))
            raise ValueError(f"parallel_type ({parallel_type!r}): r must be one of {listed}")
        return degree
    named = {"data": 1, "auto": 1, "model": most}
    if parallel_type not in named:
        raise ValueError(
            f"parallel_type ({parallel_type!r}) must be 'adaptive:R', or one of {', '.join(named)}"
        )
    return named[parallel_type]


def check_unknown(options: dict[str, Any]) -> None:
    """Check for arguments of `moe_layer` and environment variables that are not supported.

    Raises:
        ValueError: an argument is not supported.
        NotImplementedError: an environment variable is set that is not supported.
    """
    if "pad_samples" in options:
        options.pop("pad_samples")
        warnings.warn("pad_samples has no effect: no sample is padded", FutureWarning, stacklevel=4)
    for name, value in options.items():
        raise ValueError(f"{name} ({value!r}) is not an argument of moe_layer")
    for name in _UNSUPPORTED_VARIABLES:
        if is_set(name):
            raise NotImplementedError(f"{name}={os.environ[name]} has no counterpart here")


def is_set(variable: str) -> bool:
    """Whether an environment variable is set to a number other than 0."""
    return int(os.environ.get(variable, "0")) != 0
