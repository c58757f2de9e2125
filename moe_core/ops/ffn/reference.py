"""The experts' networks in plain torch: the specification.

Tests compare the output and every gradient of the other forms with it.
"""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import debug_unwrap

from moe_core.activations import hidden_layer
from moe_core.ops.ffn.inputs import ExpertWeights
from moe_core.registry import GATED_ACTIVATIONS


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Apply the linear layer of each expert to its rows.

    rows [N, I], weight [E, O, I], bias [E, O], offsets [E] -> [N, O].
    """
    parts = []
    start = 0
    for e, end in enumerate(offsets.tolist()):
        bias_of_expert = None
        if bias is not None:
            bias_of_expert = bias[e]
        parts.append(F.linear(rows[start:end], weight[e], bias_of_expert))
        start = end
    parts.append(rows.new_zeros(len(rows) - start, weight.shape[1]))
    return torch.cat(parts)


def expert_ffn(
    rows: Tensor, w1, b1, w2, b2, offsets: Tensor, activation=F.gelu, kept=None, w3=None, b3=None
) -> Tensor:
    """`(kept * hidden) w2 + b2` for the rows of each expert.

    The hidden layer is `act(x w1^T + b1)`. For gated experts, which have w3, it is
    `act(x w1^T + b1) * (x w3^T + b3)`.

    Args:
        rows: [N, M].
        w1, w2, w3: [E, H, M]. b1 and b3 are [E, H], b2 is [E, M].
        activation: a function of the first product. With w3 it may also be an entry of
            GATED_ACTIVATIONS, a function of both products.
        kept: the factors of dropout [N, H].

    Returns:
        [N, M].

    Source of gated experts: "GLU Variants Improve Transformer", arXiv 2002.05202, section 2.
    """
    hidden = grouped_linear(rows, w1, b1, offsets)
    if w3 is None:
        hidden = activation(hidden)
    else:
        hidden = gate(activation, hidden, grouped_linear(rows, w3, b3, offsets))
    if kept is not None:
        hidden = hidden * kept
    return grouped_linear(hidden, w2.transpose(1, 2), b2, offsets)


def plain_ffn(
    rows: Tensor, weights: ExpertWeights, offsets: Tensor, activation: str, dropout: float = 0.0
) -> Tensor:
    """`op.expert_ffn` for any kind of derivative and torch.func transform; 0 for unused rows."""
    w1, b1, w2, b2, w3, b3 = weights
    z, u = expert_linear(rows, w1, b1, offsets), None
    if w3 is not None:
        u = expert_linear(rows, w3, b3, offsets)
    hidden = F.dropout(hidden_layer(activation, z, u), dropout)
    return expert_linear(hidden, w2.transpose(1, 2), b2, offsets)


def expert_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """As `grouped_linear`, in the dtype of the rows, for any kind of derivative and transform."""
    weight = weight.to(rows.dtype)
    if bias is not None:
        bias = bias.to(rows.dtype)
    # Under vmap every sample has offsets of its own, and a compiled program does not read them.
    if torch.compiler.is_compiling() or debug_unwrap(offsets).dim() > 1:
        return masked_linear(rows, weight, bias, offsets)
    return grouped_linear(rows, weight, bias, offsets)


def masked_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """As `grouped_linear`, without reading the offsets: each expert computes all rows."""
    row = torch.arange(len(rows), device=rows.device)
    out = rows.new_zeros(len(rows), weight.shape[1])
    for e in range(len(weight)):
        is_own = row < offsets[e]
        if e > 0:
            is_own = is_own & (row >= offsets[e - 1])
        bias_of_expert = None
        if bias is not None:
            bias_of_expert = bias[e]
        product = F.linear(rows, weight[e], bias_of_expert)
        out = torch.where(is_own.unsqueeze(1), product, out)
    return out


def gate(activation, z: Tensor, u: Tensor) -> Tensor:
    """The hidden layer of gated experts from both products."""
    if activation in GATED_ACTIVATIONS.values():
        return activation(z, u)
    return activation(z) * u
