"""Work that runs beside the caller's: a thread where tensors are on the CPU, a side stream on a
GPU."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

import torch
from torch import Tensor


class Lane:
    """Runs what it is given in that order, one after the other; every rank of a group must give the
    same.

    Args:
        concurrent: whether work runs beside the caller's. The process groups that it uses must then
            be used nowhere else: two threads on one process group would meet their peers in an
            order that differs from rank to rank. Otherwise work runs when it is submitted, on the
            caller's own thread and stream.
    """

    def __init__(self, concurrent: bool) -> None:
        self._concurrent = concurrent
        self._queue: SimpleQueue | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(
        self, function: Callable[..., None], tensors: tuple[Tensor, ...], *args
    ) -> Callable[[], None]:
        """Begin `function(*tensors, *args)`; the result waits for its end and raises what it
        raised.

        On a GPU only the caller's current stream waits. The tensors, inputs and outputs alike, are
        made by the caller.
        """
        tensors = tuple(tensor.detach() for tensor in tensors)
        if not self._concurrent:
            return _run_now(function, tensors, *args)
        if tensors[0].is_cuda:
            return self._submit_to_stream(function, tensors, *args)
        if self._queue is None:
            self._queue = SimpleQueue()
            # daemon: a process whose main thread failed must not wait for peers before it ends
            threading.Thread(
                target=_serve, args=(self._queue,), name="moe_core lane", daemon=True
            ).start()
        future: Future = Future()
        self._queue.put((future, torch.is_inference_mode_enabled(), function, tensors, args))
        return future.result

    def _submit_to_stream(
        self, function: Callable[..., None], tensors: tuple[Tensor, ...], *args
    ) -> Callable:
        device = tensors[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            function(*tensors, *args)
            done = stream.record_event()
        for tensor in tensors:
            # the allocator must not hand its memory on before the stream is through
            tensor.record_stream(stream)
        return lambda: torch.cuda.current_stream(device).wait_event(done)


def _run_now(
    function: Callable[..., None], tensors: tuple[Tensor, ...], *args
) -> Callable[[], None]:
    future: Future = Future()
    try:
        with torch.no_grad():
            future.set_result(function(*tensors, *args))
    except Exception as error:  # raised where the caller waits, as it is with a thread
        future.set_exception(error)
    return future.result


def _serve(queue: SimpleQueue) -> None:
    failure = None
    while True:
        future, inference, function, tensors, args = queue.get()
        try:
            # the peers are not where this rank is: nothing more can be exchanged
            if failure is not None:
                raise failure
            with torch.inference_mode() if inference else torch.no_grad():
                function(*tensors, *args)
        except BaseException as error:  # whatever it is, it belongs to the one who waits
            failure = error
            future.set_exception(error)
        else:
            future.set_result(None)
        del future, function, tensors, args  # a waiting thread must not keep tensors alive
