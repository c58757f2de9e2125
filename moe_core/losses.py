"""Auxiliary losses that keep the load of the experts even: pure functions, over the tokens of this rank."""

# T tokens, E experts, K top-k

import math

import torch
from torch import Tensor


def gshard_loss(probs: Tensor, top1_ids: Tensor) -> Tensor:
    """`E * sum_e mean_t(p_te) * share of tokens whose first choice is e`: 1 when balanced, E when collapsed.

    probs [T, E], top1_ids [T]; 0 for no tokens. Source: GShard, arXiv 2006.16668, section 2.2, scaled by E^2 so that
    it does not depend on the number of experts, as Switch Transformer (arXiv 2101.03961, equation 4) does.
    """
    num_tokens, num_experts = probs.shape
    share = torch.zeros(num_experts, dtype=probs.dtype, device=probs.device)
    share = share.scatter_add(0, top1_ids, torch.ones_like(top1_ids, dtype=probs.dtype))
    return num_experts * (probs.sum(0) * share).sum() / max(num_tokens, 1) ** 2


def squared_variation(per_expert: Tensor) -> Tensor:
    """Squared coefficient of variation `unbiased var / (mean^2 + 1e-10)` of a value per expert [E]; 0 at E = 1."""
    if per_expert.numel() == 1:
        return per_expert.sum() * 0
    return per_expert.var() / (per_expert.mean() ** 2 + 1e-10)


def importance_loss(probs: Tensor) -> Tensor:
    """Variation over experts of the summed probabilities [T, E]. Source: arXiv 1701.06538, equations 6 and 7."""
    return squared_variation(probs.sum(0))


def load_loss(clean: Tensor, threshold: Tensor, noise_std: float) -> Tensor:
    """Variation over experts of the expected load, `sum_t Phi((clean_te - threshold_t) / noise_std)`.

    clean [T, E] are the logits without noise, threshold [T] the k-th largest noisy logit. Without noise the
    probability is its own limit, the step function, and the loss a constant. Source: arXiv 1701.06538, appendix A.
    """
    margin = clean - threshold.unsqueeze(1)
    if noise_std > 0:
        chosen = 0.5 * (1 + torch.erf(margin / (noise_std * math.sqrt(2))))
    else:
        chosen = (margin >= 0).to(clean.dtype)
    return squared_variation(chosen.sum(0))


def auxiliary_loss(kind: str, clean: Tensor, noisy: Tensor, probs: Tensor, ids: Tensor, noise_std: float) -> Tensor:
    """The named loss of one routing: clean and noisy logits, probs = softmax(noisy) [T, E], ids [T, K]."""
    if kind == "none":
        return probs.new_zeros(())
    if kind == "gshard":
        return gshard_loss(probs, ids[:, 0])
    threshold = noisy.gather(1, ids[:, -1:]).squeeze(1)
    clean_probs = clean.softmax(-1)
    # Tutel's public code compares the probability with a logit here (its issue 240); kept under its own name for
    # runs that have to repeat the recipe of the released checkpoints.
    compared = clean_probs if kind == "load_importance_tutel" else clean
    return (importance_loss(clean_probs) + load_loss(compared, threshold, noise_std)) / 2
