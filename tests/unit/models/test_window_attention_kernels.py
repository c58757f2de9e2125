"""The fused window attention against plain torch: values, every gradient, and what its kernels compile to.

On a CUDA device `TestKernels` runs there. `TRITON_INTERPRET=1 pytest <this file>` runs it on a CPU, in Triton's
interpreter; a variable that counts when Triton is first imported, so `test_under_the_interpreter` starts a process.
"""

# B images, W windows of an image, N tokens of a window, h heads, D channels of a head

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from swinv2_moe.models import window_attention as module
from swinv2_moe.models.attention import DotProductWindowAttention, FusedWindowAttention
from swinv2_moe.models.window_attention import window_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
OPS = torch.ops.swinv2_moe
# B, W, N, h, D: a window smaller than a tile; a block that is not full; full and rest; more windows than a split has
SIZES = [(2, 2, 5, 2, 16), (1, 2, 49, 1, 32), (1, 1, 144, 1, 16), (9, 2, 16, 1, 16), (1, 2, 64, 1, 64)]


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def inputs_of(sizes, cosine: bool, masked: bool, dtype=torch.float64) -> tuple[list[Tensor], Tensor | None]:
    """qkv, bias and scale; the mask, which hides whole blocks of keys."""
    images, windows, tokens, heads, channels = sizes
    qkv = random(images * windows, tokens, 3, heads, channels, dtype=dtype)
    scale = random(heads, dtype=dtype, seed=2).abs() * (8 if cosine else 0.3) + 0.1
    inputs = [qkv, 2 * random(heads, tokens, tokens, dtype=dtype, seed=1), scale]
    if not masked:
        return inputs, None
    sides = torch.arange(tokens, device=DEVICE) < torch.arange(windows, device=DEVICE).unsqueeze(1) * 70 % tokens
    mask = torch.zeros((), device=DEVICE, dtype=dtype).where(sides.unsqueeze(1) == sides.unsqueeze(2), float("-inf"))
    assert windows == 1 or mask.isinf().any()
    return inputs, mask


def plain(qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B*W, h, N, D]
    if cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    scores = q @ k.mT * scale[:, None, None] + bias
    if mask is not None:
        scores = (scores.unflatten(0, (-1, len(mask))) + mask.unsqueeze(1)).flatten(0, 1)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def with_gradients(function, inputs: list[Tensor], mask: Tensor | None, cosine: bool) -> list[Tensor]:
    qkv, bias, scale = inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(qkv, bias, mask, scale, cosine)
    return [y, *torch.autograd.grad(y, inputs, random(*y.shape, dtype=y.dtype, seed=3))]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Of each tensor's largest value."""
    for name, ours, theirs in zip(("out", "qkv", "bias", "scale"), found, expected, strict=True):
        worst = (ours.double() - theirs.double()).abs().max()
        assert worst <= tolerance * theirs.abs().max(), (name, worst, theirs.abs().max())


class TestKernels:
    __test__ = INTERPRETED or torch.cuda.is_available()

    @pytest.mark.parametrize("masked", [False, True], ids=["whole", "shifted"])
    @pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_equal_plain_torch(self, sizes, cosine, masked):
        inputs, mask = inputs_of(sizes, cosine, masked)
        expected = with_gradients(plain, inputs, mask, cosine)
        single = None if mask is None else mask.float()
        found = with_gradients(window_attention, [x.float() for x in inputs], single, cosine)
        assert {x.dtype for x in found} == {torch.float32}
        assert_near(found, expected, 2e-5)

    def test_halves(self):
        inputs, mask = inputs_of((1, 2, 49, 1, 32), True, True)
        half = [inputs[0].half(), inputs[1].half(), inputs[2].float()]
        found = with_gradients(window_attention, half, mask.half(), True)
        assert [x.dtype for x in found] == [torch.float16, torch.float16, torch.float16, torch.float32]
        assert_near(found, with_gradients(plain, [x.double() for x in half], mask, True), 4e-3)

    def test_vectors_of_length_zero(self):
        inputs, _ = inputs_of((1, 1, 5, 1, 16), True, False)
        inputs[0][0, 1] = 0
        expected = with_gradients(plain, inputs, None, True)
        found = with_gradients(window_attention, [x.float() for x in inputs], None, True)
        assert expected[1][0, 1].abs().max() > 1e9  # divided by F.normalize's smallest length
        assert_near([x[0, :1] if i == 1 else x for i, x in enumerate(found)],
                    [x[0, :1] if i == 1 else x for i, x in enumerate(expected)], 2e-5)  # fmt: skip
        assert_near([x[0, 1:2] if i == 1 else x for i, x in enumerate(found)],
                    [x[0, 1:2] if i == 1 else x for i, x in enumerate(expected)], 2e-5)  # fmt: skip

    def test_gradients_and_inputs_of_any_strides(self):
        inputs, _ = inputs_of((2, 1, 5, 2, 16), True, False, torch.float32)
        results = []
        for function in (window_attention, plain):
            qkv, bias, scale = (x.mT.contiguous().mT if x.dim() > 1 else x for x in inputs)
            assert not qkv.is_contiguous()
            wanted = [x.detach().requires_grad_() for x in (qkv, bias, scale)]
            y = function(wanted[0], wanted[1], None, wanted[2], True)
            results.append([y, *torch.autograd.grad(y.sum(), wanted)])  # sum() gives a gradient without strides
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)

    def test_runs_repeat_bit_by_bit(self):
        inputs, mask = inputs_of((20, 2, 16, 1, 16), True, True, torch.float32)
        first, second = (with_gradients(window_attention, inputs, mask, True) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))

    def test_no_window(self):
        inputs, _ = inputs_of((0, 1, 5, 1, 16), True, False, torch.float32)
        found = with_gradients(window_attention, inputs, None, True)
        assert found[0].shape == (0, 5, 16)
        assert found[2].eq(0).all()

    @pytest.mark.parametrize("masked", [False, True])
    def test_opcheck(self, masked):
        (qkv, bias, scale), mask = inputs_of((2, 2, 5, 2, 16), True, masked, torch.float32)
        wanted = [x.requires_grad_() for x in (qkv, bias, scale)]
        torch.library.opcheck(OPS.window_attention.default, (*wanted[:2], mask, wanted[2], True))
        inputs = (qkv.detach(), bias.detach(), mask, scale.detach())
        out, lse = OPS.window_attention(*inputs, True)
        torch.library.opcheck(OPS.window_attention_backward.default, (out, *inputs, out, lse, True))

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    @pytest.mark.parametrize("kind", [FusedWindowAttention, DotProductWindowAttention])
    def test_module_equals_its_other_path(self, kind, compiled, randomize, monkeypatch):
        torch.compiler.reset()
        attn = randomize(kind(32, (4, 4), 2)).to(DEVICE)
        x, mask = random(4, 16, 32, dtype=torch.float32).requires_grad_(), random(2, 16, 16, dtype=torch.float32)
        results = []
        for fused in (True, False):
            monkeypatch.setattr(module, "runs", lambda qkv, fused=fused: fused)
            torch.compiler.reset()
            function = torch.compile(attn, fullgraph=True, backend="aot_eager") if compiled else attn
            y = function(x, mask)
            grads = torch.autograd.grad((y * random(*y.shape, dtype=y.dtype)).sum(), [x, *attn.parameters()])
            results.append(dict(zip(["y", "x", *dict(attn.named_parameters())], [y, *grads], strict=True)))
        for name, expected in results[1].items():
            assert (results[0][name] - expected).abs().max() <= 2e-5 * expected.abs().max(), name
        assert ("logit_scale" in results[0]) == (kind is FusedWindowAttention)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(280)
def test_under_the_interpreter():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "TestKernels"]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=270)
    assert outcome.returncode == 0, outcome.stdout[-5000:] + outcome.stderr[-2000:]
