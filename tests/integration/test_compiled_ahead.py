"""Kernels that benchmarks/ahead.py compiles, by a pass that launches none of them."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ahead

triton = pytest.importorskip("triton")
tl = triton.language


class Driver:
    """Triton's driver of an H100 that is not here. Launches are noted."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.utils = self
        self.process = os.getpid()

    def launcher_cls(self, source, metadata):
        return lambda *args: self.launched.append(source.name)

    def load_binary(self, *args) -> tuple:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device) -> dict:
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32}

    def unload_module(self, *args) -> None:
        pass

    def get_current_device(self) -> int:
        assert os.getpid() == self.process, "CUDA cannot be used in a forked process"
        return 0

    def get_current_stream(self, device=0) -> int:
        return 0

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


@triton.jit
def double(source, target, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + place, place < size)
    tl.store(target + place, values * 2, place < size)


@pytest.fixture
def driver(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    found = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", found)
    yield found
    double.device_caches.clear()


def run(block: int) -> torch.Tensor:
    source = torch.ones(1000)
    target = torch.empty_like(source, memory_format=torch.contiguous_format)
    double[(1,)](source, target, 1000, block)
    torch.empty(2, 3, memory_format=torch.contiguous_format)
    return target


def test_kernels_are_in_the_cache_before_their_first_launch(driver, monkeypatch):
    def works():
        yield lambda: run(128)
        yield lambda: [][0]
        yield lambda: run(256)
        yield lambda: run(256)

    outputs = []
    assert ahead.compile_ahead(lambda w=w: outputs.append(w()) for w in works()) == 2
    assert driver.launched == []
    assert all((output == 0).all() for output in outputs)  # an index from it would be valid
    hits = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)
    )
    run(128)
    run(256)
    assert hits == [True, True]
    assert driver.launched == ["double", "double"]
