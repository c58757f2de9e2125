"""A communication stream that runs concurrently with the caller: a thread for CPU tensors, a side
stream for GPU tensors."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
from torch import Tensor

Work = Callable[..., tuple[Tensor, ...]]
Wait = Callable[[], tuple[Tensor, ...]]


class CommStream:
    """Runs functions one after the other, in the order of submission; every rank of a group must
    submit the same.

    Args:
        concurrent: whether functions run beside the caller's work. The process groups that they use
            must then be used nowhere else: two threads on one process group would meet their peers
            in an order that differs from rank to rank. Otherwise a function runs when it is
            submitted, on the caller's thread and stream.
    """

    def __init__(self, concurrent: bool) -> None:
        self._concurrent = concurrent
        self._queue: SimpleQueue | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, function: Work, tensor: Tensor) -> Wait:
        """Begin `function(tensor)`, which returns tensors.

        Returns:
            A function that waits for the end and returns the tensors, or raises what `function`
            raised. On a GPU only the caller's current stream waits.
        """
        tensor = tensor.detach()
        if not self._concurrent:
            return _run_now(function, tensor)
        if tensor.is_cuda:
            return self._submit_to_stream(function, tensor)
        return self._submit_to_thread(function, tensor)

    def _submit_to_thread(self, function: Work, tensor: Tensor) -> Wait:
        if self._queue is None:
            self._queue = SimpleQueue()
            # daemon: a process whose main thread failed must not wait for peers before it ends
            thread = threading.Thread(
                target=_serve, args=(self._queue,), name="moe_core communication", daemon=True
            )
            thread.start()
        future: Future = Future()
        self._queue.put((future, torch.is_inference_mode_enabled(), function, tensor))
        return future.result

    def _submit_to_stream(self, function: Work, tensor: Tensor) -> Wait:
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.no_grad():
            results = function(tensor)
            done = stream.record_event()
        # The allocator must not reuse a tensor's memory before the other stream has used it.
        tensor.record_stream(stream)

        def wait() -> tuple[Tensor, ...]:
            current = torch.cuda.current_stream(device)
            current.wait_event(done)
            for result in results:
                result.record_stream(current)
            return results

        return wait


def _run_now(function: Work, tensor: Tensor) -> Wait:
    future: Future = Future()
    try:
        with torch.no_grad():
            future.set_result(function(tensor))
    except Exception as error:  # raised in wait(), as with a thread
        future.set_exception(error)
    return future.result


def _serve(queue: SimpleQueue) -> None:
    failure = None
    while True:
        future, inference, function, tensor = queue.get()
        try:
            # after a failure the ranks are out of step, so nothing more can be exchanged
            if failure is not None:
                raise failure
            with torch.inference_mode() if inference else torch.no_grad():
                results = function(tensor)
        except BaseException as error:  # raised in wait()
            failure = error
            future.set_exception(error)
        else:
            future.set_result(results)
        # an idle thread must not keep tensors alive
        results = None
        del future, function, tensor
