"""Routers: modules that compute logits from tokens. moe_core.routing chooses experts by them."""

# T tokens, E experts, S slots of an image, M model dim

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.config import MoEConfig
from moe_core.context import draw
from moe_core.registry import ROUTERS, register_router


@register_router("linear")
class LinearRouter(nn.Module):
    """`logits = x W^T` without bias, weight [E, M], computed in at least fp32."""

    def __init__(self, config: MoEConfig, device=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.model_dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        draw(self.weight, partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))  # as in nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


@register_router("cosine")
class CosineRouter(nn.Module):
    """Cosine similarity of the projected token with one learned direction per expert.

    `logits = <norm(P x + b), norm_column(S)> * exp(min(t, ln 100))`, with P [256, M], S [256, E]
    and a learned log scale t, which starts at ln(1 / 0.5).

    Source: arXiv 2206.03382, section 5.2 (the cosine router of SwinV2-MoE), after arXiv 2204.09179.
    """

    PROJECTED_DIM = 256
    MAX_TEMPERATURE = math.log(100)

    def __init__(self, config: MoEConfig, device=None) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(1, device=device))
        self.projector = _WideLinear(config.model_dim, self.PROJECTED_DIM, device=device)
        self.sim_matrix = nn.Parameter(
            torch.empty(self.PROJECTED_DIM, config.num_experts, device=device)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.temperature, math.log(1 / 0.5))
        self.projector.reset_parameters()
        draw(self.sim_matrix, partial(nn.init.normal_, std=0.01))

    def no_weight_decay(self) -> set[str]:
        """Names of all parameters: the published recipe of SwinV2-MoE decays none of them."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projector(x)
        # The E logits are divided by the length, not the longer projection; 1e-12 is as in
        # F.normalize.
        length = projected.norm(dim=1, keepdim=True).clamp(min=1e-12)
        cosine = projected @ F.normalize(self.sim_matrix.to(x.dtype), dim=0) / length
        return cosine * self.temperature.to(x.dtype).clamp(max=self.MAX_TEMPERATURE).exp()


class _WideLinear(nn.Linear):
    """nn.Linear that computes in the dtype of its input, and starts with values drawn in fp32."""

    def reset_parameters(self) -> None:
        draw(self.weight, partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        bound = 1 / math.sqrt(self.in_features)
        draw(self.bias, partial(nn.init.uniform_, a=-bound, b=bound))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


@register_router("expert_choice")
class ExpertChoiceRouter(LinearRouter):
    """The linear router for expert choice (moe_core.routing.ExpertChoice)."""

    routing = "expert_choice"


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

    def no_weight_decay(self) -> set[str]:
        return {"scale"}

    def forward(self, x: Tensor) -> Tensor:
        """x [T, M] -> logits [T, S]."""
        directions = F.normalize(self.slots.to(x.dtype), dim=0)
        return F.normalize(x, dim=1) @ (self.scale.to(x.dtype) * directions)


def make_router(config: MoEConfig, device=None) -> nn.Module:
    """The router named by `config.router`: a module from tokens [T, M] to logits [T, E]."""
    return ROUTERS[config.router](config, device)
