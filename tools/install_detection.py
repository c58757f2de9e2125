"""Install the detection extra, with mmcv's operators compiled for the installed torch.

    python tools/install_detection.py LOG      (`make detection` and `make test` run this)

mmcv is distributed as source. pip's isolated build has no torch, compiles a wheel without
operators, and caches it for any torch. Therefore this script compiles mmcv in this environment,
once for each version of torch and Python, and pip installs the wheel. mmcv's setup requests C++17,
but the headers of torch 2.15 need C++20: wrappers of the compilers replace the option.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from moe_core.files import exclusive_lock
from swinv2_moe.output import print_lines

_ROOT = Path(__file__).parents[1]
_COMPILER = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = -std=c++17 ] && argument=-std=c++20
    set -- "$@" "$argument"
done
exec {command} "$@"
"""
_CHECK = """
import torch
from mmcv.ops import nms
boxes = torch.tensor([[0.0, 0, 1, 1], [0, 0, 1, 1]])
assert nms(boxes, torch.tensor([0.5, 0.4]), 0.5)[1].tolist() == [0]
import mmdet.models
"""


class InstallError(Exception):
    """The installation failed. The message is one line; the log has the details."""


def wheel_directory() -> Path:
    """The directory of wheels for this torch and Python, below the user's cache directory."""
    import torch

    gpu = ""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        gpu = f"-sm{major}{minor}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return cache / f"swinv2-moe/wheels/torch{version('torch')}-{python}{gpu}"


def pinned(package: str) -> str:
    """`package==version` from constraints.txt."""
    lines = (_ROOT / "constraints.txt").read_text().splitlines()
    requirements = (line.split(";")[0].strip() for line in lines)
    return next(line for line in requirements if line.startswith(f"{package}=="))


def compiled_wheel(log: Path) -> Path:
    """mmcv's wheel for this environment, compiled if it is not cached.

    A lock excludes other processes meanwhile.

    Raises:
        InstallError: mmcv cannot be compiled.
    """
    directory, requirement = wheel_directory(), pinned("onedl-mmcv")
    directory.mkdir(parents=True, exist_ok=True)
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    with exclusive_lock(directory / ".lock") as is_locked:
        if not list(directory.glob(pattern)):
            print_lines(
                f"Compiling {requirement} into {directory}: 5 to 15 minutes on 2 cores, once.",
                flush=True,
            )
            if is_locked:  # else another process may be compiling
                for leftover in directory.glob("unfinished-*"):  # of a compilation that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=directory) as unfinished:
                _pip_install(log, ["ninja", "setuptools", "packaging"])
                _compile(log, requirement, unfinished)
                for wheel in Path(unfinished).glob(pattern):
                    wheel.rename(directory / wheel.name)  # atomic: only complete wheels
        return next(directory.glob(pattern))


def _compile(log: Path, requirement: str, target: str) -> None:
    environment = {
        "CFLAGS": "-O1 -g0",  # half the compile time of setup.py's flags
        "CXX": _for_cxx20(os.environ.get("CXX", "c++"), Path(target) / "c++"),
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count())),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # for ninja
    }
    nvcc = _nvcc()
    if nvcc is not None:
        environment["PYTORCH_NVCC"] = _for_cxx20(nvcc, Path(target) / "nvcc")
    command = ["wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    command += ["--no-binary", "onedl-mmcv", "--wheel-dir", target, requirement]
    _pip(log, command, environment)


def _for_cxx20(command: str, file: Path) -> str:
    """Write a program that runs the compiler `command` with C++20 in place of C++17."""
    file.write_text(_COMPILER.format(command=command))
    file.chmod(0o755)
    return str(file)


def _nvcc() -> str | None:
    """The CUDA compiler that torch would use; None: mmcv is compiled without CUDA."""
    import torch

    if not torch.cuda.is_available() and os.environ.get("FORCE_CUDA") != "1":
        return None
    from torch.utils.cpp_extension import CUDA_HOME

    return os.environ.get("PYTORCH_NVCC", f"{CUDA_HOME}/bin/nvcc")


@contextmanager
def _constraints() -> Iterator[Path]:
    """constraints.txt with the installed versions of torch and torchvision.

    mmcv is compiled for the installed torch, which must therefore stay.
    """
    installed = {package: version(package) for package in ("torch", "torchvision")}
    pins = (_ROOT / "constraints.txt").read_text().splitlines()
    pins = [pin for pin in pins if pin.split("==")[0] not in installed]
    pins += [f"{package}=={number}" for package, number in installed.items()]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "constraints.txt"
        file.write_text("\n".join(pins))
        yield file


def _pip_install(log: Path, requirements: list[str]) -> None:
    with _constraints() as constraints:
        _pip(log, ["install", "--constraint", str(constraints)] + requirements)


def _pip(log: Path, arguments: list[str], environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip"] + arguments + ["--no-input", "--progress-bar", "off"]
    if arguments[0] == "wheel":
        command.append("--verbose")  # the compiler's messages
    with log.open("a") as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            check=False,
        )
    if done.returncode:
        raise InstallError(f"pip {arguments[0]} failed")


def install(log: Path) -> None:
    """Install the `detection` extra into this environment and test it.

    Raises:
        InstallError: a step failed; the log has the reason.
    """
    log.write_text("")
    wheel = compiled_wheel(log)
    # The installed wheel, if any, may be for another torch.
    _pip(log, ["install", "--no-deps", "--force-reinstall", str(wheel)])
    _pip_install(log, ["--editable", f"{_ROOT}[detection]"])
    done = subprocess.run(
        [sys.executable, "-c", _CHECK], capture_output=True, text=True, check=False
    )
    if done.returncode:
        log.write_text(log.read_text() + done.stderr)
        reason = done.stderr.strip().splitlines()[-1]
        hint = ""
        if "cannot open shared object" in reason:
            hint = " (Debian/Ubuntu: sudo apt install libgl1 libglib2.0-0)"
        if "_ext" in reason or "nms" in reason:
            hint = f" (remove {wheel} to compile it anew)"
        raise InstallError(f"mmcv and mmdetection do not work: {reason}{hint}")
    # With it mmengine formats configurations. Its first import writes a cache, and another process
    # that imports it at the same time would read half of that.
    subprocess.run([sys.executable, "-c", "import yapf.yapflib.yapf_api"], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", type=Path, metavar="LOG", help="a file for what pip prints")
    log = parser.parse_args().log
    try:
        install(log)
    except (InstallError, OSError) as error:
        sys.exit(f"Detection was not installed: {error}. The log: {log}")


if __name__ == "__main__":
    main()
