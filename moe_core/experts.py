"""The experts' feed-forward networks, all of a rank in one set of tensors."""

# E experts on this rank, N rows, M model dim, H hidden dim of this rank's experts (a part, where
# ranks share one)

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core.config import ExpertShard, MoEConfig
from moe_core.kernels import empty, expert_ffn, moe_ffn, pack_weights
from moe_core.precision import expert_dtype
from moe_core.prepared import PreparedValue
from moe_core.registry import ACTIVATIONS

_MOST_COPIED = 1 << 28  # bytes of weights that `prepared` may hold twice in one dtype


class ExpertWeights(NamedTuple):
    """What one pass computes with: [E, H, M], [E, H] or None, [E, H, M], [E, M] or None."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None


class Experts(nn.Module):
    """`y = dropout(act(x w1^T + b1)) w2 + b2` for each expert: w1 and w2 [E, H, M], b1 [E, H], b2
    [E, M].

    Where several ranks share an expert, each owns the same part of H in w1, b1 and w2, and of M in
    b2. Expert e of the whole layer starts from the same values on any number of ranks, if the
    ranks' seeds agree.
    """

    def __init__(self, config: MoEConfig, shard: ExpertShard | None = None, device=None) -> None:
        super().__init__()
        self.config, self.shard = config, shard or config.shard(0, 1)
        # of the parameters, as a kernel reads them
        self._copies: PreparedValue[ExpertWeights] = PreparedValue()
        self.activation = ACTIVATIONS[config.activation]
        experts, hidden = self.shard.num_experts, config.hidden_dim // self.shard.num_parts
        has_b1, has_b2 = config.bias, config.bias and config.output_bias
        self.w1 = self._new(True, experts, hidden, config.model_dim, device=device)
        self.b1 = self._new(has_b1, experts, hidden, device=device)
        self.w2 = self._new(True, experts, hidden, config.model_dim, device=device)
        self.b2 = self._new(
            has_b2, experts, config.model_dim // self.shard.num_parts, device=device
        )
        self.reset_parameters()

    def _new(self, present: bool, *shape: int, device) -> nn.Parameter | None:
        if not present:
            return None
        device = torch.get_default_device() if device is None else torch.device(device)
        return nn.Parameter(empty(shape, torch.get_default_dtype(), device, reuse=False))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert from a seed of its own: truncated normal of init_std with zero biases, or as
        nn.Linear."""
        if self.w1.is_meta:
            return
        model_dim, hidden_dim = self.config.model_dim, self.config.hidden_dim
        seed = int(torch.randint(2**62, (1,), device="cpu"))
        for e in range(len(self.w1)):
            generator = torch.Generator().manual_seed(seed + self.shard.first_expert + e)
            for weight, bias, bias_dim in (
                (self.w1, self.b1, hidden_dim),
                (self.w2, self.b2, model_dim),
            ):
                fan_in = model_dim if weight is self.w1 else hidden_dim
                for tensor, shape in ((weight, (hidden_dim, model_dim)), (bias, (bias_dim,))):
                    if tensor is not None:
                        whole = _initial(shape, self.config.init_std, fan_in, generator)
                        tensor[e].copy_(whole.chunk(self.shard.num_parts)[self.shard.part])

    def weights(
        self, dtype: torch.dtype, gather: Callable[[Tensor], Tensor] | None = None
    ) -> ExpertWeights:
        """What to compute with in `dtype`. Read it within the module's call, after its hooks.

        These are the parameters, which the kernel casts; within `prepared`, copies of them
        (`_copy`). `gather` joins each parameter with those of the ranks that share it.
        """
        parameters = ExpertWeights(self.w1, self.b1, self.w2, self.b2)
        if gather is not None:
            return ExpertWeights(*(None if p is None else gather(p) for p in parameters))
        w1, w2 = parameters.w1, parameters.w2
        forward_only = not torch.is_grad_enabled()
        packing = forward_only and self.config.kernels != "torch"
        if dtype == w1.dtype and not (packing and w1.nbytes + w2.nbytes < _MOST_COPIED):
            return parameters
        sources = [p for p in parameters if p is not None]
        key = (dtype, forward_only, w1.device)
        pack_for = self.config.activation if packing else None
        copies = self._copies.get(sources, key, lambda: _copy(parameters, dtype, pack_for))
        return copies or parameters

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        weights: Callable[[], ExpertWeights] | None = None,
        gates: Tensor | None = None,
        plan: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Each row through its expert.

        Args:
            x: rows [N, M] grouped by expert; with `gates` and `plan`, tokens [T, M].
            offsets: [E], where each expert's rows end.
            weights: reads what to compute with; called here, so that hooks of this module have run.
                None: `weights()`.
            gates, plan: gate values [T, K] and a DispatchPlan. Dispatch and combine are then parts
                of the same op.

        Returns:
            Like x.
        """
        dtype = x.dtype if plan is not None else expert_dtype(x)
        w1, b1, w2, b2 = self.weights(dtype) if weights is None else weights()
        config = self.config
        dropout = config.hidden_dropout if self.training else 0.0
        if plan is not None:
            return moe_ffn(x, gates, w1, b1, w2, b2, *plan[:4], config.activation, dropout)
        return expert_ffn(
            x.to(dtype), w1, b1, w2, b2, offsets, config.activation, dropout, config.kernels
        )


def _copy(weights: ExpertWeights, dtype: torch.dtype, pack_for: str | None) -> ExpertWeights:
    """Copies in `dtype`; w1 and w2 in the order of a kernel without gradients, if there is one for
    `pack_for`.

    Args:
        pack_for: the activation; None: no kernel reads another order.
    """

    def cast(weight: Tensor | None) -> Tensor | None:
        if weight is None or weight.dtype == dtype:
            return weight
        return empty(weight.shape, dtype, weight.device, reuse=False).copy_(weight)

    packed = pack_weights(weights.w1, weights.w2, dtype, pack_for) if pack_for else None
    w1, w2 = packed or (cast(weights.w1), cast(weights.w2))
    return ExpertWeights(w1, cast(weights.b1), w2, cast(weights.b2))


def _initial(
    shape: tuple[int, ...], std: float | None, fan_in: int, generator: torch.Generator
) -> Tensor:
    """One expert's weight (2-D) or bias (1-D), drawn on the CPU: the same on every device."""
    new = torch.empty(shape, device="cpu")
    if std is None:
        bound = 1 / math.sqrt(fan_in)
        return new.uniform_(-bound, bound, generator=generator)
    return (
        new.zero_() if len(shape) == 1 else nn.init.trunc_normal_(new, std=std, generator=generator)
    )
