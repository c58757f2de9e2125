"""The feed-forward networks of a rank's experts, in one set of tensors."""

# E experts on this rank, N rows, M model dim, H hidden dim of this rank's experts (a part of the
# whole if several ranks share an expert)

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

import moe_core.activations  # noqa: F401 - registers the built-in ones
from moe_core.config import ExpertShard, MoEConfig
from moe_core.context import expert_dtype
from moe_core.ops import (
    DispatchPlan,
    ExpertWeights,
    Kernels,
    casts_weights,
    chosen,
    empty,
    expert_ffn,
    moe_ffn,
    pack_weights,
    prefers_unpacked,
    product_dtype,
)
from moe_core.prepared import PreparedValue

# The weights that a rank computes with.
_MAX_PACKED = 1 << 28  # bytes; larger weights are packed only if they must be copied in any case


class Experts(nn.Module):
    """The feed-forward networks of this rank's experts.

    Each expert computes `y = dropout(act(x w1^T + b1)) w2 + b2`. A gated expert computes
    `y = dropout(act(x w1^T + b1) * (x w3^T + b3)) w2 + b2`.

    The parameters are the fields of ExpertWeights: w1, w2 and w3 [E, H, M], b1 and b3 [E, H], b2
    [E, M]. If several ranks share an expert, each rank has a part of H, and for b2 a part of M. The
    initial values of an expert do not depend on the number of ranks if all ranks have the same
    seed.

    Source of gated experts: arXiv 2002.05202, section 2.
    """

    w1: nn.Parameter
    b1: nn.Parameter | None
    w2: nn.Parameter
    b2: nn.Parameter | None
    w3: nn.Parameter | None
    b3: nn.Parameter | None
    # Set by a layer with replicas: the same weights, whose gradients are averaged over them.
    average: Callable[..., Sequence[Tensor]] | None = None

    def __init__(self, config: MoEConfig, shard: ExpertShard | None = None, device=None) -> None:
        super().__init__()
        self.config, self.shard = config, shard or config.shard(0, 1)
        # Copies of the parameters in the dtype and memory layout of a kernel.
        self._copies: PreparedValue[ExpertWeights] = PreparedValue()
        # Within `cast_ahead`: the weights without biases, in the dtype of computation.
        self._casts: ExpertWeights | None = None
        shapes = _parameter_shapes(config)
        for name in ExpertWeights._fields:
            parameter = None
            if name in shapes:
                first, *rest = shapes[name].shape
                part = first // self.shard.num_parts
                parameter = _new_parameter((self.shard.num_experts, part, *rest), device)
            self.register_parameter(name, parameter)
        self.reset_parameters()

    @property
    def is_distributed(self) -> bool:
        """Whether the experts are sharded over ranks, by expert or by hidden dim."""
        return self.shard.num_experts < self.config.num_experts or self.shard.num_parts > 1

    def no_weight_decay(self) -> set[str]:
        """Names of the biases, as in `MoELayer.no_weight_decay`."""
        return {name for name in ("b1", "b2", "b3") if getattr(self, name) is not None}

    # torch's tools replace or remove parameters through these three methods. FSDP2 would write to
    # the dictionary of parameters if `__setattr__` were that of nn.Module.

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if hasattr(param, "device_mesh") and self.is_distributed:
            raise ValueError(
                f"experts.{name}: ranks have different experts, which fully_shard would take for"
                " one tensor: call fully_shard(module,"
                " ignored_params=set(moe_core.expert_parameters(model).values()))"
            )
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if name in self._parameters and self.is_distributed:
            raise ValueError(
                f"experts.{name}: cannot be removed, since ranks have different experts: give"
                " FullyShardedDataParallel"
                " ignored_states=list(moe_core.expert_parameters(model).values());"
                " torch.nn.utils.parametrize needs all experts in one process"
            )
        super().__delattr__(name)

    def check_layer(self, config: MoEConfig, shard: ExpertShard) -> None:
        """Raise ValueError unless a layer of these can use the experts."""
        for name, given, needed in (
            ("model_dim", self.config.model_dim, config.model_dim),
            ("num_experts", self.config.num_experts, config.num_experts),
            ("shard", self.shard, shard),
        ):
            if given != needed:
                raise ValueError(f"the experts have {name} {given}, the layer {needed}")

    @property
    def parameters_by_field(self) -> ExpertWeights:
        """The parameters as ExpertWeights, not copied."""
        return ExpertWeights(*[getattr(self, name) for name in ExpertWeights._fields])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise each expert with its own seed.

        With `init_std`, weights are truncated normal and biases are zero. Without it, both are
        initialised as in nn.Linear. Values are drawn in fp32. Parameters on the meta device have no
        values: call it again after `to_empty`. Nor have those of torch's FakeTensorMode.
        """
        if self.w1.is_meta:
            return
        shapes = _parameter_shapes(self.config)
        targets = {name: getattr(self, name) for name in shapes}
        sharded = {name: t for name, t in targets.items() if hasattr(t, "placements")}  # DTensor
        for name, parameter in sharded.items():
            targets[name] = torch.empty(parameter.shape, device=parameter.device)
        try:
            seed = int(torch.randint(2**62, (1,), device="cpu"))
        except RuntimeError:  # in FakeTensorMode, where no tensor has a value
            return
        for e in range(len(self.w1)):
            generator = torch.Generator().manual_seed(seed + self.shard.first_expert + e)
            for name, (shape, fan_in) in shapes.items():
                values = _initial(shape, self.config.init_std, fan_in, generator)
                part = values.chunk(self.shard.num_parts)[self.shard.part]
                targets[name][e].copy_(part)
        for name, parameter in sharded.items():
            from torch.distributed.tensor import distribute_tensor  # here, since it is slow

            placed = (parameter.device_mesh, parameter.placements)
            parameter.copy_(distribute_tensor(targets[name], *placed, src_data_rank=None))

    def weights(
        self,
        dtype: torch.dtype,
        gather: Callable[[Tensor], Tensor] | None = None,
        num_gathered: int = 1,
    ) -> ExpertWeights:
        """The weights to compute with in `dtype`.

        Call this within the module's forward, after its hooks.

        Args:
            gather: joins a parameter with the same parameter of other ranks.
            num_gathered: the number of these ranks, including this one.

        Returns:
            The parameters, which the op casts. Within `prepared`, copies in `dtype` that are
            gathered once. Without gradients the copies are also in the memory layout of a kernel.
        """
        parameters = self.parameters_by_field
        used = self.averaged(parameters)
        if self._copies.values is None:
            return used if gather is None else used.map(gather)
        w1 = parameters.w1
        may_pack = not torch.is_grad_enabled()
        num_bytes = sum(weight.nbytes for weight in parameters.matrices().tensors())
        is_worth_packing = may_pack and num_bytes < _MAX_PACKED
        if gather is None and dtype == w1.dtype and not is_worth_packing:
            return used

        def copy() -> ExpertWeights:
            own = parameters if gather is None else parameters.map(gather)
            return self._copy(own, dtype, may_pack)

        sources = parameters.tensors()
        key = (dtype, may_pack, w1.device, num_gathered)
        copies = self._copies.get(sources, key, copy)
        if copies is not None or gather is None:
            return copies or used
        return used.map(gather)

    def averaged(self, parameters: ExpertWeights) -> ExpertWeights:
        """The same weights, whose gradients are averaged over replicas."""
        if self.average is None or not torch.is_grad_enabled():
            return parameters
        return parameters.with_tensors(list(self.average(self, *parameters.tensors())))

    @contextmanager
    def cast_ahead(self, dtype: torch.dtype) -> Iterator[None]:
        """Context in which the weights do not change. They are cast once for all passes in it.

        It has no effect if the kernels do not cast weights, for example on a CPU.
        """
        config = self.config
        if casts_weights(self.w1, dtype, config.activation, config.kernels):
            matrices = self.parameters_by_field.matrices()
            self._casts = matrices.map(lambda weight: weight.detach().to(dtype))
        try:
            yield
        finally:
            self._casts = None

    def _copy(self, weights: ExpertWeights, dtype: torch.dtype, may_pack: bool) -> ExpertWeights:
        """Copy the weights for rows of `dtype`.

        w1, w2 and w3 get the dtype of the products and, if `may_pack`, the memory layout of the
        kernel. The biases are not copied.
        """
        config = self.config
        copied_as = product_dtype(weights.w1, dtype, config.activation, config.kernels)

        def cast(weight: Tensor) -> Tensor:
            if weight.dtype == copied_as:
                return weight
            return empty(weight.shape, copied_as, weight.device, reuse=False).copy_(weight)

        packed = None
        if may_pack:
            packed = pack_weights(weights, dtype, config.activation, config.kernels)
        if packed is not None:
            return packed
        matrices = weights.matrices().map(cast)
        return weights._replace(w1=matrices.w1, w2=matrices.w2, w3=matrices.w3)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        weights: Callable[[], ExpertWeights] | None = None,
        gates: Tensor | None = None,
        plan: DispatchPlan | None = None,
        kernels: Kernels | None = None,
    ) -> Tensor:
        """Apply the network of each expert to the expert's rows.

        Args:
            x: rows [N, M] grouped by expert; with a `plan`, tokens [T, M].
            offsets: [E], the end of each expert's rows.
            weights: a function that returns the weights to compute with. It is called here, after
                the hooks of this module. None: `self.weights`.
            gates: gate values [T, K], only with a `plan`; None: all 1.
            plan: if given, dispatch and combine are part of this call.
            kernels: those of the layer's pass; None: chosen here.

        Returns:
            A tensor of the shape of x.
        """
        x = x.to(expert_dtype(x))
        config = self.config
        is_prepared = self._copies.values is not None
        if weights is not None:
            used = weights()
        elif is_prepared and plan is not None and self._prefers_parameters(x, plan):
            used = self.parameters_by_field
        else:
            used = self.weights(x.dtype)
        dropout = 0.0
        if self.training:
            dropout = config.hidden_dropout
        settings = (config.activation, dropout, kernels or chosen(config.kernels, x))
        if plan is None:
            return expert_ffn(x, used, offsets, *settings)
        casts = None
        if self._casts is not None:  # weights that are gathered from several ranks have none
            is_own = used.w1 is self.w1
            if self.average is not None:  # which gives an alias
                is_own = used.w1.data_ptr() == self.w1.data_ptr()
            casts = self._casts if is_own else None
        return moe_ffn(x, gates, used, plan, *settings, casts=casts)

    def _prefers_parameters(self, x: Tensor, plan: DispatchPlan) -> bool:
        """Whether `moe_ffn` is faster with the parameters than with prepared weights."""
        return prefers_unpacked(x, self.w1, plan, self.config.activation, self.config.kernels)


class SharedExperts(Experts):
    """Experts that every token visits, computed as one wide expert: it equals the sum of them."""

    def __init__(self, config: MoEConfig, device=None) -> None:
        hidden_dim = config.num_shared_experts * config.hidden_dim
        super().__init__(replace(config, num_experts=1, hidden_dim=hidden_dim), device=device)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """tokens [T, M] -> the sum of the shared experts' results [T, M]."""
        offsets = torch.full((1,), tokens.shape[0], dtype=torch.int32, device=tokens.device)
        return super().forward(tokens, offsets)


class _ParameterShape(NamedTuple):
    """The shape of a parameter of one whole expert."""

    shape: tuple[int, ...]
    fan_in: int


def _parameter_shapes(config: MoEConfig) -> dict[str, _ParameterShape]:
    """The shapes of the configured experts' parameters, by name, in the order of ExpertWeights."""
    model_dim, hidden_dim = config.model_dim, config.hidden_dim
    matrix = (hidden_dim, model_dim)
    shapes = {"w1": _ParameterShape(matrix, model_dim)}
    if config.bias:
        shapes["b1"] = _ParameterShape((hidden_dim,), model_dim)
    shapes["w2"] = _ParameterShape(matrix, hidden_dim)
    if config.bias and config.output_bias:
        shapes["b2"] = _ParameterShape((model_dim,), hidden_dim)
    if config.gated:
        shapes["w3"] = _ParameterShape(matrix, model_dim)
        if config.bias:
            shapes["b3"] = _ParameterShape((hidden_dim,), model_dim)
    return shapes


def _new_parameter(shape: tuple[int, ...], device) -> nn.Parameter:
    """An uninitialised parameter in torch's default dtype; `device` None: the default device."""
    device = torch.get_default_device() if device is None else torch.device(device)
    return nn.Parameter(empty(shape, torch.get_default_dtype(), device, reuse=False))


def _initial(
    shape: tuple[int, ...], std: float | None, fan_in: int, generator: torch.Generator
) -> Tensor:
    """Initial values of one expert's weight (2-D) or bias (1-D).

    They are drawn on the CPU, so they do not depend on the device.
    """
    new = torch.empty(shape, dtype=torch.float32, device="cpu")
    if std is None:
        bound = 1 / math.sqrt(fan_in)
        return new.uniform_(-bound, bound, generator=generator)
    if len(shape) == 1:
        return new.zero_()
    return nn.init.trunc_normal_(new, std=std, generator=generator)
