"""The experts' networks on an x86 CPU, in C++: fp32 with AVX-512, bf16 with AMX.

It is compiled with $CXX (g++) when it is first needed, once a machine, into the user's cache directory. Where that
fails or the CPU lacks the instructions, `takes` is False and ffn_loop runs.
"""

# E experts, N rows, M model dim, H hidden dim

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from ctypes import c_float, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from moe_core.kernels.buffers import empty

ACTIVATIONS = ("gelu", "relu", "silu")  # in the order of ffn_x86.cpp
_SOURCES = [Path(__file__).with_name(name) for name in ("ffn_x86.cpp", "product_x86.hpp")]
_AVX512, _AMX = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, {"avx512_bf16", "amx_tile", "amx_bf16"}
_INSTRUCTIONS = [f"-m{name}" for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16")]
_FLAGS = ["-std=c++17", "-O2", *_INSTRUCTIONS, "-mamx-tile", "-mamx-bf16", "-fopenmp", "-fPIC", "-shared"]
_PACKED = torch.int16  # the dtype of packed bf16 weights, which nothing else can take for numbers
_log = logging.getLogger("moe_core")


def takes(rows: Tensor, weight: Tensor) -> bool:
    """Whether this kernel computes on these dtypes, here."""
    if rows.device.type != "cpu" or weight.dtype not in (rows.dtype, torch.float32, _PACKED):
        return False
    if rows.dtype == torch.float32:
        return _cpu_flags() >= _AVX512 and _library() is not None
    return rows.dtype == torch.bfloat16 and _cpu_flags() >= _AVX512 | _AMX and _tiles()


def pack_weights(w1: Tensor, w2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """fp32 weights [E, H, M] in bf16, in the order in which `forward` reads them, in tensors of int16 of that shape.

    None where rows of `dtype` are not for this kernel, or the shape leaves blocks that are not full.
    """
    packable = w1.dtype == torch.float32 and w1.shape[1] % 32 == w1.shape[2] % 32 == 0
    if dtype != torch.bfloat16 or not packable or not takes(w1.new_empty(0, dtype=dtype), w1):
        return None
    new = tuple(empty(w.shape, _PACKED, w.device, reuse=False) for w in (w1, w2))
    weights = [w1.contiguous(), w2.contiguous()]
    _library().pack_weights(*map(_pointer, (*weights, *new)), *map(c_long, (*w1.shape, torch.get_num_threads())))
    return new


def hidden_rows(num_rows, num_experts: int, dtype: torch.dtype):
    """Rows of the hidden layer as it is kept."""
    return num_rows


def forward(
    rows: Tensor, w1, b1, w2, b2, offsets: Tensor, noise, activation: str, dropout: float, keep_hidden: bool
) -> tuple[Tensor, Tensor]:
    """out [N, M] and, if it is kept, the hidden layer [N H] before the activation."""
    problem = _Call(rows, w1, b1, w2, b2, offsets, noise, activation, dropout)
    out = empty(rows.shape, rows.dtype, rows.device)
    hidden = empty((len(rows) * w1.shape[1] if keep_hidden else 0,), rows.dtype, rows.device)
    problem.run("forward", out, hidden if keep_hidden else None)
    out[problem.end :] = 0
    hidden[problem.end * w1.shape[1] :] = 0
    return out, hidden


def backward(
    grad: Tensor, rows: Tensor, hidden: Tensor, w1, b1, w2, b2, offsets: Tensor, noise, activation, dropout, needs
) -> list[Tensor | None]:
    """Gradients of rows, w1, b1, w2 and b2; None where `needs` is False."""
    problem = _Call(rows, w1, b1, w2, b2, offsets, noise, activation, dropout)
    inputs = ((rows, rows.dtype), (w1, w1.dtype), (b1, torch.float32), (w2, w2.dtype), (b2, torch.float32))
    new = [empty(t.shape, dtype, t.device) if n else None for (t, dtype), n in zip(inputs, needs, strict=True)]
    problem.run("backward", grad, hidden, new[0], new[1], new[3], new[2], new[4])
    for gradient in new[1:]:
        for e in problem.unused if gradient is not None else ():
            gradient[e] = 0
    if needs[0]:
        new[0][problem.end :] = 0
    return [g if g is None else g.to(t.dtype) for g, (t, _) in zip(new, inputs, strict=True)]


class _Problem(ctypes.Structure):  # as in ffn_x86.cpp
    _fields_ = (
        [(name, c_void_p) for name in ("rows", "w1", "w2", "b1", "b2", "ends", "noise")]
        + [(name, c_long) for name in ("num_experts", "model_dim", "hidden_dim", "threads")]
        + [(name, c_long) for name in ("rows_bf16", "weights_bf16", "packed", "activation", "least")]
        + [("scale", c_float)]
    )


class _Call:
    """One call's arguments, and what keeps their memory alive."""

    def __init__(self, rows: Tensor, w1, b1, w2, b2, offsets: Tensor, noise, activation: str, dropout: float) -> None:
        ends = offsets.tolist()
        self.end, self.unused = ends[-1], [e for e, end in enumerate(ends) if end == (ends[e - 1] if e else 0)]
        biases = (None if b is None else b.float().contiguous() for b in (b1, b2))
        tensors = [rows.contiguous(), w1.contiguous(), w2.contiguous(), *biases, offsets.int().contiguous(), noise]
        dropped = 0 if noise is None else min(round(dropout * 65536), 65535)
        num_experts, hidden_dim, model_dim = w1.shape
        self.tensors = tensors
        self.problem = _Problem(
            *map(_pointer, tensors),
            *(num_experts, model_dim, hidden_dim, torch.get_num_threads()),
            *(rows.dtype == torch.bfloat16, w1.dtype != torch.float32, w1.dtype == _PACKED),
            *(ACTIVATIONS.index(activation), dropped - 32768, 65536 / (65536 - dropped)),
        )

    def run(self, direction: str, *tensors: Tensor | None) -> None:
        if not self.end:
            return
        library, problem = _library(), ctypes.byref(self.problem)
        memory = empty((getattr(library, f"{direction}_space")(problem),), torch.uint8, torch.device("cpu"))
        getattr(library, f"experts_{direction}")(problem, _pointer(memory), *map(_pointer, tensors))


def _pointer(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


# The library


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """The CPU's instructions, in Linux's names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), ()))


@functools.cache
def _tiles() -> bool:
    """Whether the library is there and the system lets this process use AMX."""
    return _library() is not None and _library().request_tiles() == 0


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        _log.warning("moe_core kernels: experts run in torch, since C++ does not compile: %s", reason.splitlines()[0])
        return None
    for direction in ("forward", "backward"):
        getattr(library, f"{direction}_space").restype = c_long
        getattr(library, f"experts_{direction}").restype = None
    return library


def _compiled() -> Path:
    """The library for these sources, compiler and flags; of several processes one compiles it."""
    compiler = [os.environ.get("CXX", "g++"), *_FLAGS]
    version = subprocess.run([compiler[0], "--version"], check=True, capture_output=True, text=True).stdout
    key = "\n".join([platform.machine(), version, *compiler, *(source.read_text() for source in _SOURCES)])
    directory = _cache_directory()
    library = directory / f"ffn_x86-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _log.info("moe_core kernels: compiling %s, once (about 10 s)", library)
            unfinished = library.with_suffix(".unfinished")
            command = [*compiler, "-o", str(unfinished), str(_SOURCES[0])]
            subprocess.run(command, check=True, capture_output=True, text=True)
            unfinished.replace(library)
    return library


def _cache_directory() -> Path:
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_core"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".lock").touch()
    except OSError:  # a container's user may have no home
        return Path(tempfile.mkdtemp(prefix="moe_core-"))
    return directory
