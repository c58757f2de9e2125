"""The search for the fastest strategy of one key, by timed calls."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_core.parallel.cost_model import LayerShape
from moe_core.parallel.strategy import ParallelStrategy

# After each round a strategy is kept if its median is within this factor of the best median.
KEPT_WITHIN = (1.6, 1.3, 1.2, 1.15, 1.1, 1.1, 1.1, 1.1)

Time = float | torch.cuda.Event  # a time on a CPU or on a GPU
Span = tuple[Time, Time]
Purpose = Literal["timed", "warm-up", "held"]


class Key(NamedTuple):
    """Everything that a decision depends on, except the machine."""

    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    element_size: int  # bytes of a row's elements
    group_size: int
    ranks_per_node: int
    built_in: bool  # whether the experts are the built-in ones, whose weights can be gathered
    bucket: int  # 2**bucket is the upper bound of the capacity
    training: bool = True  # forward and backward; False: only forward
    has_capacity: bool = False  # False: dropless; the bucket is then that of the mean load
    gated: bool = False  # experts with three weights

    def shape(self) -> LayerShape:
        rows = 2**self.bucket
        tokens = max(rows * self.num_experts // self.top_k, 1)
        capacity = None
        if self.has_capacity:
            capacity = rows
        return LayerShape(
            tokens,
            self.model_dim,
            self.hidden_dim,
            self.num_experts,
            self.top_k,
            rows,
            self.element_size,
            self.training,
            gated=self.gated,
            capacity=capacity,
        )

    def describe(self) -> str:
        text = (
            f"M={self.model_dim} H={self.hidden_dim} E={self.num_experts} K={self.top_k}"
            f" over {self.group_size} ranks, capacity up to {2**self.bucket}"
        )
        if not self.training:
            text += ", inference"
        return text


class Trial:
    """One call that is timed without waiting for the device.

    `begin` and `end` enclose the part that the strategy affects.

    Args:
        purpose: "timed"; "warm-up": the time is not used; "held": nothing is timed, but the layer
            keeps the strategy until the end of the backward pass, which may recompute the call.
        has_backward: whether the time includes the backward pass.
    """

    def __init__(
        self,
        key: Key,
        strategy: ParallelStrategy,
        purpose: Purpose = "timed",
        has_backward: bool = False,
    ) -> None:
        self.key = key
        self.strategy = strategy
        self.purpose = purpose
        self.has_backward = has_backward
        self._start: Time | None = None
        self._gradient_start: Time | None = None
        self._forward: Span | None = None
        self._backward: Span | None = None

    @property
    def finished(self) -> bool:
        """Whether the host has passed the end of the call."""
        if self.has_backward:
            return self._backward is not None
        return self._forward is not None

    @property
    def seconds(self) -> float:
        """Seconds of the forward pass and, with `has_backward`, of the backward pass.

        On a GPU this waits for the end of the call.
        """
        assert self._forward is not None
        seconds = _seconds(self._forward)
        if self.has_backward:
            assert self._backward is not None
            seconds += _seconds(self._backward)
        return seconds

    def begin(self, tokens: Tensor) -> Tensor:
        self._start = _now(tokens)
        if self.has_backward:
            return _Mark.apply(tokens, self._gradient_ends)
        return tokens

    def end(self, y: Tensor) -> Tensor:
        assert self._start is not None
        # Set at the end, because a forward pass that recomputes activations may start again and
        # stop early.
        self._forward = (self._start, _now(y))
        if self.has_backward:
            return _Mark.apply(y, self._gradient_begins)
        return y

    def _gradient_begins(self, grad: Tensor) -> None:
        self._gradient_start = _now(grad)

    def _gradient_ends(self, grad: Tensor) -> None:
        assert self._gradient_start is not None
        self._backward = (self._gradient_start, _now(grad))


def _now(tensor: Tensor) -> Time:
    if not tensor.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(span: Span) -> float:
    start, end = span
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


class _Mark(torch.autograd.Function):
    """The identity; calls `passed` with the gradient."""

    @staticmethod
    def forward(ctx, x, passed):
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.passed(grad)
        return grad, None


@dataclass
class Search:
    """The state of the search for one key.

    Args:
        predicted: the predicted seconds of the strategies to try. The first strategy is used until
            one has been measured.
    """

    predicted: dict[ParallelStrategy, float]
    decided: ParallelStrategy | None = None
    seconds: dict[ParallelStrategy, list[float]] = field(default_factory=dict)
    queue: list[ParallelStrategy] = field(default_factory=list)  # of this round
    survivors: list[ParallelStrategy] = field(default_factory=list)
    under_way: int = 0
    rounds: int = 0

    def median(self, strategy: ParallelStrategy) -> float:
        return statistics.median(self.seconds[strategy])

    def medians(self) -> dict[ParallelStrategy, float]:
        """The median seconds of each measured strategy."""
        return {strategy: self.median(strategy) for strategy in self.seconds}

    def best(self) -> ParallelStrategy:
        """The decided strategy, or else the fastest one measured, or else the best prediction."""
        if self.decided is not None:
            return self.decided
        rivals = self.survivors or list(self.seconds) or [next(iter(self.predicted))]
        if not self.seconds:
            return rivals[0]
        return min(rivals, key=self.median)

    def loss(self, strategy: ParallelStrategy) -> float:
        """The expected extra time of one more trial, in units of a call of the best strategy."""
        if not self.seconds:
            return 0.0
        if strategy in self.seconds:
            return self.median(strategy) / self.median(self.best()) - 1
        return max(self.predicted[strategy] / self.predicted.get(self.best(), 1.0) - 1, 0.0)
