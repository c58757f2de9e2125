"""Routers and routing. A router computes logits. `route` computes experts, gate values and the
auxiliary loss from the logits."""

# T tokens, E experts, K top-k, M model dim

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.balance import BalanceBias
from moe_core.config import MoEConfig
from moe_core.context import draw, expert_dtype, without_autocast
from moe_core.expert_choice import all_experts, expert_priority
from moe_core.losses import RoutingScores, auxiliary_loss, expert_sums
from moe_core.ops import LinearLogits, RouteSettings, loss_of_sums
from moe_core.ops import route as choose_experts
from moe_core.ops.route.reference import add_noise, largest
from moe_core.registry import ROUTERS, register_router

_LEAST_SUM = 1e-30  # of a token's gate values


class Routing(NamedTuple):
    """The experts and gate values of every token; `expert_ids[:, 0]` is the first choice."""

    expert_ids: Tensor  # [T, K] int64
    gates: Tensor  # [T, K] gate values, differentiable
    aux_loss: Tensor  # scalar
    probs: Tensor  # [T, E] softmax of the (noisy) logits
    # [T, K], only with expert choice: an expert takes choices of higher priority first
    priority: Tensor | None = None
    # [T, M] the tokens in the dtype of the experts; None: not cast yet
    inputs: Tensor | None = None


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
    """The linear router for expert choice (moe_core.expert_choice)."""

    routing = "expert_choice"


def make_router(config: MoEConfig, device=None) -> nn.Module:
    """The router named by `config.router`: a module from tokens [T, M] to logits [T, E]."""
    return ROUTERS[config.router](config, device)


def route(
    logits: Tensor | LinearLogits,
    config: MoEConfig,
    top_k: int,
    training: bool,
    reduce: Callable[[Tensor], Tensor] | None = None,
    normalize_gates: bool = True,
    balance: BalanceBias | None = None,
) -> Routing:
    """Choose `top_k` experts for every token from its logits [T, E].

    In training, noise `gate_noise * N(0, 1) / E` is added to the logits. The choice, the gate
    values and the probabilities in the loss are computed from the noisy logits.

    Args:
        reduce: a sum over ranks, for a loss over the tokens of all ranks (see
            `losses.auxiliary_loss`).
        normalize_gates: False overrides the configuration: gate values are not normalised.
        balance: biases for the choice, which replace the auxiliary loss. In training it counts the
            choices.

    Source: arXiv 2206.03382, section 4.1; exact semantics as in its public code.
    """
    _check_logits(logits, config)
    noise_std = _noise_std(config, training)
    noise = _draw_noise(logits, noise_std)
    loss_noise_std = noise_std
    if config.aux_loss == "load_importance_tutel":
        # Tutel's loss needs the noise scale even in evaluation, in which no noise is drawn.
        loss_noise_std = config.gate_noise / config.num_experts
    aux_loss_name = config.aux_loss
    if balance is not None:
        aux_loss_name = "none"
    normalize = normalize_gates and config.normalize_gates and top_k > 1
    settings = RouteSettings(
        top_k, normalize, aux_loss_name, noise_std, loss_noise_std, config.kernels
    )
    routed = choose_experts(logits, noise, settings)
    gates, ids, probs, sums = routed.gates, routed.ids, routed.probs, routed.sums
    num_tokens = probs.shape[0]
    if routed.logits is None:
        assert sums is not None, "the kernel computes them"
        aux_loss = auxiliary_loss(aux_loss_name, sums, num_tokens, reduce, loss_of_sums)
        return Routing(ids, gates, aux_loss, probs, inputs=routed.inputs)
    logits, noisy = routed.logits, routed.noisy
    if noisy is None:
        noisy = add_noise(logits, noise, noise_std)
    scores = probs
    if config.gate_activation != "softmax":
        scores = gate_scores(noisy, config.gate_activation)
    if balance is not None:
        ids = largest(balance(scores), top_k)
        if training:
            balance.add_load(ids)
    if balance is not None or config.gate_activation != "softmax":
        gates = _gates_of(scores, noisy, ids, config.gate_activation, normalize)
    fused_value = None
    if sums is None:
        loss_inputs = RoutingScores(logits, noisy, probs, ids, loss_noise_std)
        sums = expert_sums(aux_loss_name, loss_inputs)
    else:  # the kernel has computed the sums
        fused_value = loss_of_sums
    aux_loss = auxiliary_loss(aux_loss_name, sums, num_tokens, reduce, fused_value)
    if config.z_loss_weight > 0:
        aux_loss = aux_loss + config.z_loss_weight * z_loss(logits)
    return Routing(ids, gates, aux_loss, probs)


def logits_of(router: nn.Module, tokens: Tensor, config: MoEConfig) -> Tensor | LinearLogits:
    """The logits [T, E] of a router for tokens [T, M].

    They are not computed yet if a kernel may compute them in the same pass as `route`: those of a
    LinearRouter, if nothing else reads them.
    """
    is_plain = config.balance == "loss" and config.gate_activation == "softmax"
    if type(router) is not LinearRouter or not is_plain or config.z_loss_weight > 0:
        return router_logits(router, tokens)
    if router._forward_hooks or router._forward_pre_hooks:
        return router_logits(router, tokens)
    return LinearLogits(tokens, router.weight, expert_dtype(tokens))


def router_logits(router: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a router in at least fp32, because rounding to bf16 changes close choices."""
    with without_autocast(tokens):
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        return router(tokens)


def route_by_experts(logits: Tensor, config: MoEConfig, num_images: int, training: bool) -> Routing:
    """Expert choice (moe_core.expert_choice), from logits [T, E].

    The result lists every expert as a choice of every token. The priority makes each expert take
    the tokens with the highest scores, up to its capacity.

    Args:
        logits: [T, E], with the tokens of one image after the other.
    """
    _check_logits(logits, config)
    noise_std = _noise_std(config, training)
    noisy = add_noise(logits, _draw_noise(logits, noise_std), noise_std)
    scores = gate_scores(noisy, config.gate_activation)
    probs = scores
    if config.gate_activation != "softmax":
        probs = noisy.softmax(1)
    aux_loss = logits.new_zeros(())
    if config.z_loss_weight > 0:
        aux_loss = config.z_loss_weight * z_loss(logits)
    priority = expert_priority(scores.detach(), num_images, config.choose_per_image)
    return Routing(all_experts(scores), scores, aux_loss, probs, priority)


def _check_logits(logits: Tensor | LinearLogits, config: MoEConfig) -> None:
    """Raise ValueError unless the logits are [T, E]."""
    if len(logits.shape) != 2 or logits.shape[1] != config.num_experts:
        raise ValueError(
            f"the router returned logits of shape {list(logits.shape)}, not [T,"
            f" {config.num_experts}]"
        )


def _noise_std(config: MoEConfig, training: bool) -> float:
    """The standard deviation of the noise on the logits."""
    if training:
        return config.gate_noise / config.num_experts
    return 0.0


def _draw_noise(logits: Tensor | LinearLogits, noise_std: float) -> Tensor | None:
    """Standard normal noise [T, E], drawn in fp32: a layer in another dtype gets the same numbers.

    None if `noise_std` is 0."""
    if noise_std == 0:
        return None
    return torch.randn(logits.shape, dtype=torch.float32, device=logits.device)


def gate_scores(logits: Tensor, activation: str) -> Tensor:
    """logits [T, E] -> scores [T, E]. The gate values are the scores of the chosen experts.

    Sources: softmax, arXiv 1701.06538; sigmoid, arXiv 2412.19437 (DeepSeek-V3), section 2.1.2.
    """
    if activation == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(1)


def _gates_of(
    scores: Tensor, logits: Tensor, ids: Tensor, activation: str, normalize: bool
) -> Tensor:
    """The gate values [T, K] of the chosen experts, from the scores [T, E] of the logits."""
    gates = scores.gather(1, ids)
    if not normalize:
        return gates
    total = gates.sum(1, keepdim=True)
    # Scores of all chosen experts that are (nearly) 0 have lost their quotients: sigmoid gates
    # below logits of -69, or chosen logits that are not the largest ones.
    chosen = logits.gather(1, ids)
    if activation == "sigmoid":
        chosen = F.logsigmoid(chosen)
    limits = torch.finfo(chosen.dtype)
    from_logits = chosen.clamp(limits.min, limits.max).softmax(1)
    return torch.where(total > _LEAST_SUM, gates / total.clamp(min=_LEAST_SUM), from_logits)


def _gate_sums(gates: Tensor) -> Tensor:
    """The sum of each token's gate values [T, 1], at least `_LEAST_SUM`."""
    return gates.sum(1, keepdim=True).clamp(min=_LEAST_SUM)


def split_gates(routing: Routing, config: MoEConfig) -> tuple[Routing, Tensor]:
    """The routing with gate values that sum to 1 for each token, and a scale for each token [T, 1].

    The scale is the sum of the token's gate values, divided by the sum that an undecided router
    gives (K / E for softmax, K / 2 for sigmoid gates). So it is near 1 at the start of training.

    Args:
        routing: a routing whose gate values are not normalised.
    """
    total = _gate_sums(routing.gates)
    top_k = routing.gates.shape[1]
    undecided = top_k / config.num_experts
    if config.gate_activation == "sigmoid":
        undecided = top_k / 2
    return routing._replace(gates=routing.gates / total), total / undecided


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of `logsumexp(logits)^2`, a scalar; 0 without tokens.

    It keeps the logits small. Source: ST-MoE, arXiv 2202.08906, section 3.2, equation 5.
    """
    return logits.logsumexp(1).square().sum() / max(logits.shape[0], 1)
