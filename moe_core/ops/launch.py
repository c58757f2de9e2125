"""Launches of Triton kernels in about a third of the host's time (docs/log.md), and compilation of
the kernels of some passes on all cores before they run.

At each launch Triton 3.6 inspects all arguments in Python, builds a key from them to find the
compiled kernel, and calls its launch hooks, mostly none. A `CachedKernel` finds the compiled kernel
by a shorter key, which differs wherever Triton would compile another one, and launches it directly.

Triton itself makes the first launch for each key, and every launch with a pointer that is not a
multiple of 16, a number beyond 31 bits or a hook. It makes all launches on GPUs that are not
NVIDIA's, in its interpreter, and in versions other than 3.6, whose internals may differ.
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
from triton.runtime.jit import JITFunction

from moe_core.ops.backend import is_interpreted

_IS_KNOWN = triton.__version__.startswith("3.6.")
if _IS_KNOWN:
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

# Generated for each kernel, as Triton's own functions of this kind are: in a loop over the
# parameters it would take 1.6 times as long.
_LAUNCHER = """
def launch(_grid, {names}, **_options):
    _key = _kept = None
    _active = _driver.active
    _device = _active.get_current_device()
    try:
        if {conditions}:
            _settings = (_runtime.debug, _compilation.instrumentation_mode)
            _key = ({parts}, _device, *_settings, *_options.items())
            _kept = _compiled.get(_key)
        _hooks = _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls
    except AttributeError:  # an argument of another kind, or a hook that is no chain of hooks
        _kept = None
    if _recorded and _is_recorded(_kernel, _key, _grid, ({names}), _options):
        return
    if _kept is None or _hooks or _kernel.pre_run_hooks or (
        _kernel.used_global_vals and _has_changed()
    ):
        return _launch_by_triton(_key, _grid, ({names}), _options)
    _x, _y, _z = (*_grid, 1, 1)[:3]
    _run, _function, _metadata = _kept
    _stream = _active.get_current_stream(_device)
    _run(_x, _y, _z, _stream, _function, _metadata, None, None, None, {names})
"""


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


def _is_recorded(kernel, key, grid, arguments, options) -> bool:
    """Note a launch if its thread is recorded. The kernel's tensors become zeros: what it would
    have written may be an index.

    Raises:
        RuntimeError: a tensor is protected.
    """
    record = _recorded.get(threading.get_ident())
    if record is None:
        return False
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.untyped_storage().data_ptr() in record.protected:
                raise RuntimeError("a kernel got a tensor of the model itself, not of its copy")
            argument.data.zero_()
    # Without the tensors, whose memory would be kept until all is compiled.
    arguments = tuple(map(_without_memory, arguments))
    if key is None:
        key = (*arguments, *options.items())
    kernel.device_caches[driver.active.get_current_device()]  # made here, not by many threads
    job = partial(_compile, kernel, arguments, {"grid": grid, **options})
    record.jobs.setdefault((id(kernel), key), job)
    return True


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
    """Context in which this thread launches no `CachedKernel`. Afterwards the list has what
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


def cached_launch(kernel):
    """Decorator of a kernel of `triton.jit`, whose parameters are pointers, constants, and numbers
    that are not specialised. It is launched with positional arguments and a tuple as grid."""
    if _IS_KNOWN and isinstance(kernel, JITFunction):
        return CachedKernel(kernel)
    return kernel


class CachedKernel:
    """A kernel, launched as `kernel[grid](*arguments, num_warps=4)`."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        # What a launch takes besides the arguments, by the specialisation.
        self._compiled: dict[tuple, tuple] = {}
        scope = {
            "_driver": driver,
            "_runtime": knobs.runtime,
            "_compilation": knobs.compilation,
            "_compiled": self._compiled,
            "_recorded": _recorded,
            "_is_recorded": _is_recorded,
            "_kernel": kernel,
            "_has_changed": self._has_changed,
            "_launch_by_triton": self._launch_by_triton,
        }
        exec(_launcher_of(kernel), scope)
        self._launch: Callable = scope["launch"]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch_by_triton(self, key, grid, arguments, options) -> None:
        compiled = self.kernel[grid](*arguments, **options)
        if key is not None and _is_for_nvidia(compiled):
            self._compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata)

    def _has_changed(self) -> bool:
        """Whether a global constant has changed since compilation, which Triton refuses."""
        constants = self.kernel.used_global_vals.items()
        return any(scope.get(name) != value for (name, _), (value, scope) in constants)


def _is_for_nvidia(compiled) -> bool:
    """Other makers' kernels depend on more than a pointer's dtype and alignment. What has no
    compiled kernel was not launched."""
    return type(compiled) is CompiledKernel and compiled.metadata.target.backend == "cuda"


def _launcher_of(kernel: JITFunction) -> str:
    addresses, conditions, parts = [], [], []
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            parts.append(name)
        elif parameter.do_not_specialize:
            conditions.append(f"type({name}) is int and 0 <= {name} < {2**31}")
        else:
            addresses.append(f"(0 if {name} is None else {name}.data_ptr())")
            parts.append(f"None if {name} is None else {name}.dtype")
    conditions.append(f"({' | '.join(addresses)}) % 16 == 0")
    return _LAUNCHER.format(
        names=", ".join(kernel.arg_names),
        conditions=" and ".join(conditions),
        parts=", ".join(parts),
    )
