"""Which form of an operation runs: Triton, C++ or torch.

`FORMS` is the table. The forms of an operation are tried in its order; the first one that is
available on the device and supports the arguments runs. The torch form is the last one and supports
everything. One line of the log, named "moe_core", says what is available.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.ops.native import library

KERNELS = ("auto", "triton", "torch")
# The activations that the Triton and C++ kernels compute, in the order of their numbers there.
KERNEL_ACTIVATIONS = ("gelu", "relu", "silu")
# The auxiliary losses whose sums the Triton router computes, in the order of their numbers there.
KERNEL_LOSSES = ("none", "gshard", "load_importance", "load_importance_tutel")
_HALVES_AND_FP32 = (torch.bfloat16, torch.float16, torch.float32)
_FP32_AND_BF16 = (torch.float32, torch.bfloat16)
_log = logging.getLogger("moe_core")


class Request(NamedTuple):
    """What an operation is called with, as far as its forms differ by it."""

    kernels: str
    device: str  # its type
    dtype: torch.dtype  # of the tokens, rows or logits
    weight_dtype: torch.dtype | None = None
    gate_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    activation: str | None = None


class Form(NamedTuple):
    """One implementation of an operation."""

    language: str  # "triton", "cpp" or "torch"
    module: str  # below moe_core.ops; imported when it runs first
    supports: Callable[[Request], bool]


def _everything(request: Request) -> bool:
    return True


def _triton_ffn(request: Request) -> bool:
    return request.activation in KERNEL_ACTIVATIONS and request.dtype in _HALVES_AND_FP32


def _grouped_mm(request: Request) -> bool:
    return request.device == "cuda" and request.dtype == torch.bfloat16


def _cpp_ffn(request: Request) -> bool:
    weight_dtypes = (torch.float32, request.dtype, library.PACKED_DTYPES.get(request.dtype))
    return (
        request.activation in KERNEL_ACTIVATIONS
        and request.weight_dtype in weight_dtypes
        and library.usable(request.dtype)
    )


def _cpp_plan(request: Request) -> bool:
    return library.usable(torch.float32)


def _cpp_rows(request: Request) -> bool:
    return (
        request.dtype in _FP32_AND_BF16
        and request.gate_dtype in (None, torch.float32)
        and request.grad_dtype in (None, torch.float32, request.dtype)
        and library.usable(request.dtype)
    )


FORMS = {
    "route": (
        Form("triton", "route.triton", _everything),
        Form("torch", "route.reference", _everything),
    ),
    "plan": (
        Form("triton", "plan.triton", _everything),
        Form("cpp", "plan.cpp", _cpp_plan),
        Form("torch", "plan.reference", _everything),
    ),
    "combine": (  # dispatch of tokens to rows, and their sums
        Form("triton", "combine.triton", _everything),
        Form("cpp", "combine.cpp", _cpp_rows),
        Form("torch", "combine.reference", _everything),
    ),
    "ffn": (
        Form("triton", "ffn.triton", _triton_ffn),
        Form("cpp", "ffn.cpp", _cpp_ffn),
        Form("torch", "ffn.grouped", _grouped_mm),
        Form("torch", "ffn.loop", _everything),
    ),
    "moe_ffn": (  # dispatch, ffn and combine as one
        Form("triton", "moe_ffn.triton", _triton_ffn),
        Form("torch", "moe_ffn.composed", _everything),
    ),
}


def select(operation: str, request: Request) -> str:
    """The module of the form that runs, to be given to `load`.

    `request.kernels` "auto" allows Triton on a CUDA device where it works, C++ on a CPU, and torch.
    "triton" allows Triton and torch, "torch" torch alone. Under TRITON_INTERPRET=1 Triton's
    interpreter runs the kernels, also on a CPU; "auto" does not allow it there.

    Raises:
        ValueError: another `kernels`, or Triton asked for where it cannot run.
    """
    return _select(operation, *request)


@torch.compiler.assume_constant_result  # it logs and imports, neither of which can be traced
def _select(operation: str, *fields) -> str:
    request = Request(*fields)
    languages = _languages(request.kernels, request.device)
    for form in FORMS[operation]:
        if form.language in languages and form.supports(request):
            return form.module
    raise AssertionError(f"{operation} has no torch form")


def load(module: str) -> ModuleType:
    """The module that `select` named."""
    return importlib.import_module(f"moe_core.ops.{module}")


def on_its_device(launcher: Callable) -> Callable:
    """Triton launches on the current device; this makes it that of the first argument."""

    @functools.wraps(launcher)
    def launch(first: Tensor, *others):
        with torch.cuda.device_of(first):
            return launcher(first, *others)

    return launch


@functools.cache
def _languages(kernels: str, device: str) -> tuple[str, ...]:
    """The languages whose forms may run on a device of this type."""
    if kernels not in KERNELS:
        raise ValueError(f"kernels ({kernels!r}) must be one of {', '.join(KERNELS)}")
    if device == "meta":  # shapes alone: all forms give the same
        return ("torch",)
    if kernels == "torch":
        _log_once(f"torch on {device}")
        return ("torch",)
    if kernels == "auto" and device == "cpu":
        compiled = library.description()
        _log_once(f"{compiled} and torch on cpu" if compiled else "torch on cpu")
        return ("cpp", "torch")
    if kernels == "auto" and device != "cuda":
        _log_once(f"torch on {device}")
        return ("torch",)
    obstacle = _triton_obstacle(device)
    if obstacle is None:
        _log_once(f"{_triton_name()} on {device}")
        return ("triton", "torch")
    if kernels == "triton":
        raise ValueError(f"kernels ('triton') cannot run on device type {device!r}: {obstacle}")
    _log_once(f"torch on {device}, since Triton cannot run there: {obstacle}", logging.WARNING)
    return ("torch",)


@functools.cache  # several values of `kernels` lead to one choice: one line
def _log_once(choice: str, level: int = logging.INFO) -> None:
    _log.log(level, "moe_core kernels: %s", choice)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_name() -> str:
    import triton

    suffix = ""
    if _is_interpreted():
        suffix = " (interpreted)"
    return f"triton {triton.__version__}{suffix}"


def _triton_obstacle(device: str) -> str | None:
    """Why Triton's kernels cannot run on this device type; None: they can."""
    if device != "cuda" and not _is_interpreted():
        return "that takes a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter"
    try:
        import triton

        if not _is_interpreted():
            # Builds what every launch needs with the C compiler and Python.h, which may be missing.
            triton.runtime.driver.active.get_current_device()
    except Exception as error:  # torch's forms still run, and the log gives the reason
        return f"{type(error).__name__}: {error}"
    return None
