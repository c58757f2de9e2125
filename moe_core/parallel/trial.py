"""Times one call of a layer without waiting for the device."""

import time
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from moe_core.parallel.strategy import ParallelStrategy

if TYPE_CHECKING:
    from moe_core.parallel.search import Key

Time = float | torch.cuda.Event  # a time on a CPU or on a GPU
Span = tuple[Time, Time]
Purpose = Literal["timed", "warm-up", "held"]


class Trial:
    """One timed call. `begin` and `end` enclose the part that the strategy affects.

    Args:
        purpose: "timed"; "warm-up": the time is not used; "held": nothing is timed, but the layer
            keeps the strategy until the end of the backward pass, which may recompute the call.
        has_backward: whether the time includes the backward pass.
    """

    def __init__(
        self,
        key: "Key",
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
    def ready(self) -> bool:
        """Whether `seconds` returns without waiting, for a trial without a backward pass."""
        if self._forward is None:
            return False
        end = self._forward[1]
        return isinstance(end, float) or end.query()

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
