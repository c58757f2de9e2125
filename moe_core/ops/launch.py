"""Compilation of the Triton kernels of some passes on all cores before they run.

Triton compiles a kernel at its first launch, one after the other. `compile_ahead` runs the passes
without launching anything, notes which kernels they would launch, and compiles these in threads.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moe_core.ops.backend import is_interpreted

_IS_KNOWN = triton.__version__.startswith("3.6.")  # the version with which this was tested
Job = Callable[[], object]  # compiles a kernel
_MOST_THREADS = 16
_log = logging.getLogger("moe_core")


@dataclass
class _Record:
    """The launches of a thread that only says which kernels to compile."""

    protected: Collection[int]  # addresses of storages that must not change
    jobs: dict[Hashable, Job] = field(default_factory=dict)  # by kernel and key


@dataclass(frozen=True)
class _Pointer:
    """What compilation needs of a tensor, without its memory."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


_recorded: dict[int, _Record] = {}  # by thread
os.register_at_fork(after_in_child=_recorded.clear)


class RecordableKernel:
    """A kernel, launched as `kernel[grid](*arguments, num_warps=4)`, whose launches can be
    recorded."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        record = _recorded.get(threading.get_ident())
        if record is None:
            return self.kernel[grid]
        return partial(_note, record, self.kernel, grid)


def recordable(kernel):
    """Decorator of a kernel of `triton.jit`."""
    if _IS_KNOWN and isinstance(kernel, JITFunction):
        return RecordableKernel(kernel)
    return kernel


def _note(record: _Record, kernel: JITFunction, grid: tuple[int, ...], *arguments, **options):
    """Note a launch. The kernel's tensors become zeros: what it would have written may be an index.

    Raises:
        RuntimeError: a tensor is protected.
    """
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.untyped_storage().data_ptr() in record.protected:
                raise RuntimeError("a kernel got a tensor of the model itself, not of its copy")
            argument.data.zero_()
    key = (*map(_specialisation, kernel.params, arguments), *options.items())
    # Without the tensors, whose memory would be kept until all is compiled.
    arguments = tuple(map(_without_memory, arguments))
    kernel.device_caches[driver.active.get_current_device()]  # made here, not by many threads
    job = partial(_compile, kernel, arguments, {"grid": grid, **options})
    record.jobs.setdefault((id(kernel), key), job)


def _specialisation(parameter, argument) -> Hashable:
    """What differs wherever Triton compiles another kernel for another argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if parameter.do_not_specialize:
        return type(argument), -(2**31) <= argument < 2**31
    return argument


def _without_memory(argument):
    if isinstance(argument, Tensor):
        return _Pointer(argument.dtype, argument.data_ptr())
    return argument


def _compile(kernel, arguments: tuple, options: dict) -> None:
    """Compile a kernel, load it, and compile the C function that launches it, which Triton would do
    at the first launch."""
    kernel.warmup(*arguments, **options).run  # noqa: B018 - a property that does the rest


@contextmanager
def recorded_launches(protected: Collection[int] = ()) -> Iterator[list[Job]]:
    """Context in which this thread launches no `RecordableKernel`. Afterwards the list has what
    `compile_together` needs to compile them.

    Each tensor that a kernel gets is overwritten with zeros, inputs and weights too, and what a
    pass computes is meaningless. Backward passes run in this thread.

    Args:
        protected: addresses of the storages of tensors that no kernel may get.

    Raises:
        RuntimeError: this version of Triton, or its interpreter, launches kernels itself.
    """
    if not _IS_KNOWN or is_interpreted():
        raise RuntimeError(f"the launches of triton {triton.__version__} cannot be recorded")
    jobs: list[Job] = []
    thread = threading.get_ident()
    outer = _recorded.get(thread)
    _recorded[thread] = record = _Record(protected)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield jobs
    finally:
        del _recorded[thread]
        if outer is not None:
            _recorded[thread] = outer
        jobs += record.jobs.values()


def compile_ahead(work: Callable[[], object], protected: Collection[int] = ()) -> int:
    """Compile the kernels that `work` would launch, on all cores, for the current device. By
    themselves they are compiled one after the other.

    `work` runs in `recorded_launches`. Kernels behind an error in it are left out.

    Returns:
        The number of kernels, compiled now or found in Triton's cache; 0 where launches cannot be
        recorded, without running `work`.
    """
    if not _IS_KNOWN or is_interpreted():
        return 0
    with recorded_launches(protected) as jobs:
        try:
            work()
        except Exception as error:
            _log.debug("moe_core kernels: not all are compiled ahead: %r", error)
    compile_together(jobs)
    return len(jobs)


def compile_together(jobs: Sequence[Job]) -> None:
    """Compile kernels on the cores of this process, for the current device. Most of a compilation
    runs without Python's lock. An error is left to the launch."""
    if not jobs:
        return
    device = driver.active.get_current_device()

    def compile(job: Job) -> None:
        if torch.cuda.is_available():  # each thread has a current device of its own
            torch.cuda.set_device(device)
        job()

    with ThreadPoolExecutor(min(len(jobs), _cores())) as pool:
        try:
            wait([pool.submit(compile, job) for job in jobs])
        except BaseException:  # an interrupt does not wait for what has not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _cores() -> int:
    """The cores of this process, which the ranks of a machine share."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, min(_MOST_THREADS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
