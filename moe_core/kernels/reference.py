"""The specification: each operation in plain, slow torch. Fast paths are held to these, output and
every gradient."""

# T tokens, E experts, K top-k, N rows, I input features, O output features, M model dim

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """rows [N, I], weight [E, O, I], bias [E, O], offsets [E] -> [N, O]: each expert's rows through
    its own."""
    ends = offsets.tolist()
    parts = [
        F.linear(rows[start:end], weight[e], None if bias is None else bias[e])
        for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weight.shape[1])])


def expert_ffn(
    rows: Tensor, w1, b1, w2, b2, offsets: Tensor, activation=F.gelu, kept=None
) -> Tensor:
    """rows [N, M], w1 and w2 [E, H, M], b1 [E, H], b2 [E, M] -> [N, M]; `kept` [N, H]: dropout's
    factors."""
    hidden = activation(grouped_linear(rows, w1, b1, offsets))
    return grouped_linear(
        hidden if kept is None else hidden * kept, w2.transpose(1, 2), b2, offsets
    )


def moe_ffn(
    x: Tensor,
    expert_ids: Tensor,
    gates: Tensor,
    w1,
    b1,
    w2,
    b2,
    activation,
    capacity=None,
    priority=None,
) -> Tensor:
    """The whole layer after routing, one choice at a time: x [T, M], expert_ids and gates [T, K] ->
    [T, M]."""
    num_tokens, top_k = expert_ids.shape
    tokens = range(num_tokens)
    if priority is not None:
        tokens = sorted(tokens, key=lambda t: -priority[t].item())  # stable, as Python's sort is
    filled = [0] * len(w1)
    y = [torch.zeros_like(x[0]) for _ in range(num_tokens)]
    for k in range(top_k):
        for t in tokens:
            e = int(expert_ids[t, k])
            filled[e] += 1
            if capacity is None or filled[e] <= capacity:
                hidden = activation(w1[e] @ x[t] + b1[e])
                y[t] = y[t] + gates[t, k] * (hidden @ w2[e] + b2[e])
    return torch.stack(y)
