"""Routing in plain torch: the specification, differentiable by autograd."""

# T tokens, E experts, K top-k

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.registry import LOSSES

LEAST_SUM = 1e-30  # of a token's gate values


class RoutingScores(NamedTuple):
    """The inputs of a loss: the router's scores for the tokens of this rank."""

    logits: Tensor  # [T, E] without noise
    noisy: Tensor  # [T, E] with noise: experts are chosen by these
    probs: Tensor  # [T, E] softmax of `noisy`
    expert_ids: Tensor  # [T, K] int64
    noise_std: float  # standard deviation of the noise, for the load loss


def add_noise(logits: Tensor, noise: Tensor | None, noise_std: float) -> Tensor:
    """`logits + noise_std * noise` in the dtype of the logits; the logits themselves if `noise` is
    None."""
    if noise is None:
        return logits
    return logits + noise_std * noise.to(logits.dtype)


def route(
    noisy: Tensor, top_k: int, normalize: bool, activation: str = "softmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, E] -> gates [T, K], expert ids [T, K] int64 and probabilities [T, E]."""
    probs = noisy.softmax(-1)
    ids = largest(noisy.detach(), top_k)
    if activation != "softmax":
        return (
            gates_of(gate_scores(noisy, activation), noisy, ids, activation, normalize),
            ids,
            probs,
        )
    gates = probs.gather(1, ids)
    if normalize:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates, ids, probs


def route_and_sums(
    noisy: Tensor,
    clean: Tensor,
    top_k: int,
    normalize: bool,
    loss: str,
    noise_std: float,
    activation: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [T, K], probabilities [T, E] and the sums [2, E] of the loss, as the fused op.

    Args:
        clean: [T, E], the logits without noise.
    """
    gates, ids, probs = route(noisy, top_k, normalize, activation)
    scores = RoutingScores(clean, noisy, probs, ids, noise_std)
    return gates, probs, LOSSES[loss]().sums(scores)


def largest(logits: Tensor, top_k: int) -> Tensor:
    """Indices [T, K] of the largest logits [T, E], in descending order. NaN counts as infinity.

    If logits are equal, the lower index comes first. `Tensor.max` guarantees this, `torch.topk`
    does not. Logits are compared, not probabilities, because different logits may have equal
    probabilities after rounding.
    """
    # -inf marks the experts that are already chosen, so no logit may be -inf.
    lowest = torch.finfo(logits.dtype).min
    remaining = logits.nan_to_num(nan=math.inf, posinf=math.inf, neginf=lowest)
    ids: list[Tensor] = []
    for k in range(top_k):
        if k > 0:
            remaining = remaining.scatter(1, ids[-1], -math.inf)
        ids.append(remaining.max(1, keepdim=True).indices)
    return torch.cat(ids, 1)


def gate_scores(logits: Tensor, activation: str) -> Tensor:
    """logits [T, E] -> scores [T, E]. The gate values are the scores of the chosen experts.

    Sources: softmax, arXiv 1701.06538; sigmoid, arXiv 2412.19437 (DeepSeek-V3), section 2.1.2.
    """
    if activation == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(1)


def gates_of(
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
    return torch.where(total > LEAST_SUM, gates / total.clamp(min=LEAST_SUM), from_logits)
