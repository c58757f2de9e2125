"""Converts state dicts between Tutel's MoE layers and MoELayer, for any number of ranks.

    Tutel, below a layer's name            here
    experts.batched_fc1_w [E, H, M]        experts.w1
    experts.batched_fc1_bias [E, H]        experts.b1     legacy: [E, 1, H]
    experts.batched_fc2_w [E, H, M]        experts.w2
    experts.batched_fc2_bias [E, M]        experts.b2     legacy: [E, 1, M]
    gates.0.wg.weight [E, M]               router.weight
    gates.0.cosine_projector.weight        router.projector.weight
    gates.0.cosine_projector.bias          router.projector.bias
    gates.0.temperature                    router.temperature
    gates.0.sim_matrix                     router.sim_matrix
    _num_global_experts, a scalar          the number of experts; legacy: absent

With several gates, gates.0 is router.0, gates.1 is router.1, and so on.

With E >= W, each of W ranks has E/W experts. With E < W, a rank has one of the s = W/E slices of
expert rank // s along the hidden dim. The second bias is sliced along M, padded to a multiple of s.

Source: Tutel's public code (experts/ffn.py, gates/{top,cosine_top}.py, impls/moe_layer.py); for the
legacy form, the released Swin-MoE files.
"""

# E experts, W ranks, s = W / E slices of an expert, M model dim, H hidden dim

import re
from collections.abc import Iterator, Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, cat, tensor

# MoELayer's names by Tutel's names.
_EXPERTS = {
    "batched_fc1_w": "w1",
    "batched_fc1_bias": "b1",
    "batched_fc2_w": "w2",
    "batched_fc2_bias": "b2",
}
_GATE = {
    "wg.weight": "weight",
    "cosine_projector.weight": "projector.weight",
    "cosine_projector.bias": "projector.bias",
    "temperature": "temperature",
    "sim_matrix": "sim_matrix",
}
_ROUTER = {ours: theirs for theirs, ours in _GATE.items()}  # the inverse of _GATE
_COUNT = "_num_global_experts"


def count_tutel_experts(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The total number of experts of each Tutel layer in a rank's state dict, by the layer's name.

    Raises:
        ValueError: the gates of a layer and its `_num_global_experts` differ, or it has neither.
    """
    counts = {}
    for layer in _layers(state, "experts.batched_fc1_w"):
        candidates: dict[str, object] = {}
        for gate, name, value in _gates(state, layer):
            if name in ("wg.weight", "sim_matrix") and value.ndim == 2:
                expert_dim = 0
                if name == "sim_matrix":
                    expert_dim = 1
                candidates[f"gates.{gate}.{name}"] = value.shape[expert_dim]
        if layer + _COUNT in state:
            count = state[layer + _COUNT]
            if count.numel() == 1:
                candidates[_COUNT] = count.item()
            else:
                candidates[_COUNT] = list(count.shape)
        num_experts = next(iter(candidates.values()), None)
        is_same = all(number == num_experts for number in candidates.values())
        if not isinstance(num_experts, int) or num_experts < 1 or not is_same:
            listed = ", ".join(f"{name}: {number}" for name, number in candidates.items())
            reason = listed or f"neither gates nor {_COUNT}"
            raise ValueError(f"{_named(layer)}: how many experts is not clear ({reason})")
        counts[layer.removesuffix(".")] = num_experts
    return counts


def from_tutel(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the state dicts of all ranks into one with MoELayer's names.

    Tensors outside of Tutel layers are taken from the first rank. Each layer must have both biases.
    With one rank the results are views of the given tensors; with several, experts are copied, one
    tensor at a time.

    Args:
        states: one state dict for each rank, in order.

    Raises:
        ValueError: ranks hold different tensors, or a number of experts that does not match the
            layer's; a tensor exists under both names; or what `count_tutel_experts` raises. The
            message names the tensor or the layer.
    """
    state = dict(states[0])
    for layer, num_experts in count_tutel_experts(state).items():
        prefix = ""
        if layer:
            prefix = f"{layer}."
        for theirs, ours in _EXPERTS.items():
            name = f"{prefix}experts.{theirs}"
            shards = [_shard(name, rank, rank_state) for rank, rank_state in enumerate(states)]
            joined = _join(name, shards, num_experts)
            if ours == "b2":  # remove the padding
                model_dim = state[f"{prefix}experts.w1"].shape[2]
                joined = joined[:, :model_dim]
            _replace(state, name, f"{prefix}experts.{ours}", joined)
        gates = list(_gates(state, prefix))
        num_gates = len({gate for gate, _, _ in gates})
        for gate, name, value in gates:
            router = "router"
            if num_gates > 1:
                router = f"router.{gate}"
            old = f"{prefix}gates.{gate}.{name}"
            _replace(state, old, f"{prefix}{router}.{_GATE[name]}", value)
        state.pop(prefix + _COUNT, None)
    return state


def to_tutel(
    state: Mapping[str, Tensor], num_ranks: int = 1, legacy: bool = False
) -> list[dict[str, Tensor]]:
    """The inverse of `from_tutel`: a state dict for each of `num_ranks` ranks, views if possible.

    Tutel needs both biases, so missing ones become zeros. A list of one router becomes `gates.0`,
    which `from_tutel` reads as a single router.

    Args:
        state: of a layer in one process, with all experts.
        legacy: write 3-D biases and no `_num_global_experts`.

    Raises:
        ValueError: the experts, or the hidden dim of one, do not divide over `num_ranks`; gated
            experts, shared experts or Soft MoE, which Tutel does not have.
    """
    remaining = dict(state)
    shards = {}
    for prefix in _layers(state, "experts.w1"):
        if f"{prefix}experts.w3" in state:
            raise ValueError(f"{_named(prefix)} has gated experts, which Tutel does not have")
        for kind, name in (("shared experts", "shared."), ("Soft MoE's slots", "router.slots")):
            if any(each.startswith(prefix + name) for each in state):
                raise ValueError(f"{_named(prefix)} has {kind}, which Tutel does not have")
        num_experts, hidden_dim, model_dim = state[f"{prefix}experts.w1"].shape
        _check_ranks(num_experts, hidden_dim, num_ranks, _named(prefix))
        for theirs, ours in _EXPERTS.items():
            full = remaining.pop(f"{prefix}experts.{ours}", None)
            if full is None:
                length = hidden_dim
                if ours == "b2":
                    length = model_dim
                full = state[f"{prefix}experts.w1"].new_zeros(num_experts, length)
            by_rank = _split(full, num_ranks)  # [W, E/W or 1, ...]
            if legacy and theirs.endswith("bias"):
                by_rank = by_rank.unsqueeze(2)
            shards[f"{prefix}experts.{theirs}"] = by_rank
        for name in [name for name in remaining if name.startswith(f"{prefix}router.")]:
            match = re.fullmatch(r"router\.(?:(\d+)\.)?(.+)", name.removeprefix(prefix))
            if match and match[2] in _ROUTER:
                new = f"{prefix}gates.{match[1] or 0}.{_ROUTER[match[2]]}"
                _replace(remaining, name, new, remaining[name])
        if not legacy:
            remaining[prefix + _COUNT] = tensor(num_experts)
    states = []
    for rank in range(num_ranks):
        states.append(remaining | {name: by_rank[rank] for name, by_rank in shards.items()})
    return states


def _layers(state: Mapping[str, Tensor], ending: str) -> list[str]:
    """The prefixes of the names that end with `ending`: such as "blocks.1.moe.", or "" for the
    state dict of a single layer."""
    return [name.removesuffix(ending) for name in state if f".{name}".endswith(f".{ending}")]


def _named(prefix: str) -> str:
    return prefix.removesuffix(".") or "the layer"


def _replace(state: dict[str, Tensor], old: str, new: str, value: Tensor) -> None:
    if new in state:
        raise ValueError(f"both {old} and {new} are present")
    del state[old]
    state[new] = value


def _gates(state: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[int, str, Tensor]]:
    """(gate's number, Tutel's name, tensor) of the gates below `prefix`, without custom gates."""
    for name, value in state.items():
        if not name.startswith(prefix):
            continue
        match = re.fullmatch(r"gates\.(\d+)\.(.+)", name.removeprefix(prefix))
        if match and match[2] in _GATE:
            yield int(match[1]), match[2], value


def _shard(name: str, rank: int, state: Mapping[str, Tensor]) -> Tensor:
    """A rank's weight [E/W, H, M] or bias [E/W, H]."""
    if name not in state:
        raise ValueError(f"rank {rank} has no {name}")
    value = state[name]
    num_dims = 3
    if name.endswith("bias"):
        num_dims = 2
        if value.ndim == 3 and value.shape[1] == 1:  # legacy
            value = value.squeeze(1)
    if value.ndim != num_dims:
        raise ValueError(
            f"rank {rank}: {name} has shape {list(value.shape)}, it must have {num_dims} dims"
        )
    return value


def _join(name: str, shards: list[Tensor], num_experts: int) -> Tensor:
    """Join the ranks' [E/W, H, ...], or [1, H/s, ...] with E < W, to [E, H, ...]."""
    shapes = [list(shard.shape) for shard in shards]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(f"{name} has shape {shape} on rank {rank}, {shapes[0]} on rank 0")
    ranks, local_experts = len(shards), shapes[0][0]
    if ranks * local_experts == num_experts:
        if ranks > 1:
            return cat(shards)
        return shards[0]
    if local_experts == 1 and ranks % num_experts == 0:
        return cat(shards).unflatten(0, (num_experts, -1)).flatten(1, 2)
    raise ValueError(
        f"{name}: {ranks} ranks with {local_experts} each do not make the {num_experts} experts"
    )


def _check_ranks(num_experts: int, hidden_dim: int, num_ranks: int, layer: str) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks ({num_ranks}) must be at least 1")
    if max(num_experts, num_ranks) % min(num_experts, num_ranks):
        raise ValueError(
            f"the {num_experts} experts of {layer} do not divide over {num_ranks} ranks, nor these"
            " over them"
        )
    parts = max(num_ranks // num_experts, 1)
    if hidden_dim % parts:
        raise ValueError(
            f"hidden_dim ({hidden_dim}) of {layer} must be divisible by the {parts} ranks of one"
            f" expert: {num_experts} experts over {num_ranks} ranks"
        )


def _split(full: Tensor, num_ranks: int) -> Tensor:
    """Split [E, H, ...] into [W, E/W, H, ...]; with E < W into [W, 1, H/s, ...], with H padded to a
    multiple of s."""
    num_experts = len(full)
    if num_experts >= num_ranks:
        return full.unflatten(0, (num_ranks, -1))
    parts = num_ranks // num_experts
    # Only the second bias may need padding: `_check_ranks` has checked the hidden dim.
    if full.shape[1] % parts:
        full = F.pad(full, (0, -full.shape[1] % parts))
    return full.unflatten(1, (parts, -1)).flatten(0, 1).unsqueeze(1)
