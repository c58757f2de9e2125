"""The whole layer after routing, in plain torch: the specification.

Tests compare the output and every gradient of the other forms with it.
"""

# T tokens, K top-k, M model dim

import torch
from torch import Tensor

from moe_core.ops.ffn.reference import gate


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
    w3=None,
    b3=None,
) -> Tensor:
    """The whole layer after routing, one choice at a time.

    x [T, M], expert_ids [T, K], gates [T, K] -> [T, M]. With w3 and b3 the experts are gated.
    """
    num_tokens, top_k = expert_ids.shape
    tokens = list(range(num_tokens))
    if priority is not None:
        tokens = sorted(tokens, key=lambda t: -priority[t].item())  # Python's sort is stable
    filled = [0] * len(w1)
    y = [torch.zeros_like(x[0]) for _ in range(num_tokens)]
    for k in range(top_k):
        for t in tokens:
            e = int(expert_ids[t, k])
            filled[e] += 1
            if capacity is None or filled[e] <= capacity:
                hidden = w1[e] @ x[t] + b1[e]
                if w3 is None:
                    hidden = activation(hidden)
                else:
                    hidden = gate(activation, hidden, w3[e] @ x[t] + b3[e])
                y[t] = y[t] + gates[t, k] * (hidden @ w2[e] + b2[e])
    return torch.stack(y)
