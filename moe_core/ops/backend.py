"""Selects the form of an operation: Triton, C++ or torch.

The table `FORMS` lists the forms of each operation. `_languages` has the languages of a device in
order of preference. The first form that is available there and supports the arguments runs. The
torch form supports everything. The logger "moe_core" logs the available languages once.
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

from moe_core.ops.native import library
from moe_core.ops.native.instruction_sets import sets_of_cpu
from moe_core.options import CPU_KERNELS, KERNELS

# The activations that the Triton and C++ kernels compute. The index is the number in the kernels.
# The last one is for gated experts only.
KERNEL_ACTIVATIONS = ("gelu", "relu", "silu", "clamped_swiglu")
# The auxiliary losses whose sums the Triton router computes. The index is the number in the kernel.
KERNEL_LOSSES = ("none", "gshard", "load_importance", "load_importance_tutel")
_HALVES_AND_FP32 = (torch.bfloat16, torch.float16, torch.float32)
_FP32_AND_BF16 = (torch.float32, torch.bfloat16)
_log = logging.getLogger("moe_core")


class Request(NamedTuple):
    """The properties of a call that decide which form runs."""

    kernels: str  # one of KERNELS
    device: str  # device type
    dtype: torch.dtype  # of the tokens, rows or logits
    weight_dtype: torch.dtype | None = None
    gate_dtype: torch.dtype | None = None
    activation: str | None = None


class Form(NamedTuple):
    """One implementation of an operation."""

    language: str  # "triton", "cpp" or "torch"
    module: str  # relative to moe_core.ops; imported when it is first used
    supports: Callable[[Request], bool]


def _everything(request: Request) -> bool:
    return True


def _triton_ffn(request: Request) -> bool:
    return request.activation in KERNEL_ACTIVATIONS and request.dtype in _HALVES_AND_FP32


def _cpp_ffn(request: Request) -> bool:
    if request.activation not in KERNEL_ACTIVATIONS or request.dtype not in _FP32_AND_BF16:
        return False
    packed = library.packed_dtype(request.dtype, request.kernels)
    return request.weight_dtype in (*_FP32_AND_BF16, packed)


def _in_fp32(request: Request) -> bool:
    return request.dtype == torch.float32


def _cpp_rows(request: Request) -> bool:
    return request.dtype in _FP32_AND_BF16 and request.gate_dtype in (None, torch.float32)


FORMS = {
    "route": (
        Form("triton", "route.triton", _everything),
        Form("cpp", "route.cpp", _in_fp32),
        Form("torch", "route.reference", _everything),
    ),
    "plan": (
        Form("triton", "plan.triton", _everything),
        Form("cpp", "plan.cpp", _everything),
        Form("torch", "plan.reference", _everything),
    ),
    "combine": (  # dispatch of tokens to rows, and their sums
        Form("triton", "combine.triton", _everything),
        Form("cpp", "combine.cpp", _cpp_rows),
        Form("torch", "combine.reference", _everything),
    ),
    "ffn": (  # with dispatch and combine, but in torch
        Form("triton", "ffn.triton", _triton_ffn),
        Form("cpp", "ffn.cpp", _cpp_ffn),
        Form("torch", "ffn.reference", _everything),
    ),
}


def select(operation: str, request: Request) -> str:
    """The module of the form that runs. Pass it to `load`.

    `request.kernels` limits the choice:

    - "auto" allows Triton on a CUDA device where it works, C++ on a CPU, and torch.
    - "triton" allows Triton and torch.
    - "torch" allows only torch.
    - A name in CPU_KERNELS makes the experts' products on a CPU use these instructions. On another
      device it is the same as "auto".

    With TRITON_INTERPRET=1 Triton's interpreter runs the kernels, also on a CPU. On a CPU "auto"
    does not select the interpreter.

    Raises:
        ValueError: `kernels` has another value; it is "triton" but Triton cannot run; or it names
            instructions that this CPU lacks or whose kernels do not compile or load.
    """
    if torch.compiler.is_compiling():
        return _constant_form(operation, *request)
    return selected(operation, request)


# torch.compile cannot trace logging and imports, so the result is a constant for it. It passes the
# fields one by one: torch 2.14 gives such a function an empty tuple in place of a named one.
@torch.compiler.assume_constant_result
def _constant_form(operation: str, *fields) -> str:
    return selected(operation, Request(*fields))


# Chosen once for each request; a call that failed is tried again. Beyond its limit of
# recompilations torch.compile runs the layer without tracing it, and would compile the functions
# that the layer calls, this one too.
@functools.cache
@torch.compiler.disable
def selected(operation: str, request: Request) -> str:
    """The module of the form that runs; outside of torch.compile."""
    for language in _languages(request.kernels, request.device):
        for form in FORMS[operation]:
            if form.language == language and form.supports(request):
                return form.module
    raise AssertionError(f"{operation} has no torch form")


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
def load(module: str) -> ModuleType:
    """Import the module that `select` returned."""
    return importlib.import_module(f"moe_core.ops.{module}")


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


def _languages(kernels: str, device: str) -> tuple[str, ...]:
    """The languages whose forms may run on a device of this type, in order of preference."""
    check_kernels(kernels, device)
    if device == "meta":  # all forms return the same shapes
        return ("torch",)
    if kernels == "torch":
        _log_once(f"torch on {device}")
        return ("torch",)
    if kernels in CPU_KERNELS and device != "cpu":
        return _languages("auto", device)
    if kernels in ("auto", *CPU_KERNELS) and device == "cpu":
        description = library.description(kernels)
        if not description:  # the CPU is not known, or no library loads
            _log_once("torch on cpu")
            return ("torch",)
        _log_once(f"{description} and torch on cpu")
        return ("cpp", "torch")
    if kernels == "auto" and device != "cuda":
        _log_once(f"torch on {device}")
        return ("torch",)
    if os.environ.get("MOE_CORE_VERIFY", "0") != "0":
        _log_once("MOE_CORE_VERIFY has no effect; `python -m moe_core.ops.verify` checks kernels")
    obstacle = _triton_obstacle(device)
    if obstacle is None:
        _log_once(f"{_triton_name()} on {device}")
        return ("triton", "torch")
    _log_once(f"torch on {device}, since Triton cannot run there: {obstacle}", logging.WARNING)
    return ("torch",)


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
