"""The C++ kernels for CPUs.

They are compiled with $CXX (default: g++) when they are first used, once for each instruction set,
into the user's cache directory. A wheel that `make wheel` builds contains them compiled.
"""

import ctypes
import functools
import hashlib
import logging
import platform
import subprocess
from collections.abc import Callable, Sequence
from ctypes import c_double, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_core.ops.native.build_cache import (
    compiled_library,
    compiler,
    reason_of,
    run_compiler,
)
from moe_core.ops.native.instruction_sets import InstructionSet, sets_of_cpu

_NAMES = (
    "ffn.cpp",
    "rows.cpp",
    "plan.cpp",
    "route.cpp",
    "attention.cpp",
    "ffn.hpp",
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


@functools.cache
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
    arguments: list = [c_void_p(None if x is None else x.data_ptr()) for x in tensors]
    for number in numbers:
        arguments.append(c_double(number) if isinstance(number, float) else c_long(number))
    return getattr(library(kernels), function)(*arguments)


def in_fp32(x: Tensor | None) -> Tensor | None:
    """x as most functions of the library read it."""
    if x is None:
        return None
    return x.float().contiguous()


def library(kernels: str = "auto") -> ctypes.CDLL:
    """The library, which must exist: `chosen` has found it."""
    choice = chosen(kernels)
    assert choice is not None
    return choice[1]


@functools.cache
def chosen(kernels: str = "auto") -> tuple[InstructionSet, ctypes.CDLL] | None:
    """The instruction set to use, and its library.

    This is the best one that works on this machine, or the one that `kernels` names. None if the
    CPU has no known instruction set, or if a library cannot be compiled or loaded; the log gives
    the reason.
    """
    problem = ""
    for instructions in sets_of_cpu():
        if kernels not in ("auto", instructions.name):
            continue
        try:
            loaded = _load(instructions)
        except subprocess.CalledProcessError as error:  # an older compiler lacks the newest sets
            problem = f"C++ does not compile: {reason_of(error)}"
        except Exception as error:  # torch's kernels need neither a compiler nor a file system
            problem = reason_of(error)
            break
        else:
            if loaded.request_tiles() == 0:
                return instructions, loaded
            problem = "the operating system does not allow this process to use AMX"
    if problem:
        _log.warning("moe_core kernels: torch on this CPU, since C++ cannot be used: %s", problem)
    return None


def _load(instructions: InstructionSet) -> ctypes.CDLL:
    """The library, from the wheel or compiled if necessary.

    Raises:
        OSError, subprocess.CalledProcessError: the library does not compile, or does not load.
    """
    prebuilt = PREBUILT / file_name(instructions)
    if prebuilt.exists():
        try:
            return _opened(prebuilt)
        except OSError as error:  # built for another system; compile a library for this one
            _log.info("moe_core kernels: %s", error)
    return _compiled(instructions, _opened)


def _opened(path: Path) -> ctypes.CDLL:
    """The library in a file.

    Raises:
        OSError: it cannot be loaded.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{path.name} does not load: {error}") from error
    functions = (
        library.make_plan,
        library.experts_space,
        library.experts_forward,
        library.experts_backward,
        library.bf16_product_bytes,
        library.attention_space,
    )
    for function in functions:
        function.restype = c_long
    return library


def file_name(instructions: InstructionSet, compiler: str = "") -> str:
    """The name of a library's file. It depends on the sources, the options and the compiler."""
    contents = [source.read_text() for source in _SOURCES]
    key = "\n".join([platform.machine(), compiler, instructions.options, *_FLAGS, *contents])
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    return f"{instructions.name}-{digest[:16]}.so"


def compile_library(instructions: InstructionSet, path: Path) -> None:
    """Compile the library with $CXX (g++) into `path`.

    Raises:
        OSError, subprocess.CalledProcessError: it does not compile.
    """
    sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
    command = compiler() + _FLAGS + instructions.options.split() + ["-o", str(path)] + sources
    run_compiler(command)


def _compiled(instructions: InstructionSet, load: Callable[[Path], Any]) -> Any:
    """The library for these sources, instructions and compiler, in the cache of the user."""
    program = compiler()
    version = run_compiler(program + ["--version"])
    name = file_name(instructions, " ".join(program) + version)

    def compile_to(path: Path) -> None:
        _log.info("moe_core kernels: compiling %s, once (about 10 s)", path.with_name(name))
        compile_library(instructions, path)

    return compiled_library(name, compile_to, load)
