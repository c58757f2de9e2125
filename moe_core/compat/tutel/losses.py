"""`tutel.impls.losses`: auxiliary losses, computed from scores instead of the engine's sums."""

# T tokens, E experts, K top-k

import torch
from torch import Tensor

from moe_core.losses import expected_load, gshard_sums, squared_variation
from moe_core.losses import gshard_loss as loss_of_sums


def gshard_loss(scores_w_noise: Tensor, top_ids: Tensor) -> Tensor:
    """GShard's loss, a scalar, from the probabilities [T, E] and the experts [T, K] chosen by them.

    Source: GShard, arXiv 2006.16668, section 2.2.
    """
    sums = gshard_sums(scores_w_noise, top_ids[:, 0].long())
    return loss_of_sums(sums, scores_w_noise.shape[0])


def load_importance_loss(
    scores_wo_noise: Tensor, topk_logits: Tensor, num_global_experts: int, gate_noise: float
) -> Tensor:
    """The mean of importance loss and load loss, a scalar.

    It compares a probability with a logit, as Tutel does (its issue 240). With one expert it is 0;
    Tutel's loss is NaN.

    Args:
        scores_wo_noise: softmax of the logits without noise [T, E].
        topk_logits: the chosen experts' logits with noise [T, K], in descending order.

    Raises:
        ValueError: `gate_noise` is not above 0.
    """
    if not gate_noise > 0:
        raise ValueError(f"gate_noise ({gate_noise}) must be above 0 for the load-importance loss")
    probs = scores_wo_noise.float()
    load = expected_load(probs, topk_logits[:, -1].float(), gate_noise / num_global_experts)
    return squared_variation(torch.stack([probs.sum(0), load])).mean()
