"""Packages for a machine without a network: wheels are collected elsewhere and unpacked on that
machine.

This module needs only the standard library, since it runs before the packages are available.
"""

import importlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# Packages that the benchmarks, tests/conftest.py and the GPU tests import, except torch, triton,
# timm, tensorboard and their dependencies. pytest-timeout is needed because pyproject.toml sets its
# option `timeout`.
CARRIED = (
    "yacs",
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "rich",
    "argcomplete",
    "PyYAML",
    "safetensors",
)
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


class WheelError(Exception):
    """An error with a message of one line for the user."""


def collect(folder: Path) -> None:
    """Download the wheels of CARRIED and of their dependencies. Needs a network.

    Raises:
        WheelError: pip could not download all wheels.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += ["--constraint", str(CONSTRAINTS), "--dest", str(folder)]
    command += CARRIED
    if subprocess.run(command).returncode != 0:
        raise WheelError(f"--wheels {folder}: pip download failed, its message is above")


def unpack_missing(folder: Path, target: Path) -> list[str]:
    """Unpack into `target` each wheel of `folder` whose distribution is not installed.

    A wheel is a zip archive of files for site-packages, so this needs no pip.

    Returns:
        The names of the distributions that were unpacked.

    Raises:
        WheelError: a wheel cannot be read, or `target` cannot be written.
    """
    unpacked = []
    for wheel in sorted(folder.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        if _is_installed(name):
            continue
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        except (OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{wheel}: cannot be unpacked into {target} ({error})") from error
        unpacked.append(name)
    if unpacked:
        importlib.invalidate_caches()
    return unpacked


def missing() -> list[str]:
    """The names in CARRIED that are not installed."""
    return [name for name in CARRIED if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
