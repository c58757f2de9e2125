"""The experts' networks in plain torch: the specification.

Tests compare the output and every gradient of the other forms with it. It also runs where no kernel
does: without a compiler, in other dtypes, with a registered activation, and for derivatives of any
kind.
"""

# E experts, C rows of each expert, N rows, I input features, O output features, M model dim,
# H hidden dim

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import debug_unwrap

from moe_core.activations import hidden_layer
from moe_core.ops.ffn import split
from moe_core.ops.ffn.inputs import ExpertWeights

# rows [N, I], weight [E, O, I], bias [E, O] or None, offsets [E] -> [N, O]
Linear = Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]


def plain_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Apply the linear layer of each expert to its rows; 0 for rows of no expert.

    The computation is in the dtype of the rows. It has derivatives of any kind and works under
    torch.func transforms.
    """
    weight = weight.to(rows.dtype)
    if bias is not None:
        bias = bias.to(rows.dtype)
    # Under vmap every sample has offsets of its own, and a compiled program does not read them.
    if torch.compiler.is_compiling() or debug_unwrap(offsets).dim() > 1:
        return masked_linear(rows, weight, bias, offsets)
    return split.linear(rows, weight, bias, offsets)


def feed_forward(
    rows: Tensor,
    weights: ExpertWeights,
    offsets: Tensor | None,
    activation: str,
    dropout: float = 0.0,
    linear: Linear = plain_linear,
) -> Tensor:
    """`dropout(hidden) w2 + b2` for the rows of each expert, [N, M] -> [N, M].

    The hidden layer is `act(x w1^T + b1)`. For gated experts, which have w3, it is
    `act(x w1^T + b1) * (x w3^T + b3)` or a gated activation of both products.

    Args:
        offsets: as `linear` needs them.
        linear: the linear layer of all experts.

    Source of gated experts: "GLU Variants Improve Transformer", arXiv 2002.05202, section 2.
    """
    w1, b1, w2, b2, w3, b3 = weights
    z, u = linear(rows, w1, b1, offsets), None
    if w3 is not None:
        u = linear(rows, w3, b3, offsets)
    hidden = hidden_layer(activation, z, u)
    if dropout > 0:
        hidden = F.dropout(hidden, dropout)
    return linear(hidden, w2.transpose(1, 2), b2, offsets)


# Linear layers of all experts


def masked_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """As `split.linear`, without reading the offsets: each expert computes all rows."""
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


def padded_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: None) -> Tensor:
    """The same number of rows for each expert: [E, C, I] -> [E, C, O], in one batched product."""
    if bias is None:
        return torch.bmm(rows, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
