"""The layer with padded buffers, as in Tutel, for options that MoELayer does not support.

These are: custom experts and experts of type "llama_ffn", activations that the engine's kernels do
not support, an output dim other than the input dim, gate values on the experts' inputs, and tokens
with more than one dim.
"""

# T tokens, E experts, W ranks, s = W / E ranks that share an expert (1 for E >= W), r of these
# receive each token, C capacity, M model dim, E_l experts of this rank

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_core.compat.tutel.dispatch import (
    Critical,
    extract_critical,
    fast_decode,
    fast_encode,
    get_dispatch_count,
    gshard_loss,
    load_importance_loss,
)
from moe_core.compat.tutel.gates import gate_logits
from moe_core.compat.tutel.net import exchange
from moe_core.compat.tutel.options import Call
from moe_core.context import without_autocast


def padded_forward(
    layer: Any, gate: Any, tokens: Tensor, token_shape: torch.Size, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the layer for tokens [T, M].

    Args:
        layer: a MOELayer.
        token_shape: the shape in which the experts get a token; it has M elements.

    Returns:
        The weighted sums of the experts' results [T, ...], the auxiliary loss, and the number of
        choices of each expert [E] before any drop.
    """
    with without_autocast(tokens):
        logits = gate_logits(gate, tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        noisy = logits
        if layer.training and gate.gate_noise > 0:
            noise_std = gate.gate_noise / layer.num_global_experts
            noisy = logits + noise_std * torch.randn_like(logits)
        critical, l_aux = extract_critical(
            noisy.softmax(1),
            call.top_k,
            _loss_function(layer, gate, logits, noisy),
            call.capacity_factor,
            layer.batch_prioritized_routing,
            layer.normalize_gate,
            call.alignment,
            layer.group,
            call.inequivalent_tokens,
        )
    assert l_aux is not None, "there is a loss function"
    y = _through_experts(layer, tokens, critical, token_shape)
    return y, l_aux, get_dispatch_count(critical)


def _loss_function(
    layer: Any, gate: Any, logits: Tensor, noisy: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    if layer.is_gshard_loss:
        return gshard_loss

    def loss(scores: Tensor, ids: Tensor) -> Tensor:
        topk_logits = noisy.gather(1, ids)
        return load_importance_loss(
            logits.softmax(1), topk_logits, layer.num_global_experts, gate.gate_noise
        )

    return loss


def _through_experts(
    layer: Any, tokens: Tensor, critical: Critical, token_shape: torch.Size
) -> Tensor:
    num_experts, num_ranks, r = layer.num_global_experts, layer.world_size, layer.adaptive_degree
    rows = fast_encode(tokens, critical, layer.is_postscore)  # [E, C, M]
    is_exchanged = r > 0 and num_ranks > 1
    if is_exchanged and num_experts < num_ranks:
        rows = rows.repeat(1, r, 1).view(num_ranks, -1, rows.shape[2])  # [W, C r / s, M]
    if is_exchanged:
        rows = exchange(rows, 1, 0, layer.group)  # [E_l, ...]
    shape = rows.shape[:2]
    y: Tensor = layer.experts(rows.view(*shape, *token_shape), layer)
    output_shape = y.shape[2:]
    y = y.flatten(2)
    if is_exchanged:
        y = exchange(y, 0, 1, layer.group)
    if is_exchanged and num_experts < num_ranks:
        y = y.reshape(num_experts, r, -1, y.shape[2]).sum(1)
    return fast_decode(y.contiguous(), critical, layer.is_postscore).unflatten(1, output_shape)
