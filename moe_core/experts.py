"""The experts' feed-forward networks, all of a rank in one set of tensors."""

# E experts on this rank, N rows, M model dim, H hidden dim of this rank's experts (a part, where ranks share one)

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.config import ExpertShard, MoEConfig
from moe_core.derived import Derived
from moe_core.kernels import empty, expert_ffn, moe_ffn, pack_weights
from moe_core.precision import expert_dtype

_MOST_COPIED = 1 << 28  # bytes of weights that evaluation may hold twice in one dtype
_ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class ExpertWeights(NamedTuple):
    """What one pass computes with: [E, H, M], [E, H] or None, [E, H, M], [E, M] or None."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


class Experts(nn.Module):
    """`y = dropout(act(x w1^T + b1)) w2 + b2` for each expert: w1 and w2 [E, H, M], b1 [E, H], b2 [E, M].

    Where several ranks share an expert, each owns the same part of H in w1, b1 and w2, and of M in b2. Expert e of the
    whole layer starts from the same values on any number of ranks, if the ranks' seeds agree.
    """

    def __init__(self, config: MoEConfig, shard: ExpertShard | None = None, device=None) -> None:
        super().__init__()
        self.config, self.shard = config, shard or config.shard(0, 1)
        self._copies: Derived[ExpertWeights] = Derived()  # of the parameters, in evaluation's dtype
        self.activation = _ACTIVATIONS[config.activation]
        experts, hidden = self.shard.num_experts, config.hidden_dim // self.shard.num_parts
        has_b1, has_b2 = config.bias, config.bias and config.output_bias
        self.w1 = self._new(True, experts, hidden, config.model_dim, device=device)
        self.b1 = self._new(has_b1, experts, hidden, device=device)
        self.w2 = self._new(True, experts, hidden, config.model_dim, device=device)
        self.b2 = self._new(has_b2, experts, config.model_dim // self.shard.num_parts, device=device)
        self.reset_parameters()

    def _new(self, present: bool, *shape: int, device) -> nn.Parameter | None:
        if not present:
            return None
        device = torch.get_default_device() if device is None else torch.device(device)
        return nn.Parameter(empty(shape, torch.get_default_dtype(), device, reuse=False))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert from a seed of its own: truncated normal of init_std with zero biases, or as nn.Linear."""
        if self.w1.is_meta:
            return
        model_dim, hidden_dim = self.config.model_dim, self.config.hidden_dim
        seed = int(torch.randint(2**62, (1,), device="cpu"))
        for e in range(len(self.w1)):
            generator = torch.Generator().manual_seed(seed + self.shard.first_expert + e)
            for weight, bias, bias_dim in ((self.w1, self.b1, hidden_dim), (self.w2, self.b2, model_dim)):
                fan_in = model_dim if weight is self.w1 else hidden_dim
                for tensor, shape in ((weight, (hidden_dim, model_dim)), (bias, (bias_dim,))):
                    if tensor is not None:
                        whole = _initial(shape, self.config.init_std, fan_in, generator)
                        tensor[e].copy_(whole.chunk(self.shard.num_parts)[self.shard.part])

    def weights(self, dtype: torch.dtype, gather: Callable[[Tensor], Tensor] | None = None) -> ExpertWeights:
        """What to compute with in `dtype`; `gather` joins each parameter with those of the ranks that share it.

        The parameters themselves, which the kernel casts, or in evaluation copies in `dtype` that last: without
        gradients they may be in an order that only the kernel can read. Then there are copies in the parameters' own
        dtype, too, if they are not large.
        """
        parameters = (self.w1, self.b1, self.w2, self.b2)
        if gather is not None:
            return ExpertWeights(*(None if p is None else gather(p) for p in parameters))
        cast_needed, forward_alone = dtype != self.w1.dtype, not torch.is_grad_enabled()
        packing = forward_alone and self.config.kernels != "torch"
        worth_copying = cast_needed or (packing and self.w1.nbytes + self.w2.nbytes < _MOST_COPIED)
        if not worth_copying:
            self._copies.clear()  # a fused optimiser may follow, see Derived
            return ExpertWeights(*parameters)

        def cast(p: Tensor | None) -> Tensor | None:
            return p if p is None or not cast_needed else empty(p.shape, dtype, p.device, reuse=False).copy_(p)

        def copies() -> ExpertWeights:
            packed = pack_weights(self.w1, self.w2, dtype) if packing else None
            w1, w2 = packed or (cast(self.w1), cast(self.w2))
            return ExpertWeights(w1, cast(self.b1), w2, cast(self.b2))

        key = (dtype, forward_alone)
        sources = [p for p in parameters if p is not None]
        return self._copies.get(self, sources, key, copies) or ExpertWeights(*parameters)

    def train(self, mode: bool = True) -> "Experts":
        self._copies.clear()
        return super().train(mode)

    def forward(self, rows: Tensor, offsets: Tensor, weights: ExpertWeights | None = None) -> Tensor:
        """rows [N, M] grouped by expert, offsets [E] where each expert's rows end -> [N, M]."""
        dtype = expert_dtype(rows)
        w1, b1, w2, b2 = weights or self.weights(dtype)
        dropout = self.config.hidden_dropout if self.training else 0.0
        config = self.config
        return expert_ffn(rows.to(dtype), w1, b1, w2, b2, offsets, config.activation, dropout, config.kernels)

    def between_tokens(
        self, tokens: Tensor, gates: Tensor, plan: Sequence[Tensor | None], weights: ExpertWeights | None = None
    ) -> Tensor:
        """tokens [T, M], gates [T, K], a DispatchPlan -> [T, M]: dispatch, forward and combine in one op."""
        w1, b1, w2, b2 = weights or self.weights(tokens.dtype)
        dropout = self.config.hidden_dropout if self.training else 0.0
        return moe_ffn(tokens, gates, w1, b1, w2, b2, *plan[:4], self.config.activation, dropout)


def _initial(shape: tuple[int, ...], std: float | None, fan_in: int, generator: torch.Generator) -> Tensor:
    """One expert's weight (2-D) or bias (1-D), drawn on the CPU: the same on every device."""
    new = torch.empty(shape, device="cpu")
    if std is None:
        bound = 1 / math.sqrt(fan_in)
        return new.uniform_(-bound, bound, generator=generator)
    return new.zero_() if len(shape) == 1 else nn.init.trunc_normal_(new, std=std, generator=generator)
