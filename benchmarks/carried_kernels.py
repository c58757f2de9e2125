"""Compiled Triton kernels in one file, kernels.tar.gz, for a machine that has none."""

import importlib.metadata
import io
import json
import platform
import tarfile
import tempfile
import zlib
from pathlib import Path

from campaign_sections import ROOT

KERNELS = ROOT / "output" / "triton"  # Triton's cache
ARCHITECTURES = (80, 90)  # of NVIDIA's, for which kernels are compiled without a GPU
FILE, VERSIONS, FOLDER = "kernels.tar.gz", "versions.json", "triton"
_DAMAGE = (
    OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, tarfile.TarError,
    zlib.error,
)  # fmt: skip


def versions_here() -> dict:
    """What compiled kernels depend on beside their sources, for those compiled without a GPU. With
    other versions Triton does not find them."""
    return {
        "python": _series(platform.python_version()),
        "triton": importlib.metadata.version("triton"),
        "capabilities": [f"{number // 10}.{number % 10}" for number in ARCHITECTURES],
    }


def versions_of(device: dict[str, str]) -> dict:
    """The same of a device, as results_file describes it."""
    python, triton = _series(device["python"]), device["triton"]
    return {"python": python, "triton": triton, "capabilities": [device["capability"]]}


def _series(python: str) -> str:
    return python.rpartition(".")[0]


def pack(folder: Path, kernels: Path, versions: dict) -> Path:
    """Write a folder of kernels to kernels.tar.gz in `folder`."""
    file, temporary = folder / FILE, folder / f".{FILE}"
    text = json.dumps(versions).encode()
    head = tarfile.TarInfo(VERSIONS)
    head.size = len(text)
    with tarfile.open(temporary, "w:gz") as archive:
        archive.addfile(head, io.BytesIO(text))
        archive.add(kernels, FOLDER)
    temporary.replace(file)
    return file


def unpack(folder: Path, versions: dict) -> bool:
    """Unpack the kernels that were carried, if there are none. A file that does not fit is named.

    Returns:
        Whether they were unpacked.
    """
    file = folder / FILE
    if KERNELS.exists() or not file.exists():
        return False
    KERNELS.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KERNELS.parent, prefix=".kernels-") as scratch:
        try:
            problem = _unpack(file, Path(scratch), versions)
        except _DAMAGE as error:
            problem = f"cannot be read ({error})".partition("\n")[0]
        if problem:
            print(f"{file}: {problem}; not used", flush=True)
        else:
            Path(scratch, FOLDER).replace(KERNELS)
    return not problem


def _unpack(file: Path, scratch: Path, versions: dict) -> str:
    """Returns why the kernels cannot be used, "" if they can."""
    with tarfile.open(file, "r:gz") as archive:
        found = json.loads(archive.extractfile(VERSIONS).read())  # type: ignore[union-attr]
        for key in ("python", "triton"):
            if found[key] != versions[key]:
                return f"for {key} {found[key]}, this is {versions[key]}"
        lacking = set(versions["capabilities"]) - set(found["capabilities"])
        if lacking:
            return f"no kernels for compute capability {', '.join(lacking)}"
        archive.extractall(scratch, filter="data")
    for group in (scratch / FOLDER).rglob("__grp__*.json"):
        _place(group)
    return ""


def _place(group: Path) -> None:
    """Triton's cache names the files of a kernel with their absolute paths."""
    content = json.loads(group.read_text())
    folder = KERNELS / group.parent.name
    paths = {name: str(folder / Path(path).name) for name, path in content["child_paths"].items()}
    group.write_text(json.dumps(content | {"child_paths": paths}))
