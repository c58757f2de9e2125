"""Communication that runs concurrently with the caller.

For CPU tensors it runs on threads, for GPU tensors on side streams.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.context import first_derivative_only

Tensors = tuple[Tensor, ...]
Work = Callable[..., Tensors]
Wait = Callable[[], Tensors]


class CommStream:
    """Runs functions that communicate, concurrently with the caller's work.

    Functions of one process group run one after the other, in the order of submission. Functions of
    different process groups run at the same time. Every rank must submit the same functions in the
    same order.

    Args:
        concurrent: whether functions run concurrently. Their process groups must then be used for
            nothing else: with two threads on one process group, the order of its collectives could
            differ between ranks. If False, a function runs when it is submitted, on the caller's
            thread and stream.
    """

    def __init__(self, concurrent: bool) -> None:
        self.concurrent = concurrent
        self._failure = _Failure()
        self._queues: dict[dist.ProcessGroup | None, SimpleQueue] = {}
        self._streams: dict[tuple, torch.cuda.Stream] = {}

    def submit(
        self, function: Work, *tensors: Tensor, process_group: dist.ProcessGroup | None = None
    ) -> Wait:
        """Start `function(*tensors)`, which returns tensors.

        Args:
            tensors: at least one tensor; all on one device.
            process_group: the process group over which the function communicates.

        Returns:
            A function that waits and returns the results of `function`, or raises its error. On a
            GPU only the caller's current stream waits.
        """
        tensors = tuple(tensor.detach() for tensor in tensors)
        if not self.concurrent:
            return _run_now(function, tensors)
        if tensors[0].is_cuda:
            return self._submit_to_stream(function, tensors, process_group)
        return self._submit_to_thread(function, tensors, process_group)

    def _submit_to_thread(
        self, function: Work, tensors: Tensors, process_group: dist.ProcessGroup | None
    ) -> Wait:
        if process_group not in self._queues:
            queue: SimpleQueue = SimpleQueue()
            self._queues[process_group] = queue
            # A daemon thread: if the main thread fails, the process must not wait for peers.
            thread = threading.Thread(
                target=_serve,
                args=(queue, self._failure),
                name="moe_core communication",
                daemon=True,
            )
            thread.start()
        future: Future = Future()
        task = (future, torch.is_inference_mode_enabled(), function, tensors)
        self._queues[process_group].put(task)
        return future.result

    def _submit_to_stream(
        self, function: Work, tensors: Tensors, process_group: dist.ProcessGroup | None
    ) -> Wait:
        device = tensors[0].device
        key = (device, process_group)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        stream = self._streams[key]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.no_grad():
            results = function(*tensors)
            done = stream.record_event()
        # The allocator must not reuse a tensor's memory before the other stream has used it.
        for tensor in tensors:
            tensor.record_stream(stream)

        def wait() -> Tensors:
            current = torch.cuda.current_stream(device)
            current.wait_event(done)
            for result in results:
                result.record_stream(current)
            return results

        return wait


class _Failure:
    """The first error of a CommStream's threads. After it no thread runs further functions."""

    error: BaseException | None = None


def _run_now(function: Work, tensors: Tensors) -> Wait:
    future: Future = Future()
    try:
        with torch.no_grad():
            future.set_result(function(*tensors))
    except Exception as error:  # raised when the caller waits, as with a thread
        future.set_exception(error)
    return future.result


def _serve(queue: SimpleQueue, failure: _Failure) -> None:
    while True:
        future, inference, function, tensors = queue.get()
        try:
            # After a failure the ranks are not synchronised, so nothing more can be exchanged.
            if failure.error is not None:
                raise failure.error
            with torch.inference_mode() if inference else torch.no_grad():
                results = function(*tensors)
        except BaseException as error:  # raised when the caller waits
            failure.error = error
            future.set_exception(error)
        else:
            future.set_result(results)
        # An idle thread must not keep tensors alive.
        results = None
        del future, function, tensors


class PendingWork(ABC):
    """Communication between two autograd nodes, `depart` and `arrive`, and that of its gradients.

    Work between the nodes overlaps with it, in the backward pass too: autograd runs the latest node
    first. So it starts to send the gradients at `arrive`, and waits for them at `depart`.
    """

    @abstractmethod
    def start(self, tensors: Tensors, gradient: bool) -> None:
        """Start the communication of the arguments of `depart` or, with `gradient`, of the
        gradients of the results of `arrive`."""

    @abstractmethod
    def finish(self, gradient: bool) -> Tensors:
        """Wait for the results."""

    def depart(self, *tensors: Tensor) -> Tensor:
        """Start. Returns an empty tensor, the argument of `arrive`."""
        return _Depart.apply(self, *tensors)

    def arrive(self, token: Tensor) -> Tensors:
        """Wait for the results."""
        return _Arrive.apply(token, self)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, work, *tensors):
        ctx.work = work
        work.start(tensors, gradient=False)
        return tensors[0].new_empty(0)

    @staticmethod
    @first_derivative_only
    def backward(ctx, token_grad):
        return (None, *ctx.work.finish(gradient=True))


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token, work):
        ctx.work = work
        return work.finish(gradient=False)

    @staticmethod
    @first_derivative_only
    def backward(ctx, *grads):
        ctx.work.start(grads, gradient=True)
        return grads[0].new_empty(0), None
