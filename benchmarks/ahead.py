"""Triton kernels compiled by many processes before they are needed. In one process the kernels of a
network take minutes, one after the other.

The work runs once without launching Triton's kernels, which notes what it would compile. Forked
processes then fill Triton's cache on the disk. What the pass computes is meaningless, and the
engine may remember it: a process that calls this should not also measure.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest import mock

import torch
from torch import Tensor

SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes of a program, by architecture

Jobs = dict[tuple, tuple]  # kernel and specialisation -> the kernel, and its specialisation as text


class _Target:
    """What compilation asks of Triton's driver. It is read before the fork: a forked process cannot
    use CUDA."""

    def __init__(self, device: int, target) -> None:
        self.device, self.target = device, target

    def get_current_device(self) -> int:
        return self.device

    def get_current_target(self):
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


def without_a_gpu(architecture: int) -> None:
    """From here on `compile_ahead` compiles for NVIDIA's GPUs of an architecture, and layers with
    `kernels="triton"` take a CPU's tensors. Nothing can be launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from moe_core.ops import backend
    from moe_core.ops.ffn import triton as ffn

    def shared_memory(tokens: Tensor) -> int:
        return 0 if tokens.dtype == torch.float32 else SHARED_MEMORY[architecture]

    driver.set_active(_Target(0, GPUTarget("cuda", architecture, 32)))
    backend._triton_obstacle = lambda device: None
    ffn._shared_memory = shared_memory


def compile_in_another_process() -> None:
    """Run this script once more with --compile. If that fails, kernels are compiled at launch."""
    subprocess.run([sys.executable, *sys.argv, "--compile"], check=False)


def without_verification() -> None:
    """From here on the engine does not check its kernels before their first use: the launches of
    the checks would be counted, and without launches they would fail."""
    os.environ["MOE_CORE_VERIFY"] = "0"


def compile_ahead(works: Iterable[Callable[[], object]]) -> int:
    """Compile the kernels that each of `works` would launch, a share on each core.

    The kernels behind an error in a work are left out.

    Returns:
        The number of kernels, those that Triton's cache had included.
    """
    jobs: Jobs = {}
    with _recorded(jobs):
        for work in works:
            try:
                work()
            except Exception as error:
                reason = str(error).partition("\n")[0]
                print(f"left after {len(jobs)} kernels: {reason}", file=sys.stderr)
    start = time.monotonic()
    _compile(list(jobs.values()), os.cpu_count() or 1)
    seconds = time.monotonic() - start
    print(f"{len(jobs)} kernels compiled in {seconds:.1f} s", flush=True)
    return len(jobs)


@contextmanager
def _recorded(jobs: Jobs) -> Iterator[None]:
    """Within it, launches only add to `jobs`. New tensors hold zeros: what a kernel would have
    written may be an index."""
    from triton import knobs

    def note(*, fn, compile, **_) -> bool:
        jobs[fn.name, str(compile["key"])] = fn.jit_function, compile["specialization_data"]
        return True  # Triton neither compiles nor launches

    def zeros(*sizes, memory_format=None, **options) -> torch.Tensor:
        return torch.zeros(*sizes, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "empty", zeros))
        stack.enter_context(mock.patch.object(torch, "empty_like", torch.zeros_like))
        stack.enter_context(mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros))
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", note))
        yield


def _compile(jobs: list[tuple], processes: int) -> None:
    from triton.runtime import driver

    active, children = driver.active, []
    target = _Target(active.get_current_device(), active.get_current_target())
    for i in range(min(processes, len(jobs))):
        child = os.fork()
        if child == 0:
            try:
                driver.set_active(target)
                for kernel, specialisation in jobs[i::processes]:
                    with suppress(Exception):  # its launch will say why
                        kernel.preload(specialisation)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
