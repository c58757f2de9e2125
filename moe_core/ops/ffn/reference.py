"""The experts' networks in plain, slow torch: the specification.

The other forms are held to it, output and every gradient.
"""

# E experts, N rows, I input features, O output features, M model dim, H hidden dim

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """rows [N, I], weight [E, O, I], bias [E, O], offsets [E] -> [N, O]: each expert's rows through
    its own."""
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
    rows: Tensor, w1, b1, w2, b2, offsets: Tensor, activation=F.gelu, kept=None
) -> Tensor:
    """rows [N, M], w1 and w2 [E, H, M], b1 [E, H], b2 [E, M] -> [N, M]; `kept` [N, H]: dropout's
    factors."""
    hidden = activation(grouped_linear(rows, w1, b1, offsets))
    return grouped_linear(
        hidden if kept is None else hidden * kept, w2.transpose(1, 2), b2, offsets
    )
