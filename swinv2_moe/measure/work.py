"""FLOPs and bytes of a task, counted while it runs.

- FLOPs: torch's FlopCounterMode (products, convolutions, attention).
- Memory: every operator reads each input tensor once and writes each output tensor once. A view
  moves nothing. If results stay in a cache between two operators, less is moved, and the task may
  be faster than its roof.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

# Operators that do not read the values of one argument (the given name): they use only its shape,
# or write to it.
_UNREAD = dict.fromkeys(
    (
        "aten::copy_",
        "aten::fill_",
        "aten::zero_",
        "aten::normal_",
        "aten::uniform_",
        "aten::bernoulli_",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::full_like",
        "aten::rand_like",
        "aten::randn_like",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
    ),
    "self",
)


@dataclass(frozen=True)
class Work:
    """The computation and data movement of one rank."""

    flops: float = 0.0
    memory: float = 0.0  # bytes read and written
    exchange: float = 0.0  # bytes sent to other ranks
    disk: float = 0.0  # bytes


class Task(NamedTuple):
    """A function and the work of one call."""

    run: Callable[[], object]
    work: Work


class MemoryTraffic(TorchDispatchMode):
    """A context that counts in `bytes` the reads and writes of its operators, as described at the
    head of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # these allocate memory without writing to it
        if not operator_name(func).startswith(("aten::empty", "aten::new_empty")):
            self.bytes += _moved_bytes(func, args, kwargs, out)
        return out


def _moved_bytes(func: Callable, args: tuple, kwargs: dict, out: object) -> int:
    """Bytes that an operator reads and writes, by its arguments and its result."""
    arguments = func._schema.arguments  # no public function tells which arguments are written
    values = dict(kwargs)
    for argument, value in zip(arguments, args, strict=False):
        values[argument.name] = value
    written = [values.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    # each tensor counts once, even if it is passed several times
    read_tensors = {id(tensor): tensor for tensor in _tensors_in((args, kwargs))}
    written_tensors = {id(tensor): tensor for tensor in _tensors_in(written)}
    storages = {tensor.untyped_storage() for tensor in read_tensors.values()}
    new_tensors = [t for t in _tensors_in(out) if t.untyped_storage() not in storages]
    if not new_tensors and not written_tensors:
        return 0  # a view
    unread = values.get(_UNREAD.get(operator_name(func)))
    read_tensors.pop(id(unread), None)
    tensors = list(read_tensors.values()) + list(written_tensors.values()) + new_tensors
    return sum(_size(tensor) for tensor in tensors)


def operator_name(func: Callable) -> str:
    """The operator's name without the overload, such as aten::add."""
    return func.name().partition(".")[0]


def _tensors_in(values: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors_in(list(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors_in(value)


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; repeated elements of an expanded tensor count once."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(length for length, stride in lengths if stride)


def counted(run: Callable[[], object]) -> Task:
    """The task of `run`, with FLOPs and memory counted in one call of it."""
    with FlopCounterMode(display=False) as flops, MemoryTraffic() as traffic:
        run()
    return Task(run, Work(float(flops.get_total_flops()), float(traffic.bytes)))
