"""The phases of a training step: which operators belong to each, their time, FLOPs and bytes.

The phase of an operator of the forward pass follows from the module that calls it and from its
name. An operator of the backward pass has the phase of the operator that it differentiates, by
autograd's sequence numbers. What runs after the backward pass belongs to the optimiser.

- trunk: everything that is not listed below.
- router: logits, choice, auxiliary loss, plan of rows, and all else of an MoE layer.
- dispatch: tokens to rows, and rows back to tokens. Where the experts' operator does this, too, it
  counts as experts.
- experts: their products and activations.
- exchange: the collectives, each from its start to its end. In a step without the profiler a part
  of them overlaps with computation.
- optimiser: norm and clipping of the gradients, and the update.
- other: the remaining time of a step, such as Python, launches and waiting for the exchange.

Two phases are no part of the step:

- data: this process reads, decodes and augments a batch. In a run, DATA.NUM_WORKERS processes share
  this work.
- checkpoint: a whole save, until it is on the disk. Training waits only for a part of it.

Counted on one rank:

- FLOPs: torch's formulas of its FLOP counter (products, convolutions, attention).
- Memory: every operator reads each input tensor once and writes each output tensor once. A view
  moves nothing. If results stay in a cache between two operators, less is moved, and the phase may
  be faster than its roof.
- Exchange: bytes sent to other ranks. An all-reduce of n bytes counts as 2 n (W - 1) / W.
- Disk: bytes read for a batch's images (from a cache or not), and the size of the checkpoint's
  files.

W ranks
"""

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moe_core import moe_layers
from swinv2_moe.data.build import Data
from swinv2_moe.data.datasets import Batch
from swinv2_moe.models import MoEModel
from swinv2_moe.train.meta import describe
from swinv2_moe.train.saver import Cost, Saver
from swinv2_moe.train.section import CheckpointConfig
from swinv2_moe.train.step import TrainingStep

PHASES = (
    *("data", "trunk", "router", "dispatch", "experts", "exchange", "optimiser", "other"),
    "checkpoint",
)

_DISPATCH = ("moe_core::dispatch_rows", "moe_core::combine_rows", "moe_core::sum_rows")
_RANGE = "phase: "  # before the name of a phase in the profiler
# Operators that do not read the values of `self`: they use only its shape, or write to it.
_UNREAD = {
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
}


@dataclass(frozen=True)
class Work:
    """The computation and data movement of one rank."""

    flops: float = 0.0
    memory: float = 0.0  # bytes read and written
    exchange: float = 0.0  # bytes sent to other ranks
    disk: float = 0.0  # bytes

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Task(NamedTuple):
    """A function and the work of one call."""

    run: Callable[[], object]
    work: Work


# The phases of a step


class Operators(TorchDispatchMode):
    """A context for one training step, which finds the phase of each operator.

    Exchanges of MoE layers then run on this thread, where their operators are seen. All ranks enter
    the context.

    Args:
        work: the work of each operator is added to its phase's; None: the profiler gets the phase
            of each operator as a range around it.
    """

    def __init__(self, model: MoEModel, work: dict[str, Work] | None = None) -> None:
        super().__init__()
        self.model = model
        self.work = work
        self.modules: list[str] = []  # the phases of the modules that run, the innermost last
        self.differentiated: dict[int, str] = {}  # phases by autograd's sequence number
        self.is_after_forward = False
        self.thread = get_ident()  # of the forward pass
        self.restore = ExitStack()

    def __enter__(self):
        for layer in moe_layers(self.model).values():
            self._watch(layer, "router")
            self._watch(layer.experts, "experts")
            stream = layer.group.comm_stream
            self.restore.callback(setattr, stream, "concurrent", stream.concurrent)
            stream.concurrent = False
        return super().__enter__()

    def __exit__(self, *error):
        self.restore.close()
        return super().__exit__(*error)

    def _watch(self, module: nn.Module, phase: str) -> None:
        def begin(*_) -> None:
            self.modules.append(phase)

        def end(*_) -> None:
            self.modules.pop()

        self.restore.callback(module.register_forward_pre_hook(begin).remove)
        self.restore.callback(module.register_forward_hook(end, always_call=True).remove)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        phase = self._phase(operator_name(func))
        if self.work is None:
            with record_function(_RANGE + phase):
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self.work[phase] += work_of(func, args, kwargs, out)
        return out

    def _phase(self, name: str) -> str:
        node = torch._C._current_autograd_node()  # None outside of a backward pass
        self.is_after_forward |= node is not None
        if name.startswith("c10d::"):
            return "exchange"
        if name in _DISPATCH:
            phase = "dispatch"
        elif self.modules:  # also where a backward pass computes a block again
            phase = self.modules[-1]
        elif node is not None:
            return self.differentiated.get(node._sequence_nr(), "trunk")
        elif self.is_after_forward:
            return "optimiser"
        else:
            phase = "trunk"
        # On a GPU the backward pass has a thread with numbers of its own. What it computes again is
        # not differentiated: blocks' activations are recomputed for the nodes of the forward pass.
        if get_ident() != self.thread:
            return phase
        # the node of this operator has the last number, if the operator is differentiated
        self.differentiated.setdefault(torch.autograd._get_sequence_nr() - 1, phase)
        return phase


def count(model: MoEModel, run: Callable[[], object]) -> dict[str, Work]:
    """The work of each phase in one step."""
    work: dict[str, Work] = defaultdict(Work)
    with Operators(model, work):
        run()
    return dict(work)


def milliseconds(model: MoEModel, run: Callable[[], object], device: str) -> dict[str, float]:
    """The time of each phase in one step, without "other"."""
    found: dict[str, float] = defaultdict(float)
    for operator in operators(model, run, device):
        found[operator.phase] += operator.milliseconds
    return dict(found)


class Operator(NamedTuple):
    phase: str
    name: str
    milliseconds: float


def operators(model: MoEModel, run: Callable[[], object], device: str) -> Iterator[Operator]:
    """The operators of one step, by torch's profiler: on a GPU the time of their kernels."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    else:  # the profiler would print that it found no GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    with profile(activities=activities, acc_events=True) as profiler, Operators(model):
        run()
    for event in profiler.events():
        if event.name.startswith("gloo:") and device == "cpu":
            yield Operator("exchange", event.name, event.time_range.elapsed_us() / 1e3)
        phase = event.name.removeprefix(_RANGE)
        if phase == event.name or event.is_async:
            continue
        for operator in event.cpu_children:
            if device == "cuda":
                yield Operator(phase, operator.name, operator.device_time_total / 1e3)
            elif phase != "exchange":
                yield Operator(phase, operator.name, operator.cpu_time_total / 1e3)


# The work of an operator


def work_of(func: Any, args: tuple, kwargs: dict, out: object) -> Work:
    """The FLOPs and bytes of one operator, by its arguments and its result."""
    name = operator_name(func)
    if name.startswith("c10d::"):
        return Work(exchange=_sent_bytes(name, args))
    flops = 0
    if func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
    return Work(float(flops), float(_moved_bytes(func, args, kwargs, out)))


def operator_name(func: Any) -> str:
    """The operator's name without the overload, such as aten::add."""
    return func.name().partition(".")[0]


def _sent_bytes(name: str, args: tuple) -> float:
    """The bytes that a collective of torch.distributed sends from this rank to others."""
    groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    if name == "c10d::allreduce_":
        size, num_bytes = _size_of(groups[0]), sum(map(_size, args[0]))
        return 2 * num_bytes * (size - 1) / size
    if name == "c10d::_allgather_base_":
        return _size(args[1]) * (_size_of(groups[0]) - 1)
    if name == "c10d::_reduce_scatter_base_":
        size = _size_of(groups[0])
        return _size(args[1]) * (size - 1) / size
    if name == "c10d::alltoall_base_":
        group, splits = dist.ProcessGroup.unbox(groups[0]), args[4]
        kept = 1 / group.size()
        if splits:
            kept = splits[group.rank()] / max(sum(splits), 1)
        return _size(args[1]) * (1 - kept)
    return 0.0


def _size_of(group: torch.ScriptObject) -> int:
    return dist.ProcessGroup.unbox(group).size()


def _moved_bytes(func: Any, args: tuple, kwargs: dict, out: object) -> int:
    """Bytes that an operator reads and writes."""
    name = operator_name(func)
    if name.startswith(("aten::empty", "aten::new_empty")):
        return 0  # allocates without writing
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
    if name in _UNREAD:
        read_tensors.pop(id(values.get("self")), None)
    tensors = list(read_tensors.values()) + list(written_tensors.values()) + new_tensors
    return sum(_size(tensor) for tensor in tensors)


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


# Data and checkpoint


def data(batches: Iterator[Batch]) -> Task:
    """Read the loader's next batch."""
    first = []
    read = bytes_read(lambda: first.append(next(batches)))
    work = Work(memory=float(first[0].images.nbytes), disk=float(read))
    return Task(lambda: next(batches), work)


def endless(images: Data) -> Iterator[Batch]:
    """The batches of the training set, epoch after epoch."""
    for epoch in itertools.count():
        images.set_epoch(epoch)
        yield from images.train_loader


def bytes_read(work: Callable[[], object]) -> int:
    """The bytes that this process reads while `work` runs, as Linux counts them; 0 on other
    systems."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar

    if not Path("/proc/self/io").exists():
        work()
        return 0
    overhead = -so_far() + so_far()  # reading the counter is counted too
    before = so_far()
    work()
    return max(so_far() - before - overhead, 0)


@contextmanager
def checkpoint(
    step: TrainingStep, policy: CheckpointConfig, directory: Path
) -> Iterator[tuple[Task, list[Cost]]]:
    """Save checkpoints into `directory`, without a configuration and a run's state.

    Yields:
        A task that saves a checkpoint, and a list that receives the cost of each save on this rank.
        The first save was done before; the task's work is counted from it.

    Raises:
        UserError: the last save failed.
    """
    costs: list[Cost] = []
    saver = Saver(
        directory,
        step.world,
        policy,
        print_line=lambda text: None,
        report=costs.append,
    )
    meta = describe(step.model, step=0, config="", class_names=[])

    def run() -> None:
        saver.save(step.model, step.state(), meta)
        saver.wait()

    run()
    saver.close()
    # memory: the tensors are copied, then read to be written
    yield Task(run, Work(memory=2.0 * costs[0].bytes, disk=float(costs[0].bytes))), costs
    saver.close()
