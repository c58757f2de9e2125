"""The C++ kernels as programs of their own, which read a problem from stdin: for Arm in
qemu's emulator, with AMX's tiles emulated in C++, and with the sanitizers."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from moe_core.ops.native.instruction_sets import SETS, cpu_words

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "moe_core/ops/native"
SANITIZERS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
OPTIONS = {known.name: known.options for known in SETS}


class KernelProgram:
    """A program of tests/native and the source of the kernels that it calls.

    Each method compiles it into `directory` and returns the command that runs it.
    """

    def __init__(self, program: str, kernels: str) -> None:
        self.sources = [ROOT / "tests/native" / program, NATIVE / kernels]

    def on_arm(self, directory: Path, name: str) -> list[str]:
        """For an instruction set of Arm. Skips where a tool is missing."""
        compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
        for tool in (compiler, emulator):
            if shutil.which(tool) is None:
                pytest.skip(f"{tool} is not here (Debian's g++-aarch64-linux-gnu and qemu-user)")
        program = self._compiled(directory, f"-O2 -static {OPTIONS[name]}", compiler)
        return [emulator, "-cpu", "max", program]

    def with_emulated_tiles(self, directory: Path) -> list[str]:
        """As for AMX bf16. Skips without AVX-512 bf16, which the rest of that form needs."""
        if "avx512_bf16" not in cpu_words() or platform.machine() != "x86_64":
            pytest.skip("this CPU has no AVX-512 bf16")
        include = ROOT / "tests/native/emulated_tiles.hpp"
        options = f"-O2 {OPTIONS['avx512_bf16']} -D__AMX_BF16__ -include {include}"
        return [self._compiled(directory, options)]

    def with_sanitizers(self, directory: Path, name: str) -> list[str]:
        """For an instruction set of this CPU. Skips without g++."""
        if shutil.which("g++") is None:
            pytest.skip("no g++ here")
        return [self._compiled(directory, f"{SANITIZERS} {OPTIONS[name]}")]

    def _compiled(self, directory: Path, options: str, compiler: str = "g++") -> str:
        program = str(directory / "program")
        command = [compiler, "-std=c++17", *options.split(), "-fopenmp", f"-I{NATIVE}"]
        command += ["-o", program, *map(str, self.sources)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return program


def run_program(command: list[str], problem: bytes) -> bytes:
    """What the program writes about a problem."""
    done = subprocess.run(command, input=problem, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's numbers in row-major order."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().tobytes()
