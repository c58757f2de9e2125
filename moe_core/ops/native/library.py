"""The C++ kernels for CPUs.

They are compiled with $CXX (default: g++) when they are first used, once for each instruction set,
into the user's cache directory. A wheel that `make wheel` builds contains them compiled.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from ctypes import c_double, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from moe_core.ops.native.build_cache import compiled_library
from moe_core.ops.native.instruction_sets import InstructionSet, sets_of_cpu

_NAMES = (
    "ffn.cpp",
    "ffn_int8.cpp",
    "rows.cpp",
    "plan.cpp",
    "route.cpp",
    "attention.cpp",
    "ffn.hpp",
    "ffn_int8.hpp",
    "ffn_work.hpp",
    "activations.hpp",
    "product.hpp",
    "vectors.hpp",
)
_SOURCES = [Path(__file__).with_name(name) for name in _NAMES]
_FLAGS = ["-std=c++17", "-O2", "-fopenmp", "-fPIC", "-shared"]
PREBUILT = Path(__file__).with_name("prebuilt")  # libraries of a wheel, written by prebuild.py
# Weights in a kernel's memory layout have an integer dtype, so that they cannot be used as numbers.
# For products in fp32 they are stored as int32, for products in bf16 as int16.
PACKED_DTYPES = (torch.int32, torch.int16)
_log = logging.getLogger("moe_core")


def description(kernels: str = "auto") -> str:
    """The instruction set in use, for the log; "" if there is none."""
    choice = chosen(kernels)
    if choice is None:
        return ""
    return f"C++ ({choice[0].label})"


def packed_dtype(dtype: torch.dtype, kernels: str = "auto") -> torch.dtype:
    """The dtype of packed weights for rows of `dtype`, which is fp32 or bf16."""
    if dtype == torch.bfloat16 and library(kernels).bf16_product_bytes() == 2:
        return torch.int16
    return torch.int32


def call(
    function: str,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int | float],
    kernels: str = "auto",
) -> int:
    """Call a function of the library.

    The function's arguments are pointers to the contiguous tensors (a null pointer for None), then
    `numbers` as `long`, or as `double` if they are floats.
    """
    arguments: list = [pointer(tensor) for tensor in tensors]
    for number in numbers:
        arguments.append(c_double(number) if isinstance(number, float) else c_long(number))
    return getattr(library(kernels), function)(*arguments)


def pointer(tensor: Tensor | None) -> c_void_p:
    if tensor is None:
        return c_void_p(None)
    return c_void_p(tensor.data_ptr())


def library(kernels: str = "auto") -> ctypes.CDLL:
    """The library, which must exist: `chosen` has found it."""
    choice = chosen(kernels)
    assert choice is not None
    return choice[1]


@functools.cache
def chosen(kernels: str = "auto") -> tuple[InstructionSet, ctypes.CDLL] | None:
    """The instruction set to use, and its library.

    This is the best one that works on this machine, or the one that `kernels` names. None if the
    CPU has no known instruction set, or if C++ does not compile; the log gives the reason.
    """
    problem = ""
    for instructions in sets_of_cpu():
        if kernels not in ("auto", instructions.name):
            continue
        try:
            return instructions, _load(instructions)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            problem = reason.splitlines()[0]
    if problem:
        _log.warning("moe_core kernels: torch on this CPU, since C++ does not compile: %s", problem)
    return None


def _load(instructions: InstructionSet) -> ctypes.CDLL:
    """The library, from the wheel or compiled if necessary.

    Raises:
        OSError, subprocess.CalledProcessError: the library does not compile, or cannot run here.
    """
    prebuilt = PREBUILT / file_name(instructions)
    if prebuilt.exists():
        try:
            return _opened(prebuilt)
        except OSError as error:  # built for another system; compile a library for this one
            _log.info("moe_core kernels: %s does not load (%s)", prebuilt.name, error)
    path = _compiled(instructions)
    try:
        return _opened(path)
    except OSError:
        path.unlink(missing_ok=True)  # the next process compiles it again
        raise


def _opened(path: Path) -> ctypes.CDLL:
    """The library in a file.

    Raises:
        OSError: it cannot be loaded, or the process may not use its instructions.
    """
    library = ctypes.CDLL(str(path))
    if library.request_tiles() != 0:
        raise OSError("the operating system does not allow this process to use AMX")
    functions = (
        library.make_plan,
        library.experts_space,
        library.experts_forward,
        library.experts_backward,
        library.bf16_product_bytes,
        library.int8_space,
        library.int8_weight_words,
        library.attention_space,
    )
    for function in functions:
        function.restype = c_long
    return library


def file_name(instructions: InstructionSet, compiler: str = "") -> str:
    """The name of a library's file. It depends on the sources, the options and the compiler."""
    contents = [source.read_text() for source in _SOURCES]
    key = "\n".join([platform.machine(), compiler, instructions.options, *_FLAGS, *contents])
    return f"{instructions.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def compile_library(instructions: InstructionSet, path: Path) -> None:
    """Compile the library with $CXX (g++) into `path`.

    Raises:
        OSError, subprocess.CalledProcessError: it does not compile.
    """
    sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
    command = _compiler() + _FLAGS + instructions.options.split() + ["-o", str(path)] + sources
    subprocess.run(command, check=True, capture_output=True, text=True)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "g++")


def _compiled(instructions: InstructionSet) -> Path:
    """The library for these sources, instructions and compiler, in the cache of the user."""
    program = _compiler()
    version = subprocess.run(program + ["--version"], check=True, capture_output=True, text=True)
    name = file_name(instructions, " ".join(program) + version.stdout)

    def compile_to(path: Path) -> None:
        _log.info("moe_core kernels: compiling %s, once (about 10 s)", path.with_name(name))
        compile_library(instructions, path)

    return compiled_library(name, compile_to)
