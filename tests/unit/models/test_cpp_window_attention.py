"""Window attention's C++ kernels, with each instruction set of this CPU, against plain torch in
fp64.

Slow: as a program of its own for Arm in qemu's emulator, with AMX's tiles emulated, and with the
sanitizers.
"""

# B images, W windows of an image, N tokens of a window, h heads, D channels of a head

import functools
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kernel_programs import KernelProgram, raw, run_program
from torch import Tensor, nn

from moe_core.ops.native import library as native
from moe_core.ops.native.instruction_sets import sets_of_cpu
from swinv2_moe.models import cpp_window_attention as kernels
from swinv2_moe.models import window_attention as module
from swinv2_moe.models.attention import DotProductWindowAttention, FusedWindowAttention
from swinv2_moe.models.window_attention import plain_attention, window_attention

SETS = [known.name for known in sets_of_cpu()]
PROGRAM = KernelProgram("attention.cpp", "attention.cpp")

pytestmark = pytest.mark.skipif(native.chosen() is None, reason="no C++ here")


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SETS)
def instructions(request, monkeypatch):
    """All calls take this instruction set's kernels."""
    monkeypatch.setattr(kernels, "call", functools.partial(native.call, kernels=request.param))
    return request.param


class Case(NamedTuple):
    """Inputs of window attention, and a gradient of its output."""

    qkv: Tensor
    bias: Tensor
    mask: Tensor | None
    scale: Tensor
    cosine: bool
    grad: Tensor

    def exact(self) -> list[Tensor]:
        """The output, and the gradients of qkv, bias and scale, in fp64."""
        wanted = [x.double().requires_grad_() for x in (self.qkv, self.bias, self.scale)]
        mask = None if self.mask is None else self.mask.double()
        y = plain_attention(wanted[0], wanted[1], mask, wanted[2], self.cosine)
        return [y.detach(), *torch.autograd.grad(y, wanted, self.grad.double())]

    def found(self) -> list[Tensor]:
        inputs = (self.qkv, self.bias, self.mask, self.scale)
        out, lse = kernels.forward(*inputs, self.cosine)
        return [out, *kernels.backward(self.grad, *inputs, out, lse, self.cosine)]


def random_case(seed: int, dtype: torch.dtype, most_tokens: int = 70) -> Case:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    masks = draw.choice([0, 1, 2, 3])
    windows = draw.choice([1, 2, 5]) * max(1, masks)
    tokens = draw.choice([1, 16, 49, 64, draw.randint(1, most_tokens)])
    heads, channels = draw.randint(1, 4), draw.choice([16, 32, 64, draw.randint(1, 70)])
    cosine = draw.random() < 0.6
    qkv = torch.randn(windows, tokens, 3, heads, channels, generator=generator)
    bias = 2 * torch.randn(heads, tokens, tokens, generator=generator)
    scale = torch.full((heads,), channels**-0.5)
    if cosine:
        scale = 10 ** (2 * torch.rand(heads, generator=generator))  # 1 to 100
    mask = None
    if masks:
        hidden = torch.rand(masks, tokens, tokens, generator=generator) < 0.4
        hidden &= ~torch.eye(tokens, dtype=torch.bool)
        mask = torch.where(hidden, draw.choice([-100.0, -torch.inf]), 0.0)
    grad = torch.randn(windows, tokens, heads * channels, generator=generator)
    return Case(qkv.to(dtype), bias, mask, scale, cosine, grad.to(dtype))


def assert_near(found: list[Tensor], case: Case) -> None:
    """Within the rounding of results and of the products' operands. Queries and keys are not
    rounded, which a scale of 100 would multiply."""
    epsilon = 1e-5
    if case.qkv.dtype == torch.bfloat16:
        epsilon = 0.03
    for i, (ours, right) in enumerate(zip(found, case.exact(), strict=True)):
        assert ours.shape == right.shape
        error = (ours.double() - right).norm()
        # of a window of one token, the gradients of queries, keys and bias are 0
        limit = epsilon * max(float(right.norm()), float(case.grad.double().norm()))
        if i == 0:
            limit /= 5
        if right.dim() == 1:
            limit *= 5  # that of a scale: thousands of terms of both signs
        assert error <= limit, (i, float(error), limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_plain_torch(dtype, instructions):
    for seed in range(24):
        torch.set_num_threads(1 + seed % 3)
        case = random_case(seed, dtype)
        assert_near(case.found(), case)


def test_tensors_with_strides(instructions):
    case = random_case(4, torch.float32)
    turned = [x.mT.contiguous().mT if x.dim() > 1 else x for x in case[:2]]
    assert not turned[0].is_contiguous()
    grad = case.grad.mT.contiguous().mT
    found = case._replace(qkv=turned[0], bias=turned[1], grad=grad).found()
    assert_near(found, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_threads_share_windows_and_heads(dtype, monkeypatch):
    """More threads than heads, fewer, and more than windows; the sums of the bias differ in their
    order alone, and repeat bit by bit."""
    monkeypatch.setattr(kernels, "_LEAST_WORK", 1)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 20, 3, 3, 16, generator=generator).to(dtype)
    bias = torch.randn(3, 20, 20, generator=generator)
    grad = torch.randn(5, 20, 48, generator=generator).to(dtype)
    case = Case(qkv, bias, None, torch.ones(3), True, grad)
    torch.set_num_threads(1)
    alone = case.found()
    for threads in (2, 3, 4, 7, 15, 40):
        torch.set_num_threads(threads)
        first, second = case.found(), case.found()
        assert all(map(torch.equal, first, second))
        assert all(map(torch.equal, first[:2], alone[:2]))
        for ours, theirs in zip(first[2:], alone[2:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_no_number_is_not_hidden():
    """A token that is no number reaches the tokens that attend to it, and those of its window
    alone."""
    qkv = torch.randn(2, 20, 3, 2, 16)
    qkv[0, 18] = torch.nan
    arguments = (qkv, torch.zeros(2, 20, 20), None, torch.ones(2))
    out, lse = kernels.forward(*arguments, True)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    grads = kernels.backward(torch.ones_like(out), *arguments, out, lse, True)
    assert grads[0][0].isnan().all()
    assert grads[0][1].isfinite().all()


def test_no_window():
    qkv, bias, scale = torch.zeros(0, 5, 3, 2, 4), torch.zeros(2, 5, 5), torch.ones(2)
    out, lse = kernels.forward(qkv, bias, None, scale, True)
    grads = kernels.backward(out, qkv, bias, None, scale, out, lse, True)
    assert [x.shape for x in (out, *grads)] == [(0, 5, 8), qkv.shape, bias.shape, scale.shape]
    assert not any(grad.any() for grad in grads)


# Which way is taken


def is_fused(attn: nn.Module, x: Tensor, monkeypatch) -> bool:
    used = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "window_attention", lambda *args: used.append(1) or run(*args))
        run = window_attention
        attn(x)
    return bool(used)


@pytest.mark.parametrize("kind", [FusedWindowAttention, DotProductWindowAttention])
def test_training_and_inference_take_the_kernels(kind, monkeypatch):
    attn, x = kind(32, (4, 4), 2), torch.randn(4, 16, 32)
    assert is_fused(attn, x, monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        assert is_fused(attn, x, monkeypatch)
    with torch.no_grad():
        assert is_fused(attn, x, monkeypatch)
        with torch.autocast("cpu", torch.float16):
            assert not is_fused(attn, x, monkeypatch)
    assert not is_fused(attn.double(), x.double(), monkeypatch)


def test_without_a_compiler_torch_is_taken(monkeypatch):
    attn, x = FusedWindowAttention(32, (4, 4), 2), torch.randn(4, 16, 32)
    monkeypatch.setattr(module, "chosen", lambda: None)
    assert not is_fused(attn, x, monkeypatch)


def test_saved_programs_have_no_operation_of_this_project(monkeypatch):
    attn, x = FusedWindowAttention(12, (4, 4), 3).eval(), torch.randn(4, 16, 12)
    traced = torch.jit.trace(attn, x)
    exported = torch.export.export(attn, (x,))
    assert "swinv2_moe::" not in str(traced.inlined_graph)
    assert "swinv2_moe" not in str(exported.graph)
    for program in (traced, exported.module()):
        torch.testing.assert_close(program(x), attn(x), rtol=1e-4, atol=1e-5)


# Other CPUs, and the sanitizers


def run_case(command: list[str], seed: int, dtype: torch.dtype, most_tokens: int) -> None:
    case = random_case(seed, dtype, most_tokens)
    windows, tokens, _, heads, channels = case.qkv.shape
    masks = 0 if case.mask is None else len(case.mask)
    header = [windows, masks, tokens, heads, channels, case.cosine, 1 + seed % 4]
    header += [dtype == torch.bfloat16]
    tensors = [x for x in (case.qkv, case.bias, case.mask, case.scale, case.grad) if x is not None]
    problem = np.array(header, np.int64).tobytes() + b"".join(map(raw, tensors))
    output = run_program(command, problem)
    found = []
    for like in (case.grad, case.qkv, case.bias, case.scale):
        size = like.numel() * like.element_size()
        found.append(torch.frombuffer(bytearray(output[:size]), dtype=like.dtype).view(like.shape))
        output = output[size:]
    assert not output
    assert_near(found, case)


def run_cases(command: list[str], count: int, most_tokens: int = 70) -> None:
    for seed in range(count):
        run_case(command, seed, [torch.float32, torch.bfloat16][seed % 2], most_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neon", "neon_bf16"])
def test_arm(name, tmp_path):
    run_cases(PROGRAM.on_arm(tmp_path, name), 60)


@pytest.mark.slow
def test_amx_with_emulated_tiles(tmp_path):
    run_cases(PROGRAM.with_emulated_tiles(tmp_path), 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SETS)
def test_random_shapes_under_the_sanitizers(name, tmp_path):
    """No access outside of the tensors, whatever their sizes."""
    run_cases(PROGRAM.with_sanitizers(tmp_path, name), 200, 200)
