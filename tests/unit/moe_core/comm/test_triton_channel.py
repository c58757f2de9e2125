"""The kernels of channels between GPUs, compiled without one. They run in
tests/distributed/test_channels_gpu.py."""

import pytest
import torch
from triton_cases import INTERPRETED, compile_launches

LONGS = torch.zeros(2, dtype=torch.int64)


def launch_all(words: torch.Tensor, counts: torch.Tensor | None) -> None:
    from moe_core.comm import triton_channel as kernels

    everyone, piece = range(2), (0, len(words) // 2, len(words) // 2)
    flags = (LONGS[:1], LONGS[1:])
    kernels.put(words, LONGS, LONGS, counts, *flags, everyone, (0, 64, 128), piece, (4, 2), True)
    kernels.signal(LONGS, everyone, 64)
    kernels.wait(LONGS.to("meta"), LONGS, *flags, everyone, 10**6)
    kernels.read(words, words.view(2, -1), counts, LONGS[:1], 32, piece, 2)


@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_without_a_gpu(architecture, monkeypatch):
    pytest.importorskip("triton")
    compiled = compile_launches(monkeypatch, architecture)
    for words in (torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.uint8)):
        for counts in (None, LONGS):
            launch_all(words, counts)
            ptx = {name: kernel.asm["ptx"] for name, kernel in compiled.items()}
            assert len(ptx) == 4
            assert_ordered(ptx)


def assert_ordered(ptx: dict[str, str]) -> None:
    """Signals are released to the system after the copies, and waits acquire them."""
    put = ptx["put_kernel"]
    copied = put.rindex("st.global", 0, put.index("atom."))
    reported = put.index("atom.global.gpu.acq_rel.add", copied)
    signalled = put.index("atom.global.sys.release.add", reported)
    assert "bar.sync" in put[copied:reported]
    assert "st.global" not in put[signalled:]
    assert "atom.global.sys.release.add" in ptx["signal_kernel"]
    assert "ld.global.sys.acquire" in ptx["wait_kernel"]
    assert "globaltimer" in ptx["wait_kernel"]
