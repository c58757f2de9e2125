"""The fused window attention against plain torch: values, every gradient, and what its kernels
compile to.

On a CUDA device `TestKernels` runs there, elsewhere with the C++ kernels. `TRITON_INTERPRET=1
pytest <this file>` runs it on a CPU, in Triton's interpreter; a variable that counts when Triton is
first imported, so `test_under_the_interpreter` starts a process.
"""

# B images, W windows of an image, N tokens of a window, h heads, D channels of a head

import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from triton_cases import CHEAP_CHECKS, INTERPRETED, compile_launches, run_interpreted

from moe_core.ops.native import library as native
from swinv2_moe.models import window_attention as module
from swinv2_moe.models.attention import DotProductWindowAttention, FusedWindowAttention
from swinv2_moe.models.window_attention import window_attention

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU and not INTERPRETED else "cpu"
IS_CPP = not (HAS_GPU or INTERPRETED)
OPS = torch.ops.swinv2_moe
FLOPS_OF_49 = 2 * 2 * 49 * 49 * 32  # both products of a window and head
# B, W, N, h, D: a window smaller than a tile; a block that is not full; full and rest; more windows
# than a split has
SIZES = [(1, 2, 5, 2, 64), (1, 2, 49, 1, 32), (1, 1, 144, 1, 16), (8, 2, 16, 1, 16)]


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(DEVICE, dtype)


def inputs_of(
    sizes, cosine: bool, masked: bool, dtype=torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """qkv, bias and scale; the mask, which hides whole blocks of keys."""
    images, windows, tokens, heads, channels = sizes
    qkv = random(images * windows, tokens, 3, heads, channels, dtype=dtype)
    scale = random(heads, dtype=dtype, seed=2).abs() * (8 if cosine else 0.3) + 0.1
    inputs = [qkv, 2 * random(heads, tokens, tokens, dtype=dtype, seed=1), scale]
    if not masked:
        return inputs, None
    halves = torch.arange(windows, device=DEVICE).unsqueeze(1) + tokens // 2
    sides = torch.arange(tokens, device=DEVICE) < halves  # [W, N]
    visible = sides.unsqueeze(1) == sides.unsqueeze(2)
    mask = torch.zeros((), device=DEVICE, dtype=dtype).where(visible, float("-inf"))
    return inputs, mask


def plain(qkv: Tensor, bias: Tensor, mask: Tensor | None, scale: Tensor, cosine: bool) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B*W, h, N, D]
    if cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    scores = q @ k.mT * scale[:, None, None] + bias
    if mask is not None:
        scores = (scores.unflatten(0, (-1, len(mask))) + mask.unsqueeze(1)).flatten(0, 1)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def with_gradients(
    function, inputs: list[Tensor], mask: Tensor | None, cosine: bool
) -> list[Tensor]:
    qkv, bias, scale = inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(qkv, bias, mask, scale, cosine)
    return [y, *torch.autograd.grad(y, inputs, random(*y.shape, dtype=y.dtype, seed=3))]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Of each tensor's largest value; ten times that for a scale's gradient, thousands of numbers
    of both signs."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        worst = float((ours.double() - theirs.double()).abs().max())
        limit = tolerance * float(theirs.abs().max()) * (10 if theirs.dim() == 1 else 1)
        assert worst <= limit, (i, worst, limit)


# NumPy's, of rows past a window's end, which are not stored
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.gpu
@pytest.mark.skipif(IS_CPP and native.chosen() is None, reason="no C++ here")
class TestKernels:
    @pytest.mark.parametrize(
        ("sizes", "cosine", "masked"),
        [
            (SIZES[0], True, False),
            (SIZES[0], False, True),
            (SIZES[1], True, True),
            (SIZES[1], False, False),
            (SIZES[2], True, True),
            (SIZES[3], True, True),
            *(
                pytest.param(sizes, *kind, marks=pytest.mark.slow)
                for sizes in SIZES[2:]
                for kind in ((True, False), (False, True), (False, False))
            ),
        ],
        ids=str,
    )
    def test_equal_plain_torch(self, sizes, cosine, masked):
        inputs, mask = inputs_of(sizes, cosine, masked)
        expected = with_gradients(plain, inputs, mask, cosine)
        single = None if mask is None else mask.float()
        found = with_gradients(window_attention, [x.float() for x in inputs], single, cosine)
        assert {x.dtype for x in found} == {torch.float32}
        assert_near(found, expected, 2e-5)

    def test_second_derivatives(self):
        (qkv, bias, scale), mask = inputs_of((1, 2, 5, 2, 16), True, True)
        gradients = []
        for function in (window_attention, plain):
            wanted = [x.float().requires_grad_() for x in (qkv, bias, scale)]
            y = function(*wanted[:2], mask.float(), wanted[2], True)
            first = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
            gradients.append(torch.autograd.grad(sum(g.sin().sum() for g in first), wanted))
        assert_near(*gradients, 1e-4)

    @pytest.mark.skipif(IS_CPP, reason="the C++ kernels take no fp16")
    def test_halves(self):
        inputs, mask = inputs_of((1, 2, 49, 1, 32), True, True)
        half = [inputs[0].half(), inputs[1].half(), inputs[2].float()]
        found = with_gradients(window_attention, half, mask.half(), True)
        assert [x.dtype for x in found] == [torch.float16] * 3 + [torch.float32]
        assert_near(found, with_gradients(plain, [x.double() for x in half], mask, True), 4e-3)

    def test_vectors_of_length_zero(self):
        inputs, _ = inputs_of((1, 1, 5, 1, 16), True, False)
        inputs[0][0, 1] = 0
        _, expected, *_ = with_gradients(plain, inputs, None, True)
        _, found, *_ = with_gradients(window_attention, [x.float() for x in inputs], None, True)
        assert expected[0, 1].abs().max() > 1e9  # divided by F.normalize's smallest length
        for tokens in (slice(0, 1), slice(1, 2), slice(2, None)):
            assert_near([found[:, tokens]], [expected[:, tokens]], 2e-5)

    def test_gradients_and_inputs_of_any_strides(self):
        inputs, _ = inputs_of((2, 1, 5, 2, 16), True, False, torch.float32)
        results = []
        for function in (window_attention, plain):
            qkv, bias, scale = (x.mT.contiguous().mT if x.dim() > 1 else x for x in inputs)
            assert not qkv.is_contiguous()
            wanted = [x.detach().requires_grad_() for x in (qkv, bias, scale)]
            y = function(wanted[0], wanted[1], None, wanted[2], True)
            # sum() gives a gradient without strides
            results.append([y, *torch.autograd.grad(y.sum(), wanted)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)

    def test_runs_repeat_bit_by_bit(self):
        inputs, mask = inputs_of((8, 2, 16, 1, 16), True, True, torch.float32)
        first, second = (with_gradients(window_attention, inputs, mask, True) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))

    def test_no_window(self):
        inputs, _ = inputs_of((0, 1, 5, 1, 16), True, False, torch.float32)
        found = with_gradients(window_attention, inputs, None, True)
        assert found[0].shape == (0, 5, 16)
        assert found[2].eq(0).all()

    def test_opcheck(self):
        (qkv, bias, scale), mask = inputs_of((1, 2, 5, 1, 16), True, True, torch.float32)
        wanted = [x.requires_grad_() for x in (qkv, bias, scale)]
        arguments = (*wanted[:2], mask, wanted[2], True)
        torch.library.opcheck(OPS.window_attention.default, arguments, test_utils=CHEAP_CHECKS)
        inputs = (qkv.detach(), bias.detach(), mask, scale.detach())
        out, lse = OPS.window_attention(*inputs, True)
        arguments = (out, *inputs, out, lse, True)
        torch.library.opcheck(
            OPS.window_attention_backward.default, arguments, test_utils=CHEAP_CHECKS
        )

    @pytest.mark.parametrize(
        ("kind", "compiled"),
        [
            (FusedWindowAttention, False),
            (FusedWindowAttention, True),
            (DotProductWindowAttention, False),
        ],
    )
    def test_module_equals_its_other_path(self, kind, compiled, randomize, monkeypatch):
        attn = randomize(kind(32, (4, 4), 2)).to(DEVICE)
        x = random(4, 16, 32, dtype=torch.float32).requires_grad_()
        mask = random(2, 16, 16, dtype=torch.float32)
        names, results = ["y", "x", *dict(attn.named_parameters())], []
        for fused in (True, False):
            monkeypatch.setattr(module, "runs", lambda qkv, fused=fused: fused)
            function = attn
            if compiled and fused:
                torch.compiler.reset()
                function = torch.compile(attn, fullgraph=True, backend="aot_eager")
            y = function(x, mask)
            loss = (y * random(*y.shape, dtype=y.dtype)).sum()
            grads = torch.autograd.grad(loss, [x, *attn.parameters()])
            results.append(dict(zip(names, [y, *grads], strict=True)))
        for name, expected in results[1].items():
            assert (results[0][name] - expected).abs().max() <= 2e-5 * expected.abs().max(), name
        assert ("logit_scale" in results[0]) == (kind is FusedWindowAttention)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(1260)  # on a busy machine
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__)


def compile_for(architecture: int, monkeypatch, sizes, masked: bool) -> dict[str, str]:
    """The assembly of each kernel of a forward and backward pass in bf16, compiled without a
    GPU."""
    pytest.importorskip("triton")
    from swinv2_moe.models import triton_window_attention as kernels

    compiled = compile_launches(monkeypatch, architecture)
    images, windows, tokens, heads, channels = sizes
    qkv = torch.zeros(images * windows, tokens, 3, heads, channels, dtype=torch.bfloat16)
    bias = torch.zeros(heads, tokens, tokens, dtype=torch.bfloat16)
    mask = torch.zeros(windows, tokens, tokens, dtype=torch.bfloat16) if masked else None
    inputs = (qkv, bias, mask, torch.zeros(heads))
    out, lse = kernels.forward(*inputs, True)
    kernels.backward(out, *inputs, out, lse, True)
    return {name: kernel.asm["ptx"] for name, kernel in compiled.items()}


@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_compile_without_a_gpu(architecture, monkeypatch):
    compiled = compile_for(architecture, monkeypatch, (2, 2, 80, 3, 32), masked=True)
    assert len(compiled) == 3
    for assembly in compiled.values():
        assert not re.search(r"\b(atom|red)\.", assembly)  # nothing atomic
        assert ("wgmma.mma_async" in assembly) == (architecture == 90)
        assert "mma.sync" in assembly  # the last block's, of 16 tokens


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "shifted"])
@pytest.mark.parametrize("tokens", [49, 64, 144, 256])
def test_no_register_is_spilled_on_a_hopper(tokens, masked, monkeypatch, tmp_path):
    for name, assembly in compile_for(90, monkeypatch, (2, 2, tokens, 3, 32), masked).items():
        import triton

        (tmp_path / name).write_text(assembly)
        ptxas = f"{triton.__path__[0]}/backends/nvidia/bin/ptxas"
        command = [ptxas, "-v", "--gpu-name=sm_90a", tmp_path / name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in said, f"{name}: {said}"


# Which way is taken


class OnGpu(NamedTuple):
    """What `runs` asks of a tensor."""

    shape: tuple[int, ...] = (8, 49, 3, 2, 32)
    dtype: torch.dtype = torch.bfloat16
    is_cuda: bool = True
    is_cpu: bool = False


def test_what_the_kernels_take(monkeypatch):
    monkeypatch.setattr(module, "_triton_runs", lambda: True)
    assert module.runs(OnGpu())
    assert module.runs(OnGpu(dtype=torch.float16))
    assert not module.runs(OnGpu(dtype=torch.float32))
    assert not module.runs(OnGpu(is_cuda=False))
    assert not module.runs(OnGpu((8, 49, 3, 2, 24)))
    assert not module.runs(OnGpu((8, 289, 3, 2, 32)))
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not module.runs(OnGpu())


def test_dropout_of_probabilities_is_left_to_torch(monkeypatch):
    attn, ways = FusedWindowAttention(32, (4, 4), 2, attn_drop=0.5), []
    monkeypatch.setattr(module, "runs", lambda qkv: True)
    monkeypatch.setattr(
        attn, "_fused", lambda qkv, mask: ways.append("fused") or qkv.new_zeros(4, 16, 32)
    )
    attn(torch.zeros(4, 16, 32))
    assert ways == []
    attn.eval()(torch.zeros(4, 16, 32))
    assert ways == ["fused"]


def test_without_triton_torch_is_taken_and_the_log_says_so(monkeypatch, caplog):
    # what importing it does where it is not installed
    monkeypatch.setitem(sys.modules, "triton", None)
    module._triton_starts.cache_clear()
    assert [module._triton_runs() for _ in range(2)] == [False, False]
    module._triton_starts.cache_clear()
    (message,) = caplog.messages
    assert "ModuleNotFoundError" in message


@pytest.mark.slow
def test_importing_the_model_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import swinv2_moe.models"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_shapes_and_flops_need_no_kernels():
    qkv = torch.empty(4, 49, 3, 2, 32, device="meta", requires_grad=True)
    bias, scale = torch.empty(2, 49, 49, device="meta"), torch.empty(2, device="meta")
    with FlopCounterMode(display=False) as counter:
        y = window_attention(qkv, bias, None, scale, True)
        y.sum().backward()
    assert y.shape == (4, 49, 64)
    assert counter.get_total_flops() == 4 * 2 * FLOPS_OF_49 * 7 // 2


@pytest.mark.parametrize(
    ("bias", "mask", "scale"),
    [((2, 5, 4), None, 2), ((2, 5, 5), None, 1), ((2, 5, 5), (3, 5, 5), 2)],
)
def test_sizes_that_do_not_fit(bias, mask, scale):
    mask = None if mask is None else torch.zeros(mask)
    with pytest.raises(ValueError, match="fit"):
        window_attention(
            torch.zeros(4, 5, 3, 2, 16), torch.zeros(bias), mask, torch.zeros(scale), True
        )


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "shifted"])
@pytest.mark.parametrize("side", [7, 8, 12, 16])
def test_bf16_on_a_gpu_is_near_timm_in_fp32(side, masked, randomize, monkeypatch):
    attn = randomize(WindowAttention(64, (side, side), 2)).cuda()
    fused = FusedWindowAttention.like(attn)
    fused.load_state_dict(attn.state_dict())
    x = torch.randn(20, side * side, 64, device="cuda")
    mask = (
        torch.where(torch.rand(4, side * side, side * side, device="cuda") < 0.3, -100.0, 0.0)
        if masked
        else None
    )
    used = []
    monkeypatch.setattr(
        fused, "_fused", lambda *args, run=fused._fused: used.append(1) or run(*args)
    )
    results = []
    for network, dtype in ((fused, torch.bfloat16), (attn, torch.float32)):
        images = x.clone().requires_grad_()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = network(images, mask)
        wanted = [images, *network.parameters()]
        grads = torch.autograd.grad(y.float().square().mean(), wanted)
        results.append([y, *grads])
    assert used
    for name, ours, theirs in zip(
        ["y", "x", *dict(attn.named_parameters())], *results, strict=True
    ):
        distance = (ours.float() - theirs).norm() / theirs.norm()
        # 0.045 by scaled_dot_product_attention, of cpb_mlp's bias
        assert distance < 0.1, (name, distance)
