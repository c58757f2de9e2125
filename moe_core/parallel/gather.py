"""Gathers expert weights from other ranks: all experts (r = 0) or parts of one expert (E < W).

`gather_weights` gathers them where they are used. `GatherAhead` gathers all experts on the
communication stream, one layer ahead of their use. In the backward pass the reduction of a layer's
gradients then overlaps with the backward pass of the previous layer.
"""

# W ranks, E experts, M model dim

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.config import ExpertShard
from moe_core.context import expert_dtype, first_derivative_only, in_backward
from moe_core.experts import Experts
from moe_core.ops import ExpertWeights
from moe_core.parallel.calls import LayerCall
from moe_core.parallel.comm_stream import PendingWork, Wait
from moe_core.parallel.groups import ExpertGroup, RankSubset


def gather_weights(
    experts: Experts,
    group: ExpertGroup,
    r: int,
    dtype: torch.dtype,
    owners: RankSubset | None = None,
    call: LayerCall | None = None,
) -> ExpertWeights:
    """The weights that this rank computes with under strategy r, in `dtype`.

    With r = 0 these are the weights of all experts, otherwise those of this rank's experts. If s
    ranks share an expert, each rank gathers 1/r of the hidden dim from s/r ranks. The output bias
    is 0 outside of the corresponding 1/r of M, so the sum of the r partial results is the expert's
    result. Gradients are summed over the ranks and returned to the owners.

    Args:
        owners: the ranks that gather each other's weights, with their collectives. None: ranks of
            `group` that use torch.distributed.
        call: compared over the ranks in the gather of the smallest parameter, only with r = 0.

    Raises:
        ValueError: as LayerCall.check.
    """
    config, shard = experts.config, experts.shard
    num_gathered = group.size if r == 0 else shard.num_parts // r
    if num_gathered == 1:
        weights = experts.weights(dtype)
    else:
        sharing = owners or group.owners(num_gathered)
        num_experts = 1
        if r == 0:
            num_experts = config.num_experts

        smallest = min(p.numel() for p in experts.parameters_by_field.tensors())
        calls = iter([call])

        def gather(parameter: Tensor) -> Tensor:
            own = next(calls, None) if parameter.numel() == smallest else None
            return join(_Gather.apply(parameter, sharing, dtype, own), parameter, num_experts)

        weights = experts.weights(dtype, gather, num_gathered)
    b2 = weights.b2
    if b2 is None or b2.shape[1] == config.model_dim:
        return weights
    before = shard.part // num_gathered * b2.shape[1]
    after = config.model_dim - before - b2.shape[1]
    return weights._replace(b2=F.pad(b2, (before, after)))


def join(gathered: Tensor, part: Tensor, num_experts: int) -> Tensor:
    """gathered [ranks * n, ...], the joined parts [n, ...] of a parameter -> the parameter of their
    experts [num_experts, ...]."""
    return gathered.view(num_experts, -1, *part.shape[2:])


@torch.no_grad()
def join_parts(tensor: Tensor, shard: ExpertShard, group: ExpertGroup) -> Tensor:
    """This rank's part [1, n, ...] of a shared expert -> the whole tensor, on each of its ranks.

    If ranks do not share experts, the result is `tensor`.
    """
    if shard.num_parts == 1:
        return tensor
    return join(_gather(tensor, group.owners(shard.num_parts)), tensor, 1)


class _Gather(torch.autograd.Function):
    """parameter [n, ...] of every owner -> [ranks * n, ...] in `dtype`.

    Gradients are summed in the dtype of the parameter.
    """

    @staticmethod
    def forward(ctx, parameter, owners, dtype, call):
        ctx.owners = owners
        ctx.dtype = parameter.dtype
        ctx.call = call
        if call is None:
            return _gather(parameter.to(dtype), owners)
        return _gather_with_tags(parameter.to(dtype), owners, call)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        owners = ctx.owners
        if ctx.call is not None:
            ctx.call.begin(backward=True)
        with owners.group.ranks.named_errors("reduce-scatter of expert gradients"):
            return owners.reduce_scatter(grad.to(ctx.dtype)), None, None, None


def _gather_with_tags(tensor: Tensor, owners: RankSubset, call: LayerCall) -> Tensor:
    """As `_gather`. The ranks also compare their calls, except on a GPU: the host would wait."""
    if tensor.is_cuda:
        call.begin()
        return _gather(tensor, owners)
    tags = call.tags(tensor.device).view(tensor.dtype)
    gathered = _gather(torch.cat([tensor.flatten(), tags]), owners).view(owners.size, -1)
    tensors, of_ranks = gathered.split([tensor.numel(), len(tags)], dim=1)
    call.check(of_ranks.contiguous().view(torch.int64))
    return tensors.contiguous().view(-1, *tensor.shape[1:])


def _gather(tensor: Tensor, owners: RankSubset) -> Tensor:
    with owners.group.ranks.named_errors("all-gather of expert weights"):
        return owners.gather(tensor)


class GatherAhead:
    """Starts the gather of the next layer's weights, in each forward pass.

    Args:
        layers: the experts of the layers with r = 0, in the order of a pass. The gather of the
            first one starts at once, those of later passes start at its call.
        dtype: that of the first layer's weights; None: that of autocast, or of the parameters.
    """

    def __init__(
        self, layers: Sequence[Experts], group: ExpertGroup, dtype: torch.dtype | None = None
    ) -> None:
        self._layers = list(layers)
        self._group = group
        self._waiting = list(layers)  # layers whose gather has not started
        self._pending: dict[Experts, PendingWeights] = {}
        self._begin_next(dtype)

    def take(
        self, experts: Experts, dtype: torch.dtype, call: LayerCall | None
    ) -> ExpertWeights | None:
        """The gathered weights of `experts`; None if no gather was started, or in another dtype.

        The gather of the next layer's weights starts before this call waits. A pass inside of a
        backward pass, which recomputes activations, calls the layers in another order.
        """
        if in_backward():
            return None
        is_waiting = experts in self._pending or experts in self._waiting
        if experts is self._layers[0] and not is_waiting:  # another pass
            self._pending.clear()
            self._waiting = list(self._layers)
            self._begin_next()
        pending = self._pending.pop(experts, None)
        if pending is None:
            return None
        self._begin_next()
        weights = pending.weights(call)
        if pending.dtype != dtype:
            return None
        if call is not None:
            call.begin()
        return weights

    def _begin_next(self, dtype: torch.dtype | None = None) -> None:
        if self._waiting:
            experts = self._waiting.pop(0)
            self._pending[experts] = PendingWeights(experts, self._group, dtype)


@contextmanager
def weights_ahead(
    layers: Sequence[Experts], group: ExpertGroup, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Context for forward passes, in which each of `layers` is called once, in this order.

    Args:
        dtype: as in GatherAhead.
    """
    group.take_gathered = GatherAhead(layers, group, dtype).take
    try:
        yield
    finally:
        group.take_gathered = None


class PendingWeights(PendingWork):
    """An asynchronous gather of a layer's weights from all ranks."""

    def __init__(
        self, experts: Experts, group: ExpertGroup, dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype or expert_dtype(experts.w1)
        self._group = group
        self._ranks = group.all_ranks()
        self._num_experts = experts.config.num_experts
        self._fields = experts.averaged(experts.parameters_by_field)
        self._parameters = self._fields.tensors()
        self._wait: Wait | None = None
        self._call: LayerCall | None = None
        self._token = self.depart(*self._parameters)

    def weights(self, call: LayerCall | None = None) -> ExpertWeights:
        """Wait for the weights of all experts. `call` records that the backward pass starts."""
        self._call = call
        return self._fields.with_tensors(list(self.arrive(self._token)))

    def start(self, tensors: tuple[Tensor, ...], gradient: bool) -> None:
        """Start to gather the parameters, or to sum the gradients of the weights [E, ...]."""
        if gradient and self._call is not None:
            self._call.begin(backward=True)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            convert = self._summed if gradient else self._gathered
            return tuple(map(convert, tensors, self._parameters))

        self._wait = self._group.comm_stream.submit(
            run, *tensors, process_group=self._ranks.process_group
        )

    def finish(self, gradient: bool) -> tuple[Tensor, ...]:
        operation = "all-gather of expert weights"
        if gradient:
            operation = "reduce-scatter of expert gradients"
        wait, self._wait = self._wait, None
        assert wait is not None, "weights arrive once"
        with self._group.ranks.named_errors(operation):
            return wait()

    def _gathered(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        return join(self._ranks.gather(tensor.to(self.dtype)), parameter, self._num_experts)

    def _summed(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        rows = gradient.to(parameter.dtype).reshape(-1, *parameter.shape[1:])
        return self._ranks.reduce_scatter(rows)
