"""The C++ code of the channels. It is compiled with $CXX (default: g++) when it is first used."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
from ctypes import c_long, c_void_p
from pathlib import Path

from moe_core.ops.native.build_cache import compiled_library

_SOURCES = sorted(Path(__file__).with_name("native").glob("*.[ch]pp"))
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-Wall"]
_ARGUMENTS = {
    "comm_segment_bytes": [c_long, c_long],
    "comm_buffer": [c_void_p, c_long],
    "comm_put": [c_void_p, c_long, c_long, c_void_p, c_long, c_long],
    "comm_signal": [c_void_p, c_long],
    "comm_wait": [c_void_p, c_long],
    "comm_barrier": [c_void_p],
    "comm_run": [c_void_p],
    "comm_run_steps": [c_void_p, c_long, c_long, c_long],
    "comm_stage": [c_void_p, c_long, c_long, c_void_p],
    "comm_measure": [c_void_p],
    "comm_run_exchange": [c_void_p],
    "comm_run_delivery": [c_void_p],
}


@functools.cache
def library() -> ctypes.CDLL:
    """The library. Its functions run without Python's global interpreter lock.

    Raises:
        RuntimeError: it does not compile; the message gives the first line of the compiler's error.
    """
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(
            f"channels need a C++ compiler ($CXX or g++): {reason.splitlines()[0]}"
        ) from error
    for name, types in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes = types
        function.restype = c_long
    loaded.comm_buffer.restype = c_void_p
    return loaded


def _compiled() -> Path:
    """The path of the library for these sources and this compiler."""
    program = shlex.split(os.environ.get("CXX") or "g++")
    version = subprocess.run(program + ["--version"], check=True, capture_output=True, text=True)
    compiler = program + _FLAGS
    contents = [source.read_text() for source in _SOURCES]
    key = "\n".join([platform.machine(), version.stdout] + compiler + contents)

    def compile_to(path: Path) -> None:
        sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
        command = compiler + ["-o", str(path)] + sources
        subprocess.run(command, check=True, capture_output=True, text=True)

    return compiled_library(f"comm-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so", compile_to)
