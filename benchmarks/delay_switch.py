"""Delay for the links of a cluster (netns.py), without the kernel's `tc netem`.

A program in user space (delay_switch.cpp) replaces the bridge: it holds every frame for the delay.
It is compiled with $CXX (g++) at its first use, into the user's cache directory.
"""

import hashlib
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moe_core.ops.native.build_cache import compiled_library

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ["-std=c++17", "-O2"]


class DelaySwitch:
    """A running switch between interfaces of one network namespace, initially without delay.

    It ends with `close`, with this process, or when the processes of the namespace are killed.

    Args:
        namespace: the name of the network namespace.
        interfaces: the names of its interfaces, which belong to no bridge.

    Raises:
        RuntimeError: the program cannot be compiled or started.
    """

    def __init__(self, namespace: str, interfaces: Sequence[str]) -> None:
        command = ["ip", "netns", "exec", namespace, str(_program()), *interfaces]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != "ready\n":
            reason = self._process.stderr.read().strip()
            self.close()
            raise RuntimeError(f"the switch with delay does not start: {reason}")

    def set_delay(self, milliseconds: float) -> None:
        """Change the delay. Frames that the switch already holds keep their delay."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{1000 * milliseconds}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the program. The frames that it holds are lost."""
        self._process.kill()
        self._process.communicate()


def _program() -> Path:
    """The compiled program, for this source and compiler.

    Raises:
        RuntimeError: the program does not compile.
    """
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    key = "\n".join([*compiler, *_FLAGS, _SOURCE.read_text()])
    name = f"delay-switch-{hashlib.sha256(key.encode()).hexdigest()[:16]}"

    def compile_to(program: Path) -> None:
        command = [*compiler, *_FLAGS, "-o", str(program), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True)

    try:
        return compiled_library(name, compile_to)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(f"{_SOURCE.name} does not compile: {reason.splitlines()[0]}") from error
