"""The feed-forward networks of a rank's experts, in one set of tensors."""

# E experts on this rank, N rows, M model dim, H hidden dim of this rank's experts (a part of it
# where several ranks share an expert)

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

import moe_core.activations  # noqa: F401 - registers the built-in ones
from moe_core.config import ExpertShard, MoEConfig
from moe_core.ops import (
    DispatchPlan,
    ExpertWeights,
    casts_weights,
    empty,
    expert_ffn,
    moe_ffn,
    pack_weights,
    product_dtype,
)
from moe_core.precision import expert_dtype
from moe_core.prepared import PreparedValue
from moe_core.registry import ACTIVATIONS

_MAX_PACKED = 1 << 28  # bytes of weights that `prepared` may copy without a change of dtype


class Experts(nn.Module):
    """`y = dropout(act(x w1^T + b1)) w2 + b2` for each expert.

    Parameters are w1 and w2 [E, H, M], b1 [E, H] and b2 [E, M]. If several ranks share an expert,
    each has the same part of H in w1, b1 and w2, and of M in b2. The initial values of an expert do
    not depend on the number of ranks, if all ranks have the same seed.
    """

    def __init__(self, config: MoEConfig, shard: ExpertShard | None = None, device=None) -> None:
        super().__init__()
        self.config, self.shard = config, shard or config.shard(0, 1)
        # Copies of the parameters in the dtype and memory layout of a kernel.
        self._copies: PreparedValue[ExpertWeights] = PreparedValue()
        # w1 and w2 in the dtype of computation, within `cast_ahead`
        self._casts: tuple[Tensor, Tensor] | None = None
        self.activation = ACTIVATIONS[config.activation]
        num_experts, num_parts = self.shard.num_experts, self.shard.num_parts
        hidden_dim, bias_dim = config.hidden_dim // num_parts, config.model_dim // num_parts
        self.w1 = _new_parameter((num_experts, hidden_dim, config.model_dim), device)
        self.b1: nn.Parameter | None = None
        if config.bias:
            self.b1 = _new_parameter((num_experts, hidden_dim), device)
        self.w2 = _new_parameter((num_experts, hidden_dim, config.model_dim), device)
        self.b2: nn.Parameter | None = None
        if config.bias and config.output_bias:
            self.b2 = _new_parameter((num_experts, bias_dim), device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise each expert with its own seed.

        Weights are truncated normal with `init_std` and biases zero; without `init_std`, both are
        as in nn.Linear.
        """
        if self.w1.is_meta:
            return
        model_dim, hidden_dim = self.config.model_dim, self.config.hidden_dim
        seed = int(torch.randint(2**62, (1,), device="cpu"))
        for e in range(len(self.w1)):
            generator = torch.Generator().manual_seed(seed + self.shard.first_expert + e)
            matrix = (hidden_dim, model_dim)
            for tensor, shape, fan_in in (
                (self.w1, matrix, model_dim),
                (self.b1, (hidden_dim,), model_dim),
                (self.w2, matrix, hidden_dim),
                (self.b2, (model_dim,), hidden_dim),
            ):
                if tensor is not None:
                    values = _initial(shape, self.config.init_std, fan_in, generator)
                    tensor[e].copy_(values.chunk(self.shard.num_parts)[self.shard.part])

    def weights(
        self,
        dtype: torch.dtype,
        gather: Callable[[Tensor], Tensor] | None = None,
        num_gathered: int = 1,
        packed: bool = True,
    ) -> ExpertWeights:
        """The weights to compute with in `dtype`.

        Call this within the module's forward, after its hooks.

        Args:
            gather: joins a parameter with those of other ranks.
            num_gathered: the number of these ranks, this one included.
            packed: whether the memory layout may be that of a kernel.

        Returns:
            The parameters, which the op casts. Within `prepared`, copies in `dtype`, which are
            gathered once; without gradients these are also in the memory layout of a kernel.
        """
        parameters = ExpertWeights(self.w1, self.b1, self.w2, self.b2)
        w1, w2 = parameters.w1, parameters.w2
        may_pack = packed and not torch.is_grad_enabled()
        is_worth_packing = may_pack and w1.nbytes + w2.nbytes < _MAX_PACKED
        if gather is None and dtype == w1.dtype and not is_worth_packing:
            return parameters

        def copy() -> ExpertWeights:
            return self._copy(_gathered(parameters, gather), dtype, may_pack)

        sources = [p for p in parameters if p is not None]
        key = (dtype, may_pack, w1.device, num_gathered)
        copies = self._copies.get(sources, key, copy)
        return copies or _gathered(parameters, gather)

    @contextmanager
    def cast_ahead(self, dtype: torch.dtype) -> Iterator[None]:
        """Context in which the weights do not change: they are cast once, for every pass in it.

        It does nothing where the kernels that run cast no weights, as on a CPU.
        """
        config = self.config
        if casts_weights(self.w1, dtype, config.activation, config.kernels):
            self._casts = (self.w1.detach().to(dtype), self.w2.detach().to(dtype))
        try:
            yield
        finally:
            self._casts = None

    def _copy(self, weights: ExpertWeights, dtype: torch.dtype, may_pack: bool) -> ExpertWeights:
        """Copies for rows of `dtype`: in the dtype that they are multiplied in; w1 and w2 in the
        memory layout of the kernel, if it has its own."""
        config = self.config
        copied_as = product_dtype(weights.w1, dtype, config.activation, config.kernels)

        def cast(weight: Tensor) -> Tensor:
            if weight.dtype == copied_as:
                return weight
            return empty(weight.shape, copied_as, weight.device, reuse=False).copy_(weight)

        packed = None
        if may_pack:
            packed = pack_weights(weights.w1, weights.w2, dtype, config.activation, config.kernels)
        w1, w2 = packed or (cast(weights.w1), cast(weights.w2))
        b1 = None
        if weights.b1 is not None:
            b1 = cast(weights.b1)
        b2 = None
        if weights.b2 is not None:
            b2 = cast(weights.b2)
        return ExpertWeights(w1, b1, w2, b2)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        weights: Callable[[], ExpertWeights] | None = None,
        gates: Tensor | None = None,
        plan: DispatchPlan | None = None,
    ) -> Tensor:
        """Apply to each row the network of its expert.

        Args:
            x: rows [N, M] grouped by expert; with a `plan`, tokens [T, M].
            offsets: [E], where each expert's rows end.
            weights: reads the weights to compute with. It is called here, so that hooks of this
                module have run. None: `self.weights`.
            gates, plan: gate values [T, K], None for 1, and the plan. Dispatch and combine are then
                part of this call.

        Returns:
            Like x.
        """
        x = x.to(expert_dtype(x))
        if weights is None:
            used = self.weights(x.dtype)
        else:
            used = weights()
        dropout = 0.0
        if self.training:
            dropout = self.config.hidden_dropout
        settings = (self.config.activation, dropout, self.config.kernels)
        if plan is None:
            return expert_ffn(x, used, offsets, *settings)
        casts = None
        if used.w1 is self.w1:  # not gathered from several ranks
            casts = self._casts
        return moe_ffn(x, gates, used, plan, *settings, casts=casts)


class SharedExperts(Experts):
    """Experts that every token visits, as one wide network: their sum is one."""

    def __init__(self, config: MoEConfig, device=None) -> None:
        hidden_dim = config.num_shared_experts * config.hidden_dim
        super().__init__(replace(config, num_experts=1, hidden_dim=hidden_dim), device=device)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """tokens [T, M] -> what is added to each of them."""
        offsets = torch.full((1,), tokens.shape[0], dtype=torch.int32, device=tokens.device)
        return super().forward(tokens, offsets)


def _gathered(weights: ExpertWeights, gather: Callable[[Tensor], Tensor] | None) -> ExpertWeights:
    """The weights, each joined with those of other ranks."""
    if gather is None:
        return weights
    b1 = None if weights.b1 is None else gather(weights.b1)
    b2 = None if weights.b2 is None else gather(weights.b2)
    return ExpertWeights(gather(weights.w1), b1, gather(weights.w2), b2)


def _new_parameter(shape: tuple[int, ...], device) -> nn.Parameter:
    """Uninitialised, in torch's default dtype; `device` None is torch's default device."""
    device = torch.get_default_device() if device is None else torch.device(device)
    return nn.Parameter(empty(shape, torch.get_default_dtype(), device, reuse=False))


def _initial(
    shape: tuple[int, ...], std: float | None, fan_in: int, generator: torch.Generator
) -> Tensor:
    """One expert's weight (2-D) or bias (1-D), drawn on the CPU: the same on every device."""
    new = torch.empty(shape, device="cpu")
    if std is None:
        bound = 1 / math.sqrt(fan_in)
        return new.uniform_(-bound, bound, generator=generator)
    if len(shape) == 1:
        return new.zero_()
    return nn.init.trunc_normal_(new, std=std, generator=generator)
