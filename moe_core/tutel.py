"""State dicts of Tutel's MoE layers, of one process or of each rank of many, and those of MoELayer.

    Tutel, below a layer's name            here
    experts.batched_fc1_w [E, H, M]        experts.w1
    experts.batched_fc1_bias [E, H]        experts.b1     legacy: [E, 1, H]
    experts.batched_fc2_w [E, H, M]        experts.w2
    experts.batched_fc2_bias [E, M]        experts.b2     legacy: [E, 1, M]
    gates.0.wg.weight [E, M]               router.weight  several gates: gates.1 is router.1, and so
    on gates.0.cosine_projector.{weight,bias} router.projector.{weight,bias}
    gates.0.{temperature,sim_matrix}       router.{temperature,sim_matrix} _num_global_experts, a
    scalar          the number of experts; legacy: absent

Source: the modules of Tutel's public code (experts/ffn.py, gates/{top,cosine_top}.py,
impls/moe_layer.py); for the legacy form the released Swin-MoE files. Over W ranks each has E/W
whole experts or, with E < W, one of the s = W/E hidden slices of expert rank // s; the second bias
is sliced along M, which is padded up to a multiple of s.
"""

# E experts, W ranks, s = W / E slices of an expert, M model dim, H hidden dim

import re
from collections.abc import Iterator, Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, cat, tensor

_EXPERTS = {
    "batched_fc1_w": "w1",
    "batched_fc1_bias": "b1",
    "batched_fc2_w": "w2",
    "batched_fc2_bias": "b2",
}
_GATE = {
    name: name.replace("cosine_", "")
    for name in ("cosine_projector.weight", "cosine_projector.bias")
}
_GATE |= {"wg.weight": "weight", "temperature": "temperature", "sim_matrix": "sim_matrix"}
_ROUTER = {ours: theirs for theirs, ours in _GATE.items()}
_COUNT = "_num_global_experts"


def count_tutel_experts(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of experts over all ranks of every Tutel layer in a rank's state dict, by the
    layer's name.

    Raises:
        ValueError: a layer whose gates and `_num_global_experts` differ, or which has neither.
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
            candidates[_COUNT] = count.item() if count.numel() == 1 else list(count.shape)
        num_experts = next(iter(candidates.values()), None)
        is_same = all(number == num_experts for number in candidates.values())
        if not isinstance(num_experts, int) or num_experts < 1 or not is_same:
            listed = ", ".join(f"{name}: {number}" for name, number in candidates.items())
            reason = listed or f"neither gates nor {_COUNT}"
            raise ValueError(f"{_named(layer)}: how many experts is not clear ({reason})")
        counts[layer.removesuffix(".")] = num_experts
    return counts


def from_tutel(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One state dict with MoELayer's names from those of all ranks, in order; [whole] where there
    is but one.

    Names that are not a Tutel layer's stay, with the first rank's tensors. A layer always has both
    biases. With one rank tensors are views of the given ones; otherwise experts are copied, one
    tensor at a time.

    Raises:
        ValueError: ranks that hold different tensors or do not add up to the number of experts, a
            tensor under both names; what `count_tutel_experts` raises. The message names the tensor
            or the layer.
    """
    state = dict(states[0])
    for layer, num_experts in count_tutel_experts(state).items():
        prefix = ""
        if layer:
            prefix = f"{layer}."
        for theirs, ours in _EXPERTS.items():
            name = f"{prefix}experts.{theirs}"
            whole = _join(
                name, [_piece(name, rank, own) for rank, own in enumerate(states)], num_experts
            )
            if ours == "b2":  # without what pads it
                whole = whole[:, : state[f"{prefix}experts.w1"].shape[2]]
            _replace(state, name, f"{prefix}experts.{ours}", whole)
        gates = list(_gates(state, prefix))
        is_only = len({gate for gate, _, _ in gates}) == 1
        for gate, name, value in gates:
            router = "router" if is_only else f"router.{gate}"
            _replace(
                state, f"{prefix}gates.{gate}.{name}", f"{prefix}{router}.{_GATE[name]}", value
            )
        state.pop(prefix + _COUNT, None)
    return state


def to_tutel(
    state: Mapping[str, Tensor], num_ranks: int = 1, legacy: bool = False
) -> list[dict[str, Tensor]]:
    """The inverse of `from_tutel`: the state dict of each of `num_ranks` ranks, as views wherever
    possible.

    Biases that a layer does not have become zeros, which Tutel needs. A list of one router becomes
    `gates.0`, which `from_tutel` takes for a single router.

    Args:
        state: whole experts, as one process has them.
        legacy: 3-D biases and no `_num_global_experts`.

    Raises:
        ValueError: `num_ranks` that experts, or the hidden dim of one, cannot be divided over.
    """
    rest, pieces = dict(state), {}
    for prefix in _layers(state, "experts.w1"):
        num_experts, hidden_dim, model_dim = state[f"{prefix}experts.w1"].shape
        _check_ranks(num_experts, hidden_dim, num_ranks, _named(prefix))
        for theirs, ours in _EXPERTS.items():
            whole = rest.pop(f"{prefix}experts.{ours}", None)
            if whole is None:
                whole = state[f"{prefix}experts.w1"].new_zeros(
                    num_experts, hidden_dim if ours == "b1" else model_dim
                )
            whole = _split(whole, num_ranks)  # [W, E/W or 1, ...]
            is_3d = legacy and theirs.endswith("bias")
            pieces[f"{prefix}experts.{theirs}"] = whole.unsqueeze(2) if is_3d else whole
        for name in [name for name in rest if name.startswith(f"{prefix}router.")]:
            match = re.fullmatch(r"router\.(?:(\d+)\.)?(.+)", name.removeprefix(prefix))
            if match and match[2] in _ROUTER:
                _replace(
                    rest, name, f"{prefix}gates.{match[1] or 0}.{_ROUTER[match[2]]}", rest[name]
                )
        if not legacy:
            rest[prefix + _COUNT] = tensor(num_experts)
    return [
        rest | {name: whole[rank] for name, whole in pieces.items()} for rank in range(num_ranks)
    ]


def _layers(state: Mapping[str, Tensor], ending: str) -> list[str]:
    """What comes before `ending` in the names that have it as whole words: "blocks.1.moe.", or ""
    for a layer alone."""
    return [name.removesuffix(ending) for name in state if f".{name}".endswith(f".{ending}")]


def _named(prefix: str) -> str:
    return prefix.removesuffix(".") or "the layer"


def _replace(state: dict[str, Tensor], old: str, new: str, value: Tensor) -> None:
    if new in state:
        raise ValueError(f"{new} is there beside {old}")
    del state[old]
    state[new] = value


def _gates(state: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[int, str, Tensor]]:
    """(number, Tutel's name, tensor) of what the gates below `prefix` hold; a gate of one's own is
    not known here."""
    for name, value in state.items():
        match = (
            re.fullmatch(r"gates\.(\d+)\.(.+)", name.removeprefix(prefix))
            if name.startswith(prefix)
            else None
        )
        if match and match[2] in _GATE:
            yield int(match[1]), match[2], value


def _piece(name: str, rank: int, state: Mapping[str, Tensor]) -> Tensor:
    """A rank's weight [E/W, H, M] or bias [E/W, H]."""
    if name not in state:
        raise ValueError(f"rank {rank} has no {name}")
    value = state[name]
    if name.endswith("bias") and value.ndim == 3 and value.shape[1] == 1:
        value = value.squeeze(1)
    if value.ndim != (2 if name.endswith("bias") else 3):
        raise ValueError(
            f"rank {rank}: {name} has shape {list(value.shape)}, which is not one of Tutel's"
        )
    return value


def _join(name: str, pieces: list[Tensor], num_experts: int) -> Tensor:
    """The ranks' [E/W, ...], or [1, H/s, ...] each, to [E, H, ...]."""
    shapes = [list(piece.shape) for piece in pieces]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(f"{name} has shape {shape} on rank {rank}, {shapes[0]} on rank 0")
    ranks, local_experts = len(pieces), shapes[0][0]
    if ranks * local_experts == num_experts:
        if ranks > 1:
            return cat(pieces)
        return pieces[0]
    if local_experts == 1 and ranks % num_experts == 0:
        return cat(pieces).unflatten(0, (num_experts, -1)).flatten(1, 2)
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
            " expert:"
            f" {num_experts} experts over {num_ranks} ranks"
        )


def _split(whole: Tensor, num_ranks: int) -> Tensor:
    """[E, H, ...] to [W, E/W, H, ...] or, with E < W, to [W, 1, H/s, ...] with H padded up to a
    multiple of s."""
    num_experts = len(whole)
    if num_experts >= num_ranks:
        return whole.unflatten(0, (num_ranks, -1))
    parts = num_ranks // num_experts
    if whole.shape[1] % parts:  # a second bias: the hidden dim has been checked
        whole = F.pad(whole, (0, -whole.shape[1] % parts))
    return whole.unflatten(1, (parts, -1)).flatten(0, 1).unsqueeze(1)
