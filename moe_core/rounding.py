"""Token rounding: in training, each expert gets a multiple of a tile's rows.

No tile of the experts' matrix products is then partly empty.

1. Every token has one additional choice, its most probable other expert. This choice may fill a
   tile.
2. The number of an expert's rows is the number of its choices, rounded to the nearest multiple of
   `round_to`; half a tile is rounded up. It is rounded down if the expert has too few additional
   choices or its capacity is too small.
3. An expert drops its least probable choices, or adds its most probable additional ones.

An expert chosen by less than half a tile of tokens gets no rows. So `round_to` should be well below
K * T / E; otherwise `dropped_share` is high. With a pipeline degree above 1, a chunk may end within
a tile.

Source: SonicMoE, arXiv 2512.14080. There any token may fill a tile, by score. Here a token has at
most K + 1 experts.
"""

# T tokens, E experts, K top-k

import torch
from torch import Tensor

from moe_core.config import MoEConfig
from moe_core.ops import DispatchPlan, make_plan
from moe_core.router import Routing


def round_to_tiles(
    routing: Routing, config: MoEConfig, capacity: int | None
) -> tuple[Routing, DispatchPlan]:
    """The routing with additional choices, and its plan with full tiles.

    Among the k-th choices of all tokens, the more probable ones take precedence, even without
    `batch_prioritized`. Normalised gates sum to 1 over the kept choices. The plan's counts include
    only the first K choices.

    Returns:
        The routing, with expert_ids and gates [T, K + 1] ([T, K] if K = E), and the plan.
    """
    top_k = routing.expert_ids.shape[1]
    ids = _with_next_choice(routing)
    counts, limits = _tile_limits(ids, top_k, config, capacity)
    num_rows = _max_rows(ids, top_k, config, capacity)
    gates = routing.gate_scores.gather(1, ids)
    plan = make_plan(ids, config.num_experts, limits, gates.detach(), config.kernels, num_rows)
    if config.normalize_gates and top_k > 1:
        assert plan.kept is not None
        gates = _normalized_over_kept(gates, plan.kept)
    return routing._replace(expert_ids=ids, gates=gates), plan._replace(counts=counts)


def _with_next_choice(routing: Routing) -> Tensor:
    """Expert ids [T, K + 1]: the K choices and the most probable other expert; [T, K] if K = E."""
    ids, probs = routing.expert_ids, routing.probs.detach()
    if ids.shape[1] == probs.shape[1]:
        return ids
    others = probs.scatter(1, ids, -1.0)  # below any probability
    return torch.cat([ids, others.argmax(1, keepdim=True)], 1)


def _tile_limits(
    ids: Tensor, top_k: int, config: MoEConfig, capacity: int | None
) -> tuple[Tensor, Tensor]:
    """For each expert [E], the number of its first K choices, and the number of its rows."""
    round_to = config.round_to
    choices = ids.t()  # [K + 1, T]
    counts_by_k = ids.new_zeros(ids.shape[1], config.num_experts)  # [K + 1, E]
    counts_by_k.scatter_add_(1, choices, torch.ones_like(choices))
    counts = counts_by_k[:top_k].sum(0)
    available = counts_by_k.sum(0)
    wanted = counts
    if capacity is not None:
        wanted = wanted.clamp(max=capacity)
        available = available.clamp(max=capacity)
    below = wanted // round_to * round_to
    nearest = (wanted + round_to // 2) // round_to * round_to
    return counts, torch.where(nearest <= available, nearest, below)


def _max_rows(ids: Tensor, top_k: int, config: MoEConfig, capacity: int | None) -> int:
    """The most rows that all experts together can have, without reading the device."""
    num_tokens, num_choices = ids.shape
    num_experts = config.num_experts
    round_to = config.round_to
    added_rows = num_experts * (round_to // 2)
    all_rows = min(num_tokens * num_choices, num_tokens * top_k + added_rows)
    full_tiles = all_rows // round_to
    if capacity is not None:
        tiles_of_expert = capacity // round_to
        full_tiles = min(full_tiles, num_experts * tiles_of_expert)
    return full_tiles * round_to


def _normalized_over_kept(gates: Tensor, kept: Tensor) -> Tensor:
    """Gate values [T, K + 1] that sum to 1 over the kept choices; 0 for a token without any."""
    gates = gates.where(kept, 0)
    total = gates.sum(1, keepdim=True)
    return gates / total.where(total > 0, 1)
