"""Expert choice: each expert chooses as many tokens as its capacity.

All experts then have the same load without an auxiliary loss. A token has between 0 and E experts.
The choice depends on all tokens of an image, which are available at the same time.

Source: Mixture-of-Experts with Expert Choice Routing, arXiv 2202.09368, section 3.2.
"""

# B images, N tokens of an image, T = B N tokens, E experts

import math

import torch
from torch import Tensor


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
    """The capacity factor with which an expert takes as many tokens from each of `num_images` as it
    takes from an image alone. Without it, the capacity is rounded for the batch as a whole."""
    if isinstance(capacity_factor, Tensor) or num_tokens == 0:
        return capacity_factor
    factor, length = abs(capacity_factor), num_tokens // num_images
    share = math.floor(factor * math.ceil(length / num_experts))  # of an image
    if length % num_experts == 0 and share == factor * length / num_experts:
        return capacity_factor  # not rounded
    # the half keeps the product with the divisor above the whole number
    return (num_images * share + 0.5) / math.ceil(num_tokens / num_experts)
