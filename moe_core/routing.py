"""Routing: which experts process which tokens, with which gate values, and the auxiliary loss.

There are three kinds, by the router's `routing`: TokenChoice, ExpertChoice and SoftRouting. Each is
a class with the method `route`, from the layer's input to what the experts see and how their
results become the output.
"""

# B images, N tokens of an image, T = B N tokens, E experts, K top-k, S slots of an image, M model
# dim

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core import ops
from moe_core.balance import BalanceBias
from moe_core.config import MoEConfig
from moe_core.context import expert_dtype, without_autocast
from moe_core.losses import RoutingScores, auxiliary_loss, expert_sums
from moe_core.ops import (
    DispatchPlan,
    Kernels,
    LinearLogits,
    RouteSettings,
    soft_combine,
    soft_dispatch,
)
from moe_core.ops.route.reference import add_noise, gate_scores, gates_of, largest
from moe_core.parallel import ExpertGroup
from moe_core.parallel.exchange import Exchange
from moe_core.router import LinearRouter


class CallOptions(NamedTuple):
    """The options of one call of a layer, and the layer's parts that route it. None of them is
    open."""

    config: MoEConfig
    top_k: int
    capacity_factor: float | Tensor
    exchange: Exchange | None  # None: the tuner chooses
    router: nn.Module
    balance: BalanceBias | None
    batch_prioritized: bool
    training: bool
    kernels: Kernels


class Routing(NamedTuple):
    """The experts and gate values of every token; `expert_ids[:, 0]` is the first choice.

    In Soft MoE the tokens are slots. The last four fields are added by `TokenChoice.route` and its
    like, for the layer.
    """

    expert_ids: Tensor  # [T, K] int64
    gates: Tensor  # [T, K] gate values, differentiable
    aux_loss: Tensor  # scalar
    probs: Tensor  # [T, E] softmax of the (noisy) logits
    # [T, K], only with expert choice: an expert takes choices of higher priority first
    priority: Tensor | None = None
    # [T, M] the tokens in the dtype of the experts; None: not cast yet
    inputs: Tensor | None = None
    top_k: int = 0  # experts per token, from which the capacity follows
    capacity_factor: float | Tensor = 0.0
    # from the sums of the experts' results [T, M] to the layer's output; None: they are the output
    combine: Callable[[Tensor], Tensor] | None = None


class TokenChoice:
    """Each token chooses its `top_k` experts.

    Source: arXiv 2206.03382 (Tutel), section 4.1.
    """

    def __init__(self, group: ExpertGroup) -> None:
        self.group = group

    def route(self, x: Tensor, call: CallOptions) -> Routing:
        """Route x [..., M]."""
        config = call.config
        tokens = x.reshape(-1, config.model_dim)  # [T, M]
        reduce = None
        if config.global_balance:
            reduce = self.group.sum
        logits = logits_of(call.router, tokens, config)
        with without_autocast(tokens):
            routing = route_by_tokens(
                logits, config, call.top_k, call.training, reduce, call.balance, call.kernels
            )
        factor, priority = call.capacity_factor, None
        if call.batch_prioritized and (isinstance(factor, Tensor) or factor != 0):
            priority = routing.probs.detach().amax(1)
        inputs = tokens if routing.inputs is None else routing.inputs
        return routing._replace(
            inputs=inputs, priority=priority, top_k=call.top_k, capacity_factor=factor
        )

    def counts_and_kept(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """For statistics, the number of choices of each expert [E], and a mask of the kept choices
        [T, K]; None: no choice can be dropped."""
        return plan.counts, plan.kept


class ExpertChoice(TokenChoice):
    """Each expert chooses as many tokens as its capacity.

    All experts then have the same load without an auxiliary loss. A token has between 0 and E
    experts. The choice depends on all tokens of an image, which are available at the same time.

    Source: Mixture-of-Experts with Expert Choice Routing, arXiv 2202.09368, section 3.2.
    """

    def route(self, x: Tensor, call: CallOptions) -> Routing:
        config = call.config
        num_images = as_images(x).shape[0]
        tokens = x.reshape(-1, config.model_dim)  # [T, M]
        factor = call.capacity_factor
        has_equal_images = self.group.size == 1 or self.group.has_equal_tokens
        if config.choose_per_image and not call.training and has_equal_images:
            factor = factor_by_image(factor, num_images, tokens.shape[0], config.num_experts)
        logits = _checked_logits(call.router, tokens, config)
        with without_autocast(tokens):
            routing = route_by_experts(logits, config, num_images, call.training)
        return routing._replace(inputs=tokens, top_k=call.top_k, capacity_factor=factor)

    def counts_and_kept(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """As TokenChoice. The mask is [T, 1]: whether at least one expert chose the token."""
        assert plan.kept is not None, "experts choose up to a capacity"
        return plan.kept.sum(0), plan.kept.any(1, keepdim=True)


class SoftRouting(TokenChoice):
    """Experts see slots, which are weighted means of an image's tokens (Soft MoE).

    1. The router gives a logit to each pair of a token and a slot of the same image.
    2. Each slot is a mean of the tokens, weighted by the softmax of its logits over the tokens.
    3. Each expert processes its slots, `slots_per_expert` in each image. No token is dropped, and
       all experts have the same load.
    4. The output of a token is a mean of all slots' results, weighted by the softmax of its logits
       over the slots.

    Slots are routed as tokens whose experts are already chosen. At a capacity factor of 1 the
    capacity of an expert is its number of slots, so none is dropped.

    Source: Soft MoE, arXiv 2308.00951, section 2.
    """

    def route(self, x: Tensor, call: CallOptions) -> Routing:
        tokens = as_images(x)  # [B, N, M]
        logits = router_logits(call.router, tokens.flatten(0, 1))  # [T, S]
        check_slots(logits, call.config)
        logits = logits.view(tokens.shape[0], tokens.shape[1], logits.shape[1])  # [B, N, S]
        slots = soft_dispatch(tokens.to(expert_dtype(tokens)), logits)  # [B, S, M]
        routing = route_slots(slots, logits, call.config)

        def mix(y: Tensor) -> Tensor:
            return soft_combine(y.view_as(slots), logits).flatten(0, 1)

        return routing._replace(
            inputs=slots.flatten(0, 1), top_k=1, capacity_factor=1.0, combine=mix
        )


ROUTINGS = {"token_choice": TokenChoice, "expert_choice": ExpertChoice, "soft": SoftRouting}


def as_images(x: Tensor) -> Tensor:
    """x [B, ..., M] -> tokens by image [B, N, M]. x [T, M] and x [M] are one image."""
    if x.dim() < 3:
        return x.reshape(1, -1, x.shape[-1])
    return x.flatten(1, -2)


# --- logits


def router_logits(router: nn.Module, tokens: Tensor) -> Tensor:
    """The logits of a router in at least fp32, because rounding to bf16 changes close choices."""
    with without_autocast(tokens):
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        return router(tokens)


def logits_of(router: nn.Module, tokens: Tensor, config: MoEConfig) -> Tensor | LinearLogits:
    """The logits [T, E] of a router for tokens [T, M].

    They are not computed yet if a kernel may compute them in the same pass as `route`: those of a
    LinearRouter that nothing watches or replaces.
    """
    needs_logits = config.balance != "loss" or config.z_loss_weight > 0
    if type(router) is LinearRouter and not needs_logits:
        hooks = [router._forward_hooks, router._forward_pre_hooks]
        hooks += [router._backward_hooks, router._backward_pre_hooks]
        is_own = "forward" in vars(router)  # hooks of accelerate
        fits = router.weight.shape == (config.num_experts, config.model_dim)
        if fits and not is_own and not any(hooks):
            return LinearLogits(tokens, router.weight, expert_dtype(tokens))
    return _checked_logits(router, tokens, config)


def _checked_logits(router: nn.Module, tokens: Tensor, config: MoEConfig) -> Tensor:
    """The logits [T, E] of a router.

    Raises:
        ValueError: they have another shape.
    """
    logits = router_logits(router, tokens)
    if logits.ndim != 2 or logits.shape[1] != config.num_experts:
        raise ValueError(
            f"the router returned logits of shape {list(logits.shape)}, not [T,"
            f" {config.num_experts}]"
        )
    return logits


def _draw_noise(logits: Tensor | LinearLogits, config: MoEConfig) -> tuple[Tensor, float]:
    """Standard normal noise [T, E] and its factor.

    It is drawn in fp32: a layer in another dtype gets the same numbers."""
    noise = torch.randn(logits.shape, dtype=torch.float32, device=logits.device)
    return noise, config.gate_noise / config.num_experts


# --- tokens choose


def route_by_tokens(
    logits: Tensor | LinearLogits,
    config: MoEConfig,
    top_k: int,
    training: bool,
    reduce: Callable[[Tensor], Tensor] | None = None,
    balance: BalanceBias | None = None,
    kernels: Kernels | None = None,
) -> Routing:
    """Choose `top_k` experts for every token from its logits [T, E].

    In training, noise `gate_noise * N(0, 1) / E` is added to the logits. The choice, the gate
    values and the probabilities in the loss are computed from the noisy logits.

    Args:
        reduce: a sum over ranks, for a loss over the tokens of all ranks (see
            `losses.auxiliary_loss`).
        balance: biases for the choice, which replace the auxiliary loss. In training it counts the
            choices.
        kernels: those chosen before; None: by the name in the configuration.

    Source: arXiv 2206.03382, section 4.1; exact semantics as in its public code.
    """
    noise, noise_std = None, 0.0
    if training and config.gate_noise > 0:
        noise, noise_std = _draw_noise(logits, config)
    loss_noise_std = noise_std
    if config.aux_loss == "load_importance_tutel":
        # Tutel's loss needs the noise scale even in evaluation, in which no noise is drawn.
        loss_noise_std = config.gate_noise / config.num_experts
    aux_loss_name = config.aux_loss
    if balance is not None:
        aux_loss_name = "none"
    normalize = config.normalize_gates and top_k > 1
    settings = RouteSettings(
        top_k,
        normalize,
        aux_loss_name,
        noise_std,
        loss_noise_std,
        config.kernels,
        config.gate_activation,
    )
    routed = ops.route(logits, noise, settings, kernels)
    gates, ids, probs, sums = routed.gates, routed.ids, routed.probs, routed.sums
    num_tokens = probs.shape[0]
    if routed.logits is None:
        assert sums is not None, "the kernel computes them"
        aux_loss = auxiliary_loss(aux_loss_name, sums, num_tokens, reduce, routed.loss_of_sums)
        return Routing(ids, gates, aux_loss, probs, inputs=routed.inputs)
    logits, noisy = routed.logits, routed.noisy
    if noisy is None and (balance is not None or sums is None):
        noisy = add_noise(logits, noise, noise_std)
    if balance is not None:
        assert noisy is not None
        scores = probs
        if config.gate_activation != "softmax":
            scores = gate_scores(noisy, config.gate_activation)
        ids = largest(balance(scores), top_k)
        if training:
            balance.add_load(ids)
        gates = gates_of(scores, noisy, ids, config.gate_activation, normalize)
    if sums is None:
        assert noisy is not None
        loss_inputs = RoutingScores(logits, noisy, probs, ids, loss_noise_std)
        sums = expert_sums(aux_loss_name, loss_inputs)
    aux_loss = auxiliary_loss(aux_loss_name, sums, num_tokens, reduce, routed.loss_of_sums)
    if config.z_loss_weight > 0:
        aux_loss = aux_loss + config.z_loss_weight * z_loss(logits)
    return Routing(ids, gates, aux_loss, probs)


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of `logsumexp(logits)^2`, a scalar; 0 without tokens.

    It keeps the logits small. Source: ST-MoE, arXiv 2202.08906, section 3.2, equation 5.
    """
    return logits.logsumexp(1).square().sum() / max(logits.shape[0], 1)


# --- experts choose


def route_by_experts(logits: Tensor, config: MoEConfig, num_images: int, training: bool) -> Routing:
    """Expert choice, from logits [T, E].

    The result lists every expert as a choice of every token. The priority makes each expert take
    the tokens with the highest scores, up to its capacity.

    Args:
        logits: [T, E], with the tokens of one image after the other.
    """
    noisy = logits
    if training and config.gate_noise > 0:
        noisy = add_noise(logits, *_draw_noise(logits, config))
    scores = gate_scores(noisy, config.gate_activation)
    probs = scores
    if config.gate_activation != "softmax":
        probs = noisy.softmax(1)
    aux_loss = logits.new_zeros(())
    if config.z_loss_weight > 0:
        aux_loss = config.z_loss_weight * z_loss(logits)
    priority = expert_priority(scores.detach(), num_images, config.choose_per_image)
    return Routing(all_experts(scores), scores, aux_loss, probs, priority)


def all_experts(scores: Tensor) -> Tensor:
    """Every expert as a choice of every token, in order: scores [T, E] -> int64 [T, E]."""
    num_tokens, num_experts = scores.shape
    return torch.arange(num_experts, device=scores.device).repeat(num_tokens, 1)


def expert_priority(scores: Tensor, num_images: int, per_image: bool) -> Tensor:
    """The order in which each expert takes tokens, highest first: [T, E].

    Args:
        scores: [T, E].
        per_image: whether tokens are ordered by their rank within their image. An expert then takes
            the same number of tokens from every image, up to a difference of one. Otherwise tokens
            are ordered by score.
    """
    if not per_image or num_images == 0:
        return scores
    by_image = scores.unflatten(0, (num_images, -1))  # [B, N, E]
    order = by_image.argsort(dim=1, descending=True, stable=True)
    ranks = order.argsort(dim=1)  # [B, N, E]
    return -ranks.flatten(0, 1).to(scores.dtype)


def factor_by_image(
    capacity_factor: float | Tensor, num_images: int, num_tokens: int, num_experts: int
) -> float | Tensor:
    """The capacity factor with which an expert takes as many tokens from each of `num_images`
    images as from one image alone: the capacity is then rounded for an image, not for the batch."""
    if isinstance(capacity_factor, Tensor) or num_tokens == 0:
        return capacity_factor
    factor, length = abs(capacity_factor), num_tokens // num_images
    share = math.floor(factor * math.ceil(length / num_experts))  # of an image
    if length % num_experts == 0 and share == factor * length / num_experts:
        return capacity_factor  # not rounded
    # the half keeps the product with the divisor above the whole number
    return (num_images * share + 0.5) / math.ceil(num_tokens / num_experts)


# --- slots


def check_slots(logits: Tensor, config: MoEConfig) -> None:
    """Raise ValueError unless a router of Soft MoE has returned a logit for each slot."""
    num_slots = config.num_experts * config.slots_per_expert
    if config.slots_per_expert < 1 or logits.ndim != 2 or logits.shape[1] != num_slots:
        raise ValueError(
            f"the router returned logits of shape {list(logits.shape)}, not [T, {num_slots}]:"
            f" slots_per_expert ({config.slots_per_expert}) of each of {config.num_experts} experts"
        )


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
