"""The experts' feed-forward networks, all of a rank in one set of tensors."""

# E experts on this rank, N rows, M model dim, H hidden dim

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.config import MoEConfig
from moe_core.kernels import grouped_linear
from moe_core.precision import expert_dtype

_ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class Experts(nn.Module):
    """`y = dropout(act(x w1^T + b1)) w2 + b2` for each expert: w1 and w2 [E, H, M], b1 [E, H], b2 [E, M].

    Expert e of the whole layer starts from the same values on any number of ranks, if the ranks' seeds agree.
    """

    def __init__(self, config: MoEConfig, num_local: int, first_expert: int = 0, device=None) -> None:
        super().__init__()
        shape = (num_local, config.hidden_dim, config.model_dim)
        self.first_expert, self.init_std = first_expert, config.init_std
        self.activation, self.dropout = _ACTIVATIONS[config.activation], config.hidden_dropout
        has_b1, has_b2 = config.bias, config.bias and config.output_bias
        self.w1 = nn.Parameter(torch.empty(shape, device=device))
        self.register_parameter("b1", nn.Parameter(torch.empty(shape[:2], device=device)) if has_b1 else None)
        self.w2 = nn.Parameter(torch.empty(shape, device=device))
        self.register_parameter("b2", nn.Parameter(torch.empty(num_local, shape[2], device=device)) if has_b2 else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert from a seed of its own: truncated normal of init_std with zero biases, or as nn.Linear."""
        if self.w1.is_meta:
            return
        seed = int(torch.randint(2**62, (1,), device="cpu"))
        for e in range(len(self.w1)):
            generator = torch.Generator().manual_seed(seed + self.first_expert + e)
            for weight, bias, fan_in in ((self.w1, self.b1, self.w1.shape[2]), (self.w2, self.b2, self.w2.shape[1])):
                for tensor in (weight, bias):
                    if tensor is not None:
                        tensor[e].copy_(_initial(tensor.shape[1:], self.init_std, fan_in, generator))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [N, M] grouped by expert, offsets [E] where each expert's rows end -> [N, M]."""
        dtype = expert_dtype(rows)
        w1, b1, w2, b2 = (None if p is None else p.to(dtype) for p in (self.w1, self.b1, self.w2, self.b2))
        hidden = self.activation(grouped_linear(rows.to(dtype), w1, b1, offsets))  # [N, H]
        hidden = F.dropout(hidden, self.dropout, self.training)
        return grouped_linear(hidden, w2.transpose(1, 2), b2, offsets)


def _initial(shape: torch.Size, std: float | None, fan_in: int, generator: torch.Generator) -> Tensor:
    """One expert's weight (2-D) or bias (1-D), drawn on the CPU: the same on every device."""
    new = torch.empty(shape, device="cpu")
    if std is None:
        bound = 1 / math.sqrt(fan_in)
        return new.uniform_(-bound, bound, generator=generator)
    return new.zero_() if len(shape) == 1 else nn.init.trunc_normal_(new, std=std, generator=generator)
