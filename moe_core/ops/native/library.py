"""The C++ kernels for x86 CPUs.

They are compiled with $CXX (g++) at their first use, once, into the user's cache directory.
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
from ctypes import c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from moe_core.ops.native.build_cache import compiled_library

_NAMES = ("ffn_x86.cpp", "rows_x86.cpp", "plan.cpp", "product_x86.hpp")
_SOURCES = [Path(__file__).with_name(name) for name in _NAMES]
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AMX = {"avx512_bf16", "amx_tile", "amx_bf16"}
_INSTRUCTIONS = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16"
_FLAGS = f"-std=c++17 -O2 {_INSTRUCTIONS} -fopenmp -fPIC -shared".split()
# Weights in a kernel's memory layout have integer dtypes, because they are not a valid tensor of
# numbers.
PACKED_DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
_log = logging.getLogger("moe_core")


def usable(dtype: torch.dtype) -> bool:
    """Whether this CPU has the instructions for fp32 or bf16, and the library compiles."""
    if dtype == torch.float32:
        return _cpu_flags() >= _AVX512 and find_library() is not None
    return dtype == torch.bfloat16 and _cpu_flags() >= _AVX512 | _AMX and _tiles()


def description() -> str:
    """The usable instruction sets, for the log; "" if there are none."""
    names = []
    if usable(torch.float32):
        names.append("AVX-512")
    if usable(torch.bfloat16):
        names.append("AMX")
    if names:
        return f"C++ ({', '.join(names)})"
    return ""


def call(function: str, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> int:
    """Call a function of the library.

    Its arguments are the pointers of contiguous tensors (None is a null pointer), then `numbers` as
    `long`.
    """
    arguments: list = [pointer(tensor) for tensor in tensors]
    arguments += [c_long(number) for number in numbers]
    return getattr(library(), function)(*arguments)


def pointer(tensor: Tensor | None) -> c_void_p:
    if tensor is None:
        return c_void_p(None)
    return c_void_p(tensor.data_ptr())


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """The CPU's instructions, in Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith("flags"):
            return frozenset(line.split(":")[1].split())
    return frozenset()


@functools.cache
def _tiles() -> bool:
    """Whether the library exists and the operating system allows this process to use AMX."""
    return find_library() is not None and library().request_tiles() == 0


def library() -> ctypes.CDLL:
    """The library. Call `usable` first: it must have returned True."""
    loaded = find_library()
    assert loaded is not None
    return loaded


@functools.cache
def find_library() -> ctypes.CDLL | None:
    """The library, compiled if necessary. None if it does not compile; the log gives the reason."""
    path = None
    try:
        path = _compiled()
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        _log.warning(
            "moe_core kernels: torch on this CPU, since C++ does not compile: %s",
            reason.splitlines()[0],
        )
        if path is not None:
            path.unlink(missing_ok=True)  # the next process compiles it again
        return None
    for function in (library.forward_space, library.backward_space, library.make_plan):
        function.restype = c_long
    return library


def _compiled() -> Path:
    """The library for these sources, compiler and flags."""
    program = shlex.split(os.environ.get("CXX") or "g++")
    version = subprocess.run(program + ["--version"], check=True, capture_output=True, text=True)
    compiler = program + _FLAGS
    contents = [source.read_text() for source in _SOURCES]
    key = "\n".join([platform.machine(), version.stdout] + compiler + contents)
    name = f"x86-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"

    def compile_to(library: Path) -> None:
        _log.info("moe_core kernels: compiling %s, once (about 10 s)", library.with_name(name))
        sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
        command = compiler + ["-o", str(library)] + sources
        subprocess.run(command, check=True, capture_output=True, text=True)

    return compiled_library(name, compile_to)
