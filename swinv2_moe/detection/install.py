"""Installs the detection extra: mmcv's operators compiled for the torch that is here, once a
machine, then the rest.

    python -m swinv2_moe.detection.install LOG      as `make detection` and `make test` do

mmcv comes as source alone. Compiled in isolation, as pip does by default, it finds no torch and
becomes a wheel without operators; and pip keeps that wheel for any torch. So it is compiled here,
against this environment, into a directory named after the versions of torch and Python, and pip
never sees the source. Its setup asks for C++17, where the headers of torch 2.15 need C++20:
compilers that take the one for the other do it.
"""

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

_ROOT = Path(__file__).parents[2]
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
    """Named in one line; the log has the rest."""


def wheel_directory() -> Path:
    """Where wheels for this torch and Python are kept: below the user's cache directory."""
    import torch

    gpu = ""
    if torch.cuda.is_available():
        gpu = "-sm{}{}".format(*torch.cuda.get_device_capability())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return cache / f"swinv2-moe/wheels/torch{version('torch')}-{python}{gpu}"


def pinned(package: str) -> str:
    """`package==version` as constraints.txt has it."""
    lines = (
        line.split(";")[0].strip() for line in (_ROOT / "constraints.txt").read_text().splitlines()
    )
    return next(line for line in lines if line.startswith(f"{package}=="))


def compiled_wheel(log: Path) -> Path:
    """mmcv's wheel for this environment: the one that is kept, or a new one. Processes wait for
    each other here.

    Raises:
        InstallError: it cannot be compiled.
    """
    directory, requirement = wheel_directory(), pinned("onedl-mmcv")
    directory.mkdir(parents=True, exist_ok=True)
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    with exclusive_lock(directory / ".lock"):
        if not list(directory.glob(pattern)):
            print(
                f"Compiling {requirement} into {directory}: 5 to 15 minutes on 2 cores, once.",
                flush=True,
            )
            for leftover in directory.glob("unfinished-*"):  # of a compilation that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=directory) as unfinished:
                _pip_install(log, "ninja", "setuptools", "packaging")
                _compile(log, requirement, unfinished)
                for wheel in Path(unfinished).glob(pattern):
                    wheel.rename(directory / wheel.name)  # a name there is a whole wheel's
        return next(directory.glob(pattern))


def _compile(log: Path, requirement: str, target: str) -> None:
    environment = {
        "CFLAGS": "-O1 -g0",  # half the time of setup.py's own
        "CXX": _for_cxx20(os.environ.get("CXX", "c++"), Path(target) / "c++"),
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count())),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja is there
    }
    nvcc = _nvcc()
    if nvcc is not None:
        environment["PYTORCH_NVCC"] = _for_cxx20(nvcc, Path(target) / "nvcc")
    options = [
        "--no-build-isolation",
        "--no-deps",
        "--no-cache-dir",
        "--no-binary",
        "onedl-mmcv",
        "--wheel-dir",
        target,
    ]
    _pip(log, "wheel", *options, requirement, environment=environment)


def _for_cxx20(command: str, file: Path) -> str:
    """A program that runs the compiler `command`, for C++20 in place of C++17."""
    file.write_text(_COMPILER.format(command=command))
    file.chmod(0o755)
    return str(file)


def _nvcc() -> str | None:
    """The compiler that torch would take for CUDA; None: mmcv is compiled without."""
    import torch

    if not torch.cuda.is_available() and os.environ.get("FORCE_CUDA") != "1":
        return None
    from torch.utils.cpp_extension import CUDA_HOME

    return os.environ.get("PYTORCH_NVCC", f"{CUDA_HOME}/bin/nvcc")


@contextmanager
def _constraints() -> Iterator[Path]:
    """A file of the versions in constraints.txt, but of torch and torchvision those that are here:
    mmcv is compiled for this torch."""
    here = {package: version(package) for package in ("torch", "torchvision")}
    pins = (_ROOT / "constraints.txt").read_text().splitlines()
    pins = [pin for pin in pins if pin.split("==")[0] not in here]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "constraints.txt"
        file.write_text(
            "\n".join([*pins, *(f"{package}=={number}" for package, number in here.items())])
        )
        yield file


def _pip_install(log: Path, *requirements: object) -> None:
    with _constraints() as constraints:
        _pip(log, "install", "--constraint", constraints, *requirements)


def _pip(log: Path, *arguments: object, environment: dict[str, str] | None = None) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        *map(str, arguments),
        "--no-input",
        "--progress-bar",
        "off",
    ]
    if "wheel" in arguments:
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
    """All of the extra into this environment, tried out.

    Raises:
        InstallError: what failed; the log says why.
    """
    log.write_text("")
    wheel = compiled_wheel(log)
    # it may be there for another torch
    _pip(log, "install", "--no-deps", "--force-reinstall", wheel)
    _pip_install(log, "--editable", f"{_ROOT}[detection]")
    done = subprocess.run(
        [sys.executable, "-c", _CHECK], capture_output=True, text=True, check=False
    )
    if done.returncode:
        log.write_text(log.read_text() + done.stderr)
        reason = done.stderr.strip().splitlines()[-1]
        hint = (
            " (Debian/Ubuntu: sudo apt install libgl1 libglib2.0-0)"
            if "cannot open shared object" in reason
            else ""
        )
        if "_ext" in reason or "nms" in reason:
            hint = f" (remove {wheel} to compile it anew)"
        raise InstallError(f"mmcv and mmdetection do not work: {reason}{hint}")


def main() -> None:
    log = Path(sys.argv[1])
    try:
        install(log)
    except (InstallError, OSError) as error:
        sys.exit(f"Detection was not installed: {error}. The log: {log}")


if __name__ == "__main__":
    main()
