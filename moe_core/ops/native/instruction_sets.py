"""The instruction sets that the C++ kernels are compiled for, and those of this CPU."""

import functools
import platform
from pathlib import Path
from typing import NamedTuple


class InstructionSet(NamedTuple):
    """Instructions of a CPU.

    Attributes:
        name: the value of `kernels` that selects this instruction set.
        label: the name in the log.
        machine: the value of platform.machine().
        cpu: the features that the CPU must have, as named in /proc/cpuinfo.
        options: compiler options for GCC and Clang.
        slow_on: vendors whose CPUs have these instructions but are faster without them.
    """

    name: str
    label: str
    machine: str
    cpu: frozenset[str]
    options: str
    slow_on: frozenset[str] = frozenset()


_AVX2 = "-mavx2 -mfma"
_AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl"
_AVX512_CPU = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_BF16_CPU = _AVX512_CPU | {"avx512_bf16"}
# Sorted by speed: the first set that a CPU has is the fastest.
SETS = (
    InstructionSet(
        "amx",
        "AMX",
        "x86_64",
        _BF16_CPU | {"amx_tile", "amx_bf16"},
        f"{_AVX512} -mavx512bf16 -mamx-tile -mamx-bf16",
    ),
    InstructionSet(
        "avx512_bf16",
        "AVX-512 bf16",
        "x86_64",
        _BF16_CPU,
        f"{_AVX512} -mavx512bf16",
        # bf16 takes 1.3 to 1.7 times as long as in products of fp32: docs/log.md
        slow_on=frozenset({"GenuineIntel"}),
    ),
    InstructionSet("avx512", "AVX-512", "x86_64", _AVX512_CPU, _AVX512),
    InstructionSet("avx2", "AVX2", "x86_64", frozenset({"avx2", "fma"}), _AVX2),
    InstructionSet(
        "neon_bf16",
        "NEON bf16",
        "aarch64",
        frozenset({"asimd", "bf16"}),
        "-march=armv8.2-a+bf16",
    ),
    InstructionSet("neon", "NEON", "aarch64", frozenset({"asimd"}), "-march=armv8-a"),
)

# Features that compute in a dtype; without them torch converts each value.
_DTYPES = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


def cpu_computes_in(dtype: str) -> bool:
    """Whether this CPU has instructions for "bfloat16" or "float16"; True if it is not known."""
    words = cpu_words()
    return not words or bool(words & _DTYPES[dtype])


def sets_of_cpu() -> list[InstructionSet]:
    """The instruction sets that this CPU has, the fastest first."""
    machine, words = platform.machine(), cpu_words()
    usable = []
    for instructions in SETS:
        if instructions.machine == machine and instructions.cpu <= words:
            usable.append(instructions)
    return sorted(usable, key=lambda instructions: bool(instructions.slow_on & words))


@functools.cache
def cpu_words() -> frozenset[str]:
    """The features of the CPU as Linux names them and, on x86, its vendor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    words: set[str] = set()
    for line in lines:
        if line.startswith(("flags", "Features", "vendor_id")):
            words.update(line.partition(":")[2].split())
    return frozenset(words)
