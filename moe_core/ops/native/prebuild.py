"""Compile the C++ kernels for every instruction set of this kind of machine, for a wheel.

    python -m moe_core.ops.native.prebuild

The libraries are written into the package, so that `make wheel` includes them. $CXX is the compiler
(default: g++).
"""

import platform
import shutil
import subprocess
import sys

from moe_core.ops.native.build_cache import reason_of
from moe_core.ops.native.instruction_sets import SETS
from moe_core.ops.native.library import PREBUILT, compile_library, file_name


def main() -> None:
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    machine = platform.machine()
    sets = [instructions for instructions in SETS if instructions.machine == machine]
    if not sets:
        sys.exit(f"no C++ kernels for machines of type {machine!r}")
    for instructions in sets:
        path = PREBUILT / file_name(instructions)
        try:
            compile_library(instructions, path)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{instructions.name} does not compile: {reason_of(error)}")
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
