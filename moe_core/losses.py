"""Auxiliary losses that keep the load of the experts even: pure functions.

1. `expert_sums` adds up, for each expert, what the loss needs over the tokens of this rank.
2. `auxiliary_loss` lets `reduce` add these sums up over ranks, all of them in one message, and
3. applies the formula to the sums. Without `reduce` the loss is that of this rank's tokens.
"""

# T tokens, E experts, K top-k

import math
from collections.abc import Callable

import torch
from torch import Tensor


def expert_sums(kind: str, clean: Tensor, noisy: Tensor, probs: Tensor, ids: Tensor, noise_std: float) -> Tensor:
    """The two sums per expert [2, E] of the named loss; probs = softmax(noisy), logits and probs [T, E], ids [T, K]."""
    if kind == "none":
        return probs.new_zeros(2, probs.shape[1])
    if kind == "gshard":
        return gshard_sums(probs, ids[:, 0])
    threshold = noisy.gather(1, ids[:, -1:]).squeeze(1)
    clean_probs = clean.softmax(-1)
    # Tutel's public code compares the probability with a logit here (its issue 240); kept under its own name for
    # runs that have to repeat the recipe of the released checkpoints.
    compared = clean_probs if kind == "load_importance_tutel" else clean
    return torch.stack([clean_probs.sum(0), expected_load(compared, threshold, noise_std)])


def auxiliary_loss(
    kind: str, sums: Tensor, num_tokens: int, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The named loss, a scalar, from `expert_sums` [2, E] over `num_tokens` tokens.

    `reduce`, a differentiable sum over ranks, is called once (for "none" not at all), with all the sums and the number
    of tokens in one tensor [2E + 1]; the loss is then that of all ranks' tokens.
    """
    if kind == "none":
        return sums.new_zeros(())
    if reduce is not None:
        totals = reduce(torch.cat([sums.flatten(), sums.new_full((1,), num_tokens)]))
        sums, num_tokens = totals[:-1].view_as(sums), totals[-1]  # the number stays on the device
    if kind == "gshard":
        return gshard_loss(sums, num_tokens)
    return squared_variation(sums).mean()


def gshard_sums(probs: Tensor, top1_ids: Tensor) -> Tensor:
    """Per expert [2, E]: its summed probability and how many tokens [T] have it as their first choice."""
    first = torch.zeros(probs.shape[1], dtype=probs.dtype, device=probs.device)
    first = first.scatter_add(0, top1_ids, torch.ones_like(top1_ids, dtype=probs.dtype))
    return torch.stack([probs.sum(0), first])


def gshard_loss(sums: Tensor, num_tokens: int | Tensor) -> Tensor:
    """`E * sum_e mean_t(p_te) * share of tokens whose first choice is e`: 1 when balanced, E when collapsed.

    0 for no tokens. Source: GShard, arXiv 2006.16668, section 2.2, scaled by E^2 so that it does not depend on the
    number of experts, as Switch Transformer (arXiv 2101.03961, equation 4) does.
    """
    at_least_one = num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1)
    return sums.shape[1] * sums[0].dot(sums[1]) / at_least_one**2


def squared_variation(per_expert: Tensor) -> Tensor:
    """Squared coefficient of variation `unbiased var / (mean^2 + 1e-10)` of a value per expert [..., E]; 0 at E = 1.

    Of the summed probabilities it is the importance loss, arXiv 1701.06538, equations 6 and 7; of the expected load the
    load loss, appendix A there.
    """
    if per_expert.shape[-1] == 1:
        return per_expert.sum(-1) * 0
    variance, mean = torch.var_mean(per_expert, -1)
    return variance / (mean**2 + 1e-10)


def expected_load(clean: Tensor, threshold: Tensor, noise_std: float) -> Tensor:
    """Per expert [E], `sum_t Phi((clean_te - threshold_t) / noise_std)`: the tokens it gets if noise is drawn again.

    clean [T, E] are the logits without noise, threshold [T] the k-th largest noisy logit. Without noise the
    probability is its own limit, the step function, and the load a constant. Source: arXiv 1701.06538, appendix A.
    """
    margin = clean - threshold.unsqueeze(1)
    if noise_std > 0:
        chosen = 0.5 * (1 + torch.erf(margin / (noise_std * math.sqrt(2))))
    else:
        chosen = (margin >= 0).to(clean.dtype)
    return chosen.sum(0)
