"""The auxiliary losses of sums in one Triton kernel, against their formulas in torch.

`TestKernels` runs on a CUDA device, or in Triton's interpreter as the last test starts it.
"""

# E experts

import re

import pytest
import torch
from triton_cases import INTERPRETED, compile_launches, run_interpreted

from moe_core import LOSSES
from moe_core.ops import loss_of_sums

DEVICE = "cpu" if INTERPRETED else "cuda"
KINDS = ("none", "gshard", "load_importance", "load_importance_tutel")


def random_sums(num_experts: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_experts)
    sums = 100 * torch.rand(2, num_experts, dtype=torch.float64, generator=generator)
    return sums.to(DEVICE, dtype).requires_grad_()


@pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs by the last test"
)
class TestKernels:
    @pytest.mark.parametrize("num_experts", [1, 2, 5, 8, 64])
    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_torch(self, kind, num_experts):
        total = torch.tensor(300.0, dtype=torch.float64, device=DEVICE)
        for num_tokens in (300, 0, total, total * 0):
            sums = random_sums(num_experts)
            value = loss_of_sums(kind, sums, num_tokens)
            expected = LOSSES[kind]().value(sums, num_tokens)
            torch.testing.assert_close(value, expected)
            if kind == "none":
                continue
            (gradient,) = torch.autograd.grad(3 * value, sums)
            (expected_gradient,) = torch.autograd.grad(3 * expected, sums)
            torch.testing.assert_close(gradient, expected_gradient)

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_a_correct_operator(self, kind):
        operator = torch.ops.moe_core.loss_of_sums
        torch.library.opcheck(operator, (random_sums(6, torch.float32), None, 40, kind))

    def test_no_tokens(self):
        sums = torch.zeros(2, 4, device=DEVICE, requires_grad=True)
        value = loss_of_sums("gshard", sums, 0)
        value.backward()
        assert value.item() == 0
        assert sums.grad.eq(0).all()


@pytest.mark.skipif(INTERPRETED, reason="it starts the interpreter")
def test_in_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted(__file__)


@pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter does not")
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_without_a_gpu(architecture, monkeypatch):
    pytest.importorskip("triton")
    from moe_core.ops.route import loss_triton

    compiled = compile_launches(monkeypatch, architecture)
    sums, total = torch.zeros(2, 6), torch.zeros(())
    for kind in ("gshard", "load_importance"):
        for count in (None, total):
            loss_triton.loss_of_sums(sums, count, 40, kind)
            loss_triton.loss_of_sums_backward(total, sums, count, 40, kind)
    assert len(compiled) == 2
    assert not any(re.search(r"\b(atom|red)\.", kernel.asm["ptx"]) for kernel in compiled.values())
