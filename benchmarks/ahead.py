"""Triton kernels compiled on all cores before they are needed. One after the other, those of a
network take minutes.

The work runs once without launching Triton's kernels (`moe_core.ops.launch.recorded_launches`).
What it computes is meaningless, and the engine may remember it: a process that calls this should
not also measure.
"""

import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SHARED_MEMORY = {80: 166912, 90: 232448}  # bytes of a program, by architecture


class _Target:
    """What compilation asks of Triton's driver."""

    def __init__(self, target) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self):
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


def without_a_gpu(architecture: int) -> None:
    """From here on `compile_works` compiles for NVIDIA's GPUs of an architecture, and layers with
    `kernels="triton"` take a CPU's tensors. Nothing can be launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from moe_core.ops import backend
    from moe_core.ops.ffn import triton as ffn

    def shared_memory(tokens: Tensor) -> int:
        return 0 if tokens.dtype == torch.float32 else SHARED_MEMORY[architecture]

    driver.set_active(_Target(GPUTarget("cuda", architecture, 32)))
    backend._triton_obstacle = lambda device: None
    ffn._shared_memory = shared_memory


def compile_works(works: Iterable[Callable[[], object]]) -> int:
    """Compile the kernels that each of `works` would launch, on all cores.

    The kernels behind an error in a work are left out.

    Returns:
        The number of kernels, those that Triton's cache had included.
    """
    from moe_core.ops.launch import compile_together, recorded_launches

    with recorded_launches() as jobs:
        for work in works:
            try:
                work()
            except Exception as error:
                reason = str(error).partition("\n")[0]
                print(f"the rest of a pass is left out: {reason}", file=sys.stderr)
    start = time.monotonic()
    compile_together(jobs)
    seconds = time.monotonic() - start
    print(f"{len(jobs)} kernels compiled in {seconds:.1f} s", flush=True)
    return len(jobs)
