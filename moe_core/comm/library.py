"""The C++ code of the channels. It is compiled with $CXX (default: g++) when it is first used."""

import ctypes
import functools
import hashlib
import platform
from ctypes import c_long, c_void_p
from pathlib import Path

from moe_core.ops.native.build_cache import (
    compiled_library,
    compiler,
    reason_of,
    run_compiler,
)

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
}


@functools.cache
def library() -> ctypes.CDLL:
    """The library. Its functions run without Python's global interpreter lock.

    Raises:
        RuntimeError: it cannot be compiled or loaded; the message gives the reason.
    """
    try:
        loaded = _compiled()
    except Exception as error:
        raise RuntimeError(f"channels need their C++ library: {reason_of(error)}") from error
    for name, types in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes = types
        function.restype = c_long
    loaded.comm_buffer.restype = c_void_p
    return loaded


def _compiled() -> ctypes.CDLL:
    """The library for these sources and this compiler."""
    program = compiler()
    command = program + _FLAGS
    contents = [source.read_text() for source in _SOURCES]
    version = run_compiler(program + ["--version"])
    key = "\n".join([platform.machine(), version] + command + contents)

    def compile_to(path: Path) -> None:
        sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
        run_compiler(command + ["-o", str(path)] + sources)

    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    return compiled_library(f"comm-{digest[:16]}.so", compile_to, lambda p: ctypes.CDLL(str(p)))
