"""Gathers all expert weights (r = 0) on the communication stream, one layer ahead of their use.

In the backward pass the reduction of a layer's gradients overlaps with the backward pass of the
previous layer.
"""

# W ranks, E experts

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_core.experts import Experts
from moe_core.ops import ExpertWeights
from moe_core.parallel.comm_stream import Wait
from moe_core.parallel.gather import join
from moe_core.parallel.groups import ExpertGroup
from moe_core.precision import expert_dtype
from moe_core.transforms import first_derivative_only


class GatherAhead:
    """Starts the gather of the next layer's weights, for one forward pass.

    Args:
        layers: the experts of the layers with r = 0, in the order of the pass.
    """

    def __init__(self, layers: Sequence[Experts], group: ExpertGroup) -> None:
        self._group = group
        self._waiting = list(layers)  # layers whose gather has not started
        self._pending: dict[Experts, PendingWeights] = {}
        self._begin_next()

    def take(self, experts: Experts, dtype: torch.dtype) -> ExpertWeights | None:
        """The gathered weights of `experts`; None if no gather was started, or in another dtype.

        The gather of the next layer's weights starts before this call waits.
        """
        pending = self._pending.pop(experts, None)
        if pending is None:
            return None
        self._begin_next()
        weights = pending.finish()
        if pending.dtype != dtype:
            return None
        return weights

    def _begin_next(self) -> None:
        if self._waiting:
            experts = self._waiting.pop(0)
            self._pending[experts] = PendingWeights(experts, self._group)


@contextmanager
def weights_ahead(layers: Sequence[Experts], group: ExpertGroup) -> Iterator[None]:
    """Context for one forward pass, in which each of `layers` is called once, in this order."""
    group.take_gathered = GatherAhead(layers, group).take
    try:
        yield
    finally:
        group.take_gathered = None


class PendingWeights:
    """An asynchronous gather of a layer's weights from all ranks.

    It consists of two autograd nodes: one starts the gather, the other waits for it. The backward
    pass runs the latest node first. So it starts the reduction of the gradients at the second node,
    and waits for it at the first, after the work between the two nodes.
    """

    def __init__(self, experts: Experts, group: ExpertGroup) -> None:
        self.dtype = expert_dtype(experts.w1)
        self._group = group
        self._ranks = group.all_ranks()
        self._num_experts = experts.config.num_experts
        self._fields = experts.parameters_by_field
        self._parameters = self._fields.tensors()
        self._wait: Wait | None = None
        self._token = _Begin.apply(self, *self._parameters)

    def finish(self) -> ExpertWeights:
        """Wait for the weights of all experts."""
        return self._fields.with_tensors(list(_Finish.apply(self._token, self)))

    def start_gather(self) -> None:
        def run(*parameters: Tensor) -> tuple[Tensor, ...]:
            gathered = []
            for parameter in parameters:
                weights = self._ranks.gather(parameter.to(self.dtype))
                gathered.append(join(weights, parameter, self._num_experts))
            return tuple(gathered)

        self._submit(run, self._parameters)

    def start_reduce_scatter(self, gradients: Sequence[Tensor]) -> None:
        """Start the reduction of the gradients of the gathered weights [E, ...]."""

        def run(*gradients: Tensor) -> tuple[Tensor, ...]:
            sums = []
            for gradient, parameter in zip(gradients, self._parameters, strict=True):
                rows = gradient.to(parameter.dtype).reshape(-1, *parameter.shape[1:])
                sums.append(self._ranks.reduce_scatter(rows))
            return tuple(sums)

        self._submit(run, gradients)

    def wait(self, operation: str) -> tuple[Tensor, ...]:
        wait, self._wait = self._wait, None
        assert wait is not None, "weights arrive once"
        with self._group.ranks.named_errors(operation):
            return wait()

    def _submit(self, run: Callable, tensors: Sequence[Tensor]) -> None:
        self._wait = self._group.comm_stream.submit(
            run, *tensors, process_group=self._ranks.process_group
        )


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pending, *parameters):
        ctx.pending = pending
        pending.start_gather()
        return parameters[0].new_empty(0)

    @staticmethod
    @first_derivative_only
    def backward(ctx, token_grad):
        return (None, *ctx.pending.wait("reduce-scatter of expert gradients"))


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, pending):
        ctx.pending = pending
        return pending.wait("all-gather of expert weights")

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        ctx.pending.start_reduce_scatter(gradients)
        return gradients[0].new_empty(0), None
