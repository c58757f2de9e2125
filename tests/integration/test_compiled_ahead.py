"""Kernels that benchmarks/ahead.py compiles, by a pass that launches none of them, also for a GPU
that is not here; and the file that carries them."""

import os
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from triton_cases import StubDriver

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ahead
import carried_kernels

triton = pytest.importorskip("triton")
tl = triton.language

import kernels  # noqa: E402 - it imports triton

from moe_core.ops import backend, launch  # noqa: E402
from moe_core.ops.ffn import triton as ffn  # noqa: E402
from moe_core.ops.launch import recordable  # noqa: E402

pytestmark = pytest.mark.skipif(
    not launch._IS_KNOWN, reason="this version of Triton launches its kernels itself"
)
H100 = carried_kernels.versions_here() | {"capabilities": ["9.0"]}
LAUNCHED = {
    "route_kernel", "_loss_kernel", "_count_kernel", "_scan_kernel", "_plan_kernel",
    "blocks_kernel", "hidden_kernel", "model_kernel", "_dispatch_kernel", "hidden_grad_kernel",
    "weight_grad_kernel", "gate_grad_kernel", "sum_blocks_kernel", "route_backward_kernel",
}  # fmt: skip


@recordable
@triton.jit(do_not_specialize=["size"])
def double(source, target, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + place, place < size)
    tl.store(target + place, values * 2, place < size)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    found = StubDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", found)
    yield found
    forget()


def forget() -> None:
    double.kernel.device_caches.clear()


def run(block: int) -> torch.Tensor:
    source, target = torch.ones(1000), torch.full((1000,), torch.nan)
    double[(1,)](source, target, 1000, block)
    return target


def test_kernels_are_in_the_cache_before_their_first_launch(driver, monkeypatch):
    def works():
        yield lambda: run(128)
        yield lambda: [][0]
        yield lambda: run(256)
        yield lambda: run(256)

    outputs = []
    assert ahead.compile_works(lambda w=w: outputs.append(w()) for w in works()) == 2
    assert driver.launched == []
    assert all((output == 0).all() for output in outputs)  # an index from it would be valid
    forget()
    hits = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    run(128)
    run(256)
    assert hits == [True, True]
    assert [launch.name for launch in driver.launched] == ["double", "double"]


def test_carried_kernels_are_found_where_they_are_unpacked(driver, tmp_path, monkeypatch):
    """Triton's cache has absolute paths."""
    compiled, place = Path(triton.knobs.cache.dir, "compiled"), tmp_path / "other" / "triton"
    monkeypatch.setattr(triton.knobs.cache, "dir", str(compiled))
    assert ahead.compile_works([lambda: run(128)]) == 1
    carried_kernels.pack(tmp_path, compiled, carried_kernels.versions_here())
    compiled.rename(tmp_path / "gone")
    monkeypatch.setattr(carried_kernels, "KERNELS", place)
    assert carried_kernels.unpack(tmp_path, H100)
    assert not carried_kernels.unpack(tmp_path, H100)  # these may be newer
    assert [file.name for file in place.parent.iterdir()] == ["triton"]
    monkeypatch.setattr(triton.knobs.cache, "dir", str(place))
    forget()
    hits = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    run(128)
    assert hits == [True]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"python": "2.7"}, "for python 3.12, this is 2.7"),
        ({"triton": "3.5.0"}, "for triton 3.6.0, this is 3.5.0"),
        ({"capabilities": ["10.0"]}, "no kernels for compute capability 10.0"),
    ],
)
def test_kernels_for_other_versions_are_not_used(other, named, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(carried_kernels, "KERNELS", tmp_path / "tree" / "triton")
    (tmp_path / "kernels").mkdir()
    versions = {"python": "3.12", "triton": "3.6.0", "capabilities": ["8.0", "9.0"]}
    file = carried_kernels.pack(tmp_path, tmp_path / "kernels", versions)
    assert not carried_kernels.unpack(tmp_path, versions | {"capabilities": ["9.0"]} | other)
    assert capsys.readouterr().out == f"{file}: {named}; not used\n"
    assert list((tmp_path / "tree").iterdir()) == []


@pytest.mark.parametrize("damage", ["empty", "cut", "no tar", "no versions"])
def test_a_damaged_file_of_kernels_is_not_used(damage, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(carried_kernels, "KERNELS", tmp_path / "tree" / "triton")
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "a.cubin").write_bytes(os.urandom(10_000))
    file = carried_kernels.pack(tmp_path, kernels, H100)
    content = file.read_bytes()
    if damage == "no versions":
        with tarfile.open(file, "w:gz") as archive:
            archive.add(kernels, "triton")
    else:
        file.write_bytes({"empty": b"", "cut": content[:5000], "no tar": b"kernels"}[damage])
    carried_kernels.unpack(tmp_path, H100)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{file}: cannot be read (")
    assert printed.count("\n") == 1
    assert list((tmp_path / "tree").iterdir()) == []


def test_kernels_of_a_layer_for_a_gpu_that_is_not_here(driver, monkeypatch, capsys):
    """Only which ones: they are not compiled."""
    for module, name in (
        (backend, "_triton_obstacle"), (ffn, "_shared_memory"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    backend.language.cache_clear()
    found = []
    monkeypatch.setattr(launch, "compile_together", found.extend)
    words = ["kernels.py", "layer", "--compile", "--architecture", "90", "--shapes", "48x16x4"]
    monkeypatch.setattr(sys, "argv", words)
    kernels.main()
    backend.language.cache_clear()
    printed = capsys.readouterr()
    assert (printed.out.partition(" in ")[0], printed.err) == (f"{len(found)} kernels compiled", "")
    names = Counter(job.args[0].__name__ for job in found)
    assert names.keys() >= LAUNCHED


@pytest.mark.parametrize("words", [["layer"], ["network", "--compile"]])
def test_an_architecture_goes_with_compilation_of_a_layer(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words, "--architecture", "90"])
    with pytest.raises(SystemExit):
        kernels.main()
    assert "--architecture goes with layer --compile" in capsys.readouterr().err
