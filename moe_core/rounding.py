"""Token rounding: in training every expert gets whole tiles of rows, so that no tile of its
products is partly empty.

1. Every token names one more expert, its next choice, which may fill a tile.
2. An expert gets as many rows as tokens chose it, rounded to the nearest multiple of a tile's rows
   (half a tile up); down where its choices and the next choices for it are too few, or its capacity
   too small.
3. By precedence its least probable choices are dropped, or the most probable next choices added.

An expert chosen by less than half a tile of tokens gets no row: `round_to` should be well below K *
T / E, and `dropped_share` tells if it is not. A pipeline degree above 1 cuts an expert's rows
anywhere, across tiles too.

Source: SonicMoE, arXiv 2512.14080, where any token may fill a tile, by score; here a token meets K
+ 1 experts at most.
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
    """The routing with next choices, expert_ids and gates [T, K + 1] (K where K = E), and its plan
    of whole tiles.

    Of two choices that are a token's k-th the more probable goes first, whatever
    `batch_prioritized` says. Gates that are normalised are so over the choices that are kept. The
    plan's counts are those of the first K choices.
    """
    num_tokens, top_k = routing.expert_ids.shape
    ids = _with_next_choice(routing)
    counts, limits = _tile_limits(ids, top_k, config.num_experts, config.round_to, capacity)
    num_rows = min(ids.numel(), num_tokens * top_k + config.num_experts * (config.round_to // 2))
    num_rows = num_rows // config.round_to * config.round_to
    if capacity is not None:
        num_rows = min(
            num_rows, config.num_experts * (capacity // config.round_to * config.round_to)
        )
    gates = routing.probs.gather(1, ids)
    plan = make_plan(ids, config.num_experts, limits, gates.detach(), config.kernels, num_rows)
    if config.normalize_gates and top_k > 1:
        assert plan.kept is not None
        gates = gates.where(plan.kept, 0)
        total = gates.sum(1, keepdim=True)
        gates = gates / total.where(total > 0, 1)  # 0 where no choice is kept
    return routing._replace(expert_ids=ids, gates=gates), plan._replace(counts=counts)


def _with_next_choice(routing: Routing) -> Tensor:
    """[T, K + 1]: the K choices and the most probable other expert; [T, K] where there is no
    other."""
    ids, probs = routing.expert_ids, routing.probs.detach()
    if ids.shape[1] == probs.shape[1]:
        return ids
    return torch.cat([ids, probs.scatter(1, ids, -1.0).argmax(1, keepdim=True)], 1)


def _tile_limits(
    ids: Tensor, top_k: int, num_experts: int, round_to: int, capacity: int | None
) -> tuple[Tensor, Tensor]:
    """For each expert [E], how many of the first K choices it is, and how many rows it gets."""
    per_choice = ids.new_zeros(ids.shape[1], num_experts).scatter_add_(
        1, ids.t(), torch.ones_like(ids.t())
    )
    counts = per_choice[:top_k].sum(0)
    wanted, available = counts, per_choice.sum(0)
    if capacity is not None:
        wanted, available = wanted.clamp(max=capacity), available.clamp(max=capacity)
    nearest = (wanted + round_to // 2) // round_to * round_to
    return counts, torch.where(nearest <= available, nearest, wanted // round_to * round_to)
