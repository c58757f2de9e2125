"""Which kernels run, Triton's, C++ or plain torch; one line in the log, named "moe_core", says
so."""

import functools
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

from moe_core.kernels import library_x86

KERNELS = ("auto", "triton", "torch")
_log = logging.getLogger("moe_core")


# it logs and imports, neither of which torch.compile can trace
@torch.compiler.assume_constant_result
def choose(kernels: str, device_type: str) -> str:
    """Whose kernels work on tensors on a device of this type: "triton" or "torch".

    `kernels`: "auto" takes Triton on a CUDA device where it works and torch elsewhere (where
    operations then look for C++ themselves, by library_x86); "triton" and "torch" force one. Under
    TRITON_INTERPRET=1 Triton's interpreter runs the kernels, on a CPU too; "auto" does not choose
    it there.

    Raises:
        ValueError: another `kernels`, or Triton forced where it cannot run.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels ({kernels!r}) must be one of {', '.join(KERNELS)}")
    if device_type == "meta":  # shapes alone: both give the same
        return "torch"
    return _choose(kernels, device_type)


def on_its_device(launcher: Callable) -> Callable:
    """Triton launches on the current device; this makes it the one of the launcher's first
    argument."""

    @functools.wraps(launcher)
    def launch(first: Tensor, *others):
        with torch.cuda.device_of(first):
            return launcher(first, *others)

    return launch


@functools.cache
def _choose(kernels: str, device_type: str) -> str:
    if kernels == "torch" or (kernels == "auto" and device_type != "cuda"):
        compiled = library_x86.description() if kernels == "auto" and device_type == "cpu" else ""
        _say(f"{compiled and f'{compiled} and '}torch on {device_type}")
        return "torch"
    obstacle = _obstacle(device_type)
    if obstacle is None:
        _say(f"{_triton_name()} on {device_type}")
        return "triton"
    if kernels == "triton":
        raise ValueError(
            f"kernels ('triton') cannot run on device type {device_type!r}: {obstacle}"
        )
    _say(f"torch on {device_type}, since Triton cannot run there: {obstacle}", logging.WARNING)
    return "torch"


@functools.cache  # several ways lead to one choice: one line
def _say(choice: str, level: int = logging.INFO) -> None:
    _log.log(level, "moe_core kernels: %s", choice)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_name() -> str:
    import triton

    return f"triton {triton.__version__}{' (interpreted)' if _interpreted() else ''}"


def _obstacle(device_type: str) -> str | None:
    """Why Triton's kernels cannot run on this device type; None: they can."""
    if device_type != "cuda" and not _interpreted():
        return "that takes a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter"
    try:
        import triton

        if not _interpreted():
            # Builds what every launch goes through, with the C compiler and Python.h; either may be
            # missing.
            triton.runtime.driver.active.get_current_device()
    # whatever it is, torch's kernels still run, and the log gives the reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
