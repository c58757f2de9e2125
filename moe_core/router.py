"""Routers give logits; `route` turns logits into the experts, gate values and auxiliary loss of
every token."""

# T tokens, E experts, K top-k, M model dim

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.config import MoEConfig
from moe_core.losses import RoutingScores, auxiliary_loss, expert_sums
from moe_core.ops import route as choose_experts
from moe_core.registry import ROUTERS, register_router


class Routing(NamedTuple):
    """The decision for every token; `expert_ids[:, 0]` is its first choice."""

    expert_ids: Tensor  # [T, K] int64
    gates: Tensor  # [T, K] gate values, differentiable
    aux_loss: Tensor  # scalar
    probs: Tensor  # [T, E] softmax of the (noisy) logits


@register_router("linear")
class LinearRouter(nn.Module):
    """`logits = x W^T` without bias, weight [E, M], computed in at least fp32."""

    def __init__(self, config: MoEConfig, device=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.model_dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # nn.Linear's

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


@register_router("cosine")
class CosineRouter(nn.Module):
    """Cosine similarity of a projected token with one direction per expert, over a learned
    temperature.

    `logits = <norm(P x + b), norm_column(S)> * exp(min(t, ln 100))` with P [256, M], S [256, E], t
    from ln(1 / 0.5).
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
        nn.init.normal_(self.sim_matrix, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.projector(x)
        # Divided by the length afterwards, where a token has E numbers; 1e-12 is F.normalize's
        length = projected.norm(dim=1, keepdim=True).clamp(min=1e-12)
        cosine = projected @ F.normalize(self.sim_matrix.to(x.dtype), dim=0) / length
        return cosine * self.temperature.to(x.dtype).clamp(max=self.MAX_TEMPERATURE).exp()


class _WideLinear(nn.Linear):
    """nn.Linear in the dtype of its input, whatever that of its parameters is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def make_router(config: MoEConfig, device=None) -> nn.Module:
    """The router named by `config.router`: a module from tokens [T, M] to logits [T, E]."""
    return ROUTERS[config.router](config, device)


def perturb_input(x: Tensor, config: MoEConfig, training: bool) -> Tensor:
    """The router's view of the tokens: in training with input jitter (arXiv 2101.03961) and input
    dropout."""
    if training and config.input_jitter:
        x = x * torch.empty_like(x).uniform_(1 - config.input_jitter, 1 + config.input_jitter)
    return F.dropout(x, config.input_dropout, training)


def route(
    logits: Tensor,
    config: MoEConfig,
    top_k: int,
    training: bool,
    reduce: Callable[[Tensor], Tensor] | None = None,
    kernels: str = "auto",
) -> Routing:
    """Choose `top_k` experts for every token from its logits [T, E].

    In training the logits get `gate_noise * N(0, 1) / E`; the choice, the gate values and the
    loss's probabilities are those of the noisy logits. `reduce` sums over ranks for a loss of all
    their tokens (`losses.auxiliary_loss`); `kernels`: see ops.backend.select. Source: arXiv
    2206.03382, section 4.1; exact semantics as in its public code.
    """
    if logits.ndim != 2 or logits.shape[1] != config.num_experts:
        raise ValueError(
            f"the router returned logits of shape {list(logits.shape)}, not [T,"
            f" {config.num_experts}]"
        )
    noise_std = 0.0
    if training:
        noise_std = config.gate_noise / config.num_experts
    noisy = logits
    if noise_std > 0:
        noisy = logits + noise_std * torch.randn_like(logits)
    loss_noise_std = noise_std
    if config.aux_loss == "load_importance_tutel":
        # Tutel's loss needs its noise scale also in evaluation, where no noise is drawn.
        loss_noise_std = config.gate_noise / config.num_experts
    normalize = config.normalize_gates and top_k > 1
    gates, ids, probs, sums = choose_experts(
        logits, noisy, top_k, normalize, config.aux_loss, loss_noise_std, kernels
    )
    if sums is None:
        scores = RoutingScores(logits, noisy, probs, ids, loss_noise_std)
        sums = expert_sums(config.aux_loss, scores)
    aux_loss = auxiliary_loss(config.aux_loss, sums, logits.shape[0], reduce)
    return Routing(ids, gates, aux_loss, probs)
