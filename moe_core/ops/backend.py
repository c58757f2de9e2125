"""Chooses the kernels of a pass: Triton, C++ or torch.

An implementation of an operation is called a form: a module of the operation's folder, `triton`,
`cpp` or `reference`. `chosen` chooses the language for a name of KERNELS and a device. An operation
uses its form in that language if it supports the arguments, otherwise the torch form, which
supports everything. The logger "moe_core" logs the available languages once.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.context import in_transform
from moe_core.ops.native import library
from moe_core.ops.native.instruction_sets import sets_of_cpu
from moe_core.options import CPU_KERNELS, KERNELS

# The activations that the Triton and C++ kernels compute. The index is the number in the kernels.
# The last one is for gated experts only.
KERNEL_ACTIVATIONS = ("gelu", "relu", "silu", "clamped_swiglu")
# The auxiliary losses whose sums the Triton router computes. The index is the number in the kernel.
KERNEL_LOSSES = ("none", "gshard", "load_importance", "load_importance_tutel")
_log = logging.getLogger("moe_core")


class Kernels(NamedTuple):
    """The kernels of one pass on one device."""

    language: str  # "triton", "cpp" or "torch"
    name: str  # one of KERNELS, for the instructions of C++


def chosen(kernels: str | Kernels, x: Tensor) -> Kernels:
    """The kernels that compute with x. A layer chooses them once in a pass, for all operations.

    Args:
        kernels: the result of an earlier call, or a name.

            - "auto" allows Triton on a CUDA device where it works, C++ on a CPU, and torch.
            - "triton" allows Triton and torch.
            - "torch" allows only torch.
            - A name in CPU_KERNELS makes the experts' products on a CPU use these instructions. On
              another device it is the same as "auto".

            With TRITON_INTERPRET=1 Triton's interpreter runs the kernels, also on a CPU. On a CPU
            "auto" does not select the interpreter. In a torch.func transform or a level of
            forward-mode differentiation torch computes.

    Raises:
        ValueError: `kernels` has another value; it is "triton" but Triton cannot run; or it names
            instructions that this CPU lacks or whose kernels do not compile or load.
    """
    if isinstance(kernels, Kernels):
        return kernels
    if in_transform(x):
        return Kernels("torch", kernels)
    if torch.compiler.is_compiling():
        return Kernels(_constant_language(kernels, x.device.type), kernels)
    return Kernels(language(kernels, x.device.type), kernels)


@torch.compiler.assume_constant_result  # torch.compile cannot trace logging and imports
def _constant_language(kernels: str, device: str) -> str:
    return language(kernels, device)


# Chosen once for each device; a call that failed is tried again. Beyond its limit of
# recompilations torch.compile runs the layer without tracing it, and would compile the functions
# that the layer calls, this one too.
@functools.cache
@torch.compiler.disable
def language(kernels: str, device: str) -> str:
    """The language of the kernels on a device of this type; outside of torch.compile."""
    check_kernels(kernels, device)
    if device == "meta":  # all forms return the same shapes
        return "torch"
    if kernels == "torch":
        _log_once(f"torch on {device}")
        return "torch"
    if kernels in CPU_KERNELS and device != "cpu":
        return language("auto", device)
    if kernels in ("auto", *CPU_KERNELS) and device == "cpu":
        description = library.description(kernels)
        if not description:  # the CPU is not known, or no library loads
            _log_once("torch on cpu")
            return "torch"
        _log_once(f"{description} and torch on cpu")
        return "cpp"
    if kernels == "auto" and device != "cuda":
        _log_once(f"torch on {device}")
        return "torch"
    if os.environ.get("MOE_CORE_VERIFY", "0") != "0":
        _log_once("MOE_CORE_VERIFY has no effect; `python -m moe_core.ops.verify` checks kernels")
    obstacle = _triton_obstacle(device)
    if obstacle is None:
        _log_once(f"{_triton_name()} on {device}")
        return "triton"
    _log_once(f"torch on {device}, since Triton cannot run there: {obstacle}", logging.WARNING)
    return "torch"


def check_kernels(kernels: str, device: str) -> None:
    """Raise ValueError if the kernels of this name cannot run on a device of this type."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels ({kernels!r}) must be one of {', '.join(KERNELS)}")
    if kernels in CPU_KERNELS and device == "cpu" and not library.description(kernels):
        raise ValueError(_why_no_library(kernels))
    if kernels == "triton" and device != "meta":
        obstacle = _triton_obstacle(device)
        if obstacle is not None:
            raise ValueError(f"kernels ('triton') cannot run on device type {device!r}: {obstacle}")


@functools.cache
def load(operation: str, language: str) -> ModuleType:
    """The form of an operation, such as "route", in a language."""
    form = "reference" if language == "torch" else language
    return importlib.import_module(f"moe_core.ops.{operation}.{form}")


_NO_CHANGE: AbstractContextManager = nullcontext()


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """A context in which the tensor's device is the current one, on which Triton launches."""
    # Where nothing changes torch.cuda.device_of takes the host four times as long.
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device_of(tensor)


def on_its_device(launcher: Callable) -> Callable:
    """Decorator that makes the device of the first argument current."""

    @functools.wraps(launcher)
    def launch(first: Tensor, *others):
        with on_device_of(first):
            return launcher(first, *others)

    return launch


def _why_no_library(kernels: str) -> str:
    """Why `kernels`, one of CPU_KERNELS, cannot run here."""
    if kernels in [instructions.name for instructions in sets_of_cpu()]:
        return (
            f"kernels ({kernels!r}) cannot run here: they do not compile or load (the log says why)"
        )
    return f"kernels ({kernels!r}) cannot run here: this CPU lacks the instructions"


@functools.cache  # the same message is logged once
def _log_once(choice: str, level: int = logging.INFO) -> None:
    _log.log(level, "moe_core kernels: %s", choice)


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_name() -> str:
    import triton

    suffix = ""
    if is_interpreted():
        suffix = " (interpreted)"
    return f"triton {triton.__version__}{suffix}"


def _triton_obstacle(device: str) -> str | None:
    """Why Triton's kernels cannot run on this device type; None if they can."""
    if device != "cuda" and not is_interpreted():
        return "that takes a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter"
    try:
        import triton

        if not is_interpreted():
            # This compiles Triton's launcher. The C compiler or Python.h may be missing.
            triton.runtime.driver.active.get_current_device()
    except Exception as error:  # the torch forms run instead, and the log gives the reason
        return f"{type(error).__name__}: {error}"
    return None
