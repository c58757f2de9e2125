"""The mixture-of-experts layer: route, dispatch, exchange, experts, exchange, combine."""

# T tokens, E experts, K top-k, M model dim

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core.config import MoEConfig, expert_capacity
from moe_core.dispatch import DispatchPlan, combine, dispatch, make_plan
from moe_core.experts import Experts
from moe_core.parallel import Exchange, ExpertGroup
from moe_core.precision import without_autocast
from moe_core.router import Routing, make_router, perturb_input, route


class RoutingStats(NamedTuple):
    """What a forward pass did with the tokens of this rank, for logs; detached, on the device."""

    counts: Tensor  # [E] choices per expert, before any drop
    dropped_share: Tensor  # scalar: share of all choices that found their expert full
    entropy: Tensor  # scalar: mean entropy of the router's probabilities, in nats


class MoELayer(nn.Module):
    """A feed-forward layer of `num_experts` experts of which every token visits `top_k`.

    Args:
        config: the layer.
        group: the expert-parallel process group, over whose ranks the experts are spread in contiguous, equal shares;
            None: all experts in this process.
        router: in place of the configured one, a module from tokens [T, M] to logits [T, E].
        experts: in place of the built-in ones, a module from (rows [N, M], offsets [E_local]) to rows [N, M]; its
            parameters count as this rank's own.

    Raises:
        ValueError: experts that do not divide over the group.

    Source: arXiv 2206.03382 (Tutel), section 2; its public code for exact semantics.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | None = None,
        *,
        router: nn.Module | None = None,
        experts: nn.Module | None = None,
        device=None,
    ) -> None:
        super().__init__()
        self.config = config
        self.group = ExpertGroup(group)
        self.num_local_experts = config.experts_per_rank(self.group.size)
        self.first_expert = self.group.rank * self.num_local_experts
        self.router = make_router(config, device) if router is None else router
        if experts is None:
            experts = Experts(config, self.num_local_experts, self.first_expert, device)
        self.experts = experts
        self.last_routing: RoutingStats | None = None

    def extra_repr(self) -> str:
        return f"{self.config}, {self.num_local_experts} experts here, group of {self.group.size}"

    def forward(
        self, x: Tensor, *, top_k: int | None = None, capacity_factor: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [..., M] -> y like x, and the auxiliary loss (a scalar of at least fp32, unweighted).

        `top_k` and `capacity_factor` replace the configured ones for this call alone; 0 means 0.

        Raises:
            ValueError: x of another width, top_k below 1, capacity_factor not finite, an experts module that returns
                another shape.
        """
        # torch.compile leaves a layer over several ranks alone: traced, its collectives got a wrong gradient (torch
        # 2.11), and every new number of rows would be compiled anew.
        forward = self._forward if self.group.size == 1 else self._forward_uncompiled
        return forward(x, top_k, capacity_factor)

    @torch.compiler.disable
    def _forward_uncompiled(self, *args) -> tuple[Tensor, Tensor]:
        return self._forward(*args)

    def _forward(self, x: Tensor, top_k: int | None, capacity_factor: float | None) -> tuple[Tensor, Tensor]:
        config = self.config
        top_k = min(config.top_k if top_k is None else top_k, config.num_experts)
        capacity_factor = config.capacity_factor if capacity_factor is None else capacity_factor
        self._check(x, top_k, capacity_factor)
        tokens = x.reshape(-1, config.model_dim)  # [T, M]
        routing = self._route(tokens, top_k)
        plan = self._plan(routing, top_k, capacity_factor)
        rows = dispatch(tokens, plan)  # [N, M]
        exchange = Exchange(plan.offsets, self.group)
        rows = exchange.to_tokens(self._apply_experts(exchange.to_experts(rows), exchange.offsets))
        y = combine(rows, routing.gates, plan)
        self.last_routing = _statistics(routing, plan)
        return y.to(x.dtype).view_as(x), routing.aux_loss

    def _check(self, x: Tensor, top_k: int, capacity_factor: float) -> None:
        if x.shape[-1] != self.config.model_dim:
            raise ValueError(f"x has {x.shape[-1]} channels, the layer's model_dim is {self.config.model_dim}")
        if top_k < 1:
            raise ValueError(f"top_k ({top_k}) must be at least 1")
        if not abs(capacity_factor) < math.inf:  # torch.compile cannot trace math.isfinite of a value that changes
            raise ValueError(f"capacity_factor ({capacity_factor}) must be finite; 0 is dropless")

    def _route(self, tokens: Tensor, top_k: int) -> Routing:
        # At least fp32, autocast or not: a bf16 softmax flips close choices.
        with without_autocast(tokens):
            tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            logits = self.router(perturb_input(tokens, self.config, self.training))
            return route(logits, self.config, top_k, self.training)

    def _plan(self, routing: Routing, top_k: int, capacity_factor: float) -> DispatchPlan:
        capacity = None
        if capacity_factor != 0:
            most_tokens = self.group.max(routing.gates.shape[0], routing.gates.device)
            capacity = expert_capacity(most_tokens, self.config.num_experts, top_k, capacity_factor)
        priority = routing.probs.detach().amax(1) if self.config.batch_prioritized else None
        return make_plan(routing.expert_ids, self.config.num_experts, capacity, priority)

    def _apply_experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        out = self.experts(rows, offsets)
        if out.shape != rows.shape:
            raise ValueError(f"the experts returned shape {tuple(out.shape)} for rows of shape {tuple(rows.shape)}")
        return out


@torch.no_grad()
def _statistics(routing: Routing, plan: DispatchPlan) -> RoutingStats:
    kept = plan.offsets[-1]
    chosen = max(plan.slots.numel(), 1)
    entropy = torch.special.entr(routing.probs).sum() / max(routing.probs.shape[0], 1)
    return RoutingStats(plan.counts, (plan.slots.numel() - kept) / chosen, entropy)
