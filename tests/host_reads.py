"""Counts how often a program reads a device's tensor on the host, on a machine without a device."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_READS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, torch.nonzero),
    *(Tensor.__int__, Tensor.__float__, Tensor.__bool__, Tensor.__index__, Tensor.masked_select),
}


class HostReads(TorchFunctionMode):
    """Takes every CPU tensor for one of a device, except those that are made for the host: with
    device="cpu", by `host_copy`, or from such tensors alone. Counts the reads of the others.

    Attributes:
        names: of the functions that read, one for each read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._on_host = WeakIdKeyDictionary()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        inputs = list(_tensors((args, kwargs)))
        from_host = [tensor in self._on_host for tensor in inputs]
        if function in _READS and not all(from_host):
            self.names.append(function.__name__)
        made_on_host = str(kwargs.get("device")) == "cpu"
        if made_on_host or (inputs and all(from_host)):
            self._mark(result)
        return result

    def host_copy(self, tables: list[Tensor]) -> Callable[[], list[Tensor]]:
        """In place of `moe_core.parallel.exchange.start_host_copy`."""
        copies = [table.clone() for table in tables]
        self._mark(copies)

        def wait() -> list[Tensor]:
            self.names.append("host copy")
            return copies

        return wait

    def _mark(self, values) -> None:
        for tensor in _tensors(values):
            self._on_host[tensor] = True


def _tensors(value) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def count_reads(function: Callable[[], object]) -> list[str]:
    """The reads of one call; `function` may use `moe_core.parallel.exchange`."""
    from moe_core.parallel import exchange

    reads = HostReads()
    start_host_copy = exchange.start_host_copy
    exchange.start_host_copy = reads.host_copy
    try:
        with reads:
            function()
    finally:
        exchange.start_host_copy = start_host_copy
    return reads.names
