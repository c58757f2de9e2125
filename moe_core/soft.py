"""Soft MoE: experts see slots, which are weighted means of an image's tokens.

1. The router gives a logit to each pair of a token and a slot of the same image.
2. Each slot is a mean of the tokens, weighted by the softmax of its logits over the tokens.
3. Each expert processes its slots, `slots_per_expert` in each image. No token is dropped, and all
   experts have the same load.
4. The output of a token is a mean of all slots' results, weighted by the softmax of its logits over
   the slots.

Source: Soft MoE, arXiv 2308.00951, section 2.
"""

# B images, N tokens of an image, T = B N tokens, E experts, S slots of an image, M model dim

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.config import MoEConfig
from moe_core.context import draw
from moe_core.registry import register_router
from moe_core.router import Routing


@register_router("soft")
class SoftRouter(nn.Module):
    """`logits = norm(x) norm(P) * scale` with P [M, S], both normalised to length 1.

    The slots of expert e are columns e * p to (e + 1) * p - 1, with p = `slots_per_expert`. The
    number of slots does not depend on the number of tokens. `scale` starts at 1, as published.

    Raises:
        ValueError: slots_per_expert is 0.

    Source: arXiv 2308.00951, section 2.3 and algorithm 2.
    """

    routing = "soft"

    def __init__(self, config: MoEConfig, device=None) -> None:
        super().__init__()
        if config.slots_per_expert < 1:
            raise ValueError(
                f"slots_per_expert ({config.slots_per_expert}) must be at least 1 with router"
                f" {config.router!r}"
            )
        num_slots = config.num_experts * config.slots_per_expert
        self.slots = nn.Parameter(torch.empty(config.model_dim, num_slots, device=device))
        self.scale = nn.Parameter(torch.empty(1, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw(self.slots, partial(nn.init.normal_, std=1 / math.sqrt(len(self.slots))))
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, M] -> logits [T, S]."""
        directions = F.normalize(self.slots.to(x.dtype), dim=0)
        return F.normalize(x, dim=1) @ (self.scale.to(x.dtype) * directions)


def route_slots(slots: Tensor, logits: Tensor, config: MoEConfig) -> Routing:
    """The routing in which each slot is a token with a fixed expert and a gate value of 1.

    Args:
        slots: [B, S, M].
        logits: [B, N, S].

    Returns:
        The routing of the B S slots. Its `probs` [T, E] belong to the tokens: the sum of the
        weights of an expert's slots in a token's output.
    """
    num_images, num_slots, _ = slots.shape
    slot_numbers = torch.arange(num_slots, device=slots.device)
    expert_ids = (slot_numbers // config.slots_per_expert).repeat(num_images).unsqueeze(1)
    gates = slots.new_ones(expert_ids.shape)
    probs = expert_logits(logits.detach().flatten(0, 1), config).softmax(1)
    return Routing(expert_ids, gates, logits.new_zeros(()), probs)


def expert_logits(logits: Tensor, config: MoEConfig) -> Tensor:
    """logits [T, S] -> [T, E], whose softmax is the sum of the weights of each expert's slots."""
    return logits.unflatten(1, (config.num_experts, -1)).logsumexp(2)
