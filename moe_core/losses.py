"""Auxiliary losses, which balance the load of the experts: pure functions.

1. `expert_sums` computes the sums that a loss needs, for each expert, over the tokens of this rank.
2. `auxiliary_loss` calls `reduce` to add these sums over ranks, all in one message. Without
   `reduce` the loss covers only this rank's tokens.
3. It then applies the formula of the loss to the sums.
"""

# T tokens, E experts, K top-k

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moe_core.ops.route.reference import RoutingScores
from moe_core.registry import LOSSES, register_loss


class AuxiliaryLoss:
    """A loss that is a function of sums over tokens.

    The sums are over the tokens of this rank or of all ranks.
    """

    def sums(self, scores: RoutingScores) -> Tensor:
        """One or more sums over this rank's tokens for each expert: [n, E], differentiable."""
        raise NotImplementedError

    def value(self, sums: Tensor, num_tokens: int | Tensor) -> Tensor:
        """The loss, a scalar, from the sums [n, E] over `num_tokens` tokens.

        `num_tokens` is a scalar tensor if the sums are over several ranks.
        """
        raise NotImplementedError


@register_loss("gshard")
class GShardLoss(AuxiliaryLoss):
    """The loss of GShard, arXiv 2006.16668, section 2.2."""

    def sums(self, scores: RoutingScores) -> Tensor:
        return gshard_sums(scores.probs, scores.expert_ids[:, 0])

    def value(self, sums: Tensor, num_tokens: int | Tensor) -> Tensor:
        return gshard_loss(sums, num_tokens)


@register_loss("load_importance")
class LoadImportanceLoss(AuxiliaryLoss):
    """The mean of the importance loss and the load loss, arXiv 1701.06538, equations 6 and 7 and
    appendix A."""

    def sums(self, scores: RoutingScores) -> Tensor:
        clean_probs = scores.logits.softmax(-1)
        return torch.stack([clean_probs.sum(0), self.load(scores, clean_probs)])

    def value(self, sums: Tensor, num_tokens: int | Tensor) -> Tensor:
        return squared_variation(sums).mean()

    def load(self, scores: RoutingScores, clean_probs: Tensor) -> Tensor:
        return expected_load(scores.logits, _threshold(scores), scores.noise_std)


@register_loss("load_importance_tutel")
class TutelLoadImportanceLoss(LoadImportanceLoss):
    """The loss of Tutel's public code, which compares a probability with a logit (its issue 240).

    For runs that reproduce the recipe of the released checkpoints.
    """

    def load(self, scores: RoutingScores, clean_probs: Tensor) -> Tensor:
        return expected_load(clean_probs, _threshold(scores), scores.noise_std)


@register_loss("none")
class NoLoss(AuxiliaryLoss):
    def sums(self, scores: RoutingScores) -> Tensor:
        return scores.probs.new_zeros(2, scores.probs.shape[1])

    def value(self, sums: Tensor, num_tokens: int | Tensor) -> Tensor:
        return sums.new_zeros(())


def _threshold(scores: RoutingScores) -> Tensor:
    """The k-th largest noisy logit of each token [T]."""
    return scores.noisy.gather(1, scores.expert_ids[:, -1:]).squeeze(1)


def expert_sums(kind: str, scores: RoutingScores) -> Tensor:
    """The sums per expert [n, E] of the named loss.

    Raises:
        ValueError: a registered loss returned another shape.
    """
    sums = LOSSES[kind]().sums(scores)
    num_experts = scores.probs.shape[1]
    if sums.ndim != 2 or sums.shape[1] != num_experts:
        raise ValueError(
            f"aux_loss {kind!r} returned sums of shape {list(sums.shape)}, not [n, {num_experts}]"
        )
    return sums


def auxiliary_loss(
    kind: str,
    sums: Tensor,
    num_tokens: int,
    reduce: Callable[[Tensor], Tensor] | None = None,
    fused_value: Callable[[str, Tensor, int | Tensor], Tensor] | None = None,
) -> Tensor:
    """The named loss, a scalar, from `expert_sums` [n, E] over `num_tokens` tokens.

    Args:
        reduce: a differentiable sum over ranks, for the loss of all ranks' tokens. It is called
            once, with all sums and the number of tokens in one tensor [n * E + 1]. For "none" it is
            not called.
        fused_value: a kernel that computes the loss from its kind, sums and number of tokens.

    Raises:
        ValueError: a registered loss returned another shape.
    """
    total_tokens: int | Tensor = num_tokens
    if reduce is not None and kind != "none":
        totals = reduce(torch.cat([sums.flatten(), sums.new_full((1,), num_tokens)]))
        sums = totals[:-1].view_as(sums)
        total_tokens = totals[-1]  # stays on the device
    if fused_value is not None:
        return fused_value(kind, sums, total_tokens)
    loss = LOSSES[kind]().value(sums, total_tokens)
    if loss.ndim != 0:
        raise ValueError(f"aux_loss {kind!r} returned shape {list(loss.shape)}, not a scalar")
    return loss


def gshard_sums(probs: Tensor, top1_ids: Tensor) -> Tensor:
    """For each expert [2, E], the sum of its probabilities and the number of its first choices.

    Args:
        probs: [T, E].
        top1_ids: [T].
    """
    first = torch.zeros(probs.shape[1], dtype=probs.dtype, device=probs.device)
    first = first.scatter_add(0, top1_ids, torch.ones_like(top1_ids, dtype=probs.dtype))
    return torch.stack([probs.sum(0), first])


def gshard_loss(sums: Tensor, num_tokens: int | Tensor) -> Tensor:
    """`E * sum_e mean_t(p_te) * share of tokens whose first choice is e`.

    It is 1 for balanced experts, E if all tokens choose one expert, and 0 without tokens.

    Source: GShard, arXiv 2006.16668, section 2.2. It is scaled by E^2, as in Switch Transformer
    (arXiv 2101.03961, equation 4), so that it does not depend on the number of experts.
    """
    # At least 1, so that there is no division by 0.
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.clamp(min=1)
    else:
        num_tokens = max(num_tokens, 1)
    return sums.shape[1] * sums[0].dot(sums[1]) / num_tokens**2


def squared_variation(per_expert: Tensor) -> Tensor:
    """Squared coefficient of variation `unbiased var / (mean^2 + 1e-10)` of a value per expert
    [..., E]; 0 at E = 1.

    Applied to the summed probabilities it is the importance loss, arXiv 1701.06538, equations 6 and
    7. Applied to the expected load it is the load loss, appendix A there.
    """
    if per_expert.shape[-1] == 1:
        return per_expert.sum(-1) * 0
    variance, mean = torch.var_mean(per_expert, -1)
    return variance / (mean**2 + 1e-10)


def expected_load(clean: Tensor, threshold: Tensor, noise_std: float) -> Tensor:
    """Per expert [E], `sum_t Phi((clean_te - threshold_t) / noise_std)`.

    This is the expected number of the expert's tokens when the noise is drawn again. Without noise,
    Phi becomes a step function, and the load has no gradient.

    Args:
        clean: [T, E], the logits without noise.
        threshold: [T], the k-th largest noisy logit.

    Source: arXiv 1701.06538, appendix A.
    """
    margin = clean - threshold.unsqueeze(1)
    if noise_std > 0:
        chosen = 0.5 * (1 + torch.erf(margin / (noise_std * math.sqrt(2))))
    else:
        chosen = (margin >= 0).to(clean.dtype)
    return chosen.sum(0)
