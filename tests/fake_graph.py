"""A CUDA graph on a machine without a GPU: operations are recorded, and replayed one by one."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operation(NamedTuple):
    function: Any
    args: tuple
    kwargs: dict
    result: Any

    def again(self) -> None:
        """Run it, and write what it returns to where its first result lies."""
        results = _tensors(self.function(*self.args, **self.kwargs))
        for old, new in zip(_tensors(self.result), results, strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


class FakeGraph(TorchDispatchMode):
    """Records the operations below it. Numbers that Python passes to them stay in it, as in a CUDA
    graph, and what reads a tensor on the host is refused.

    Recording computes, so the first replay does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._is_first = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # in inference mode `item` arrives whole
        if str(function) in ("aten._local_scalar_dense.default", "aten.item.default"):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        self.operations.append(Operation(function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        with torch.no_grad():
            for operation in self.operations:
                operation.again()


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """In place of `swinv2_moe.train.graph.capture`."""
    graph = FakeGraph()
    state = torch.get_rng_state()
    try:
        with graph:
            run()
    except RuntimeError:
        torch.set_rng_state(state)
        raise
    return graph.replay


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
