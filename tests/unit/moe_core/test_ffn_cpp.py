"""The experts' kernel in C++: its steps, threads, activations and dropout, and the CPUs and dtypes
that it is chosen for. `test_ffn_forms` compares it with the specification."""

# N rows, M model dim, H hidden dim

import platform

import pytest
import torch
from ffn_cases import (
    BF16,
    FP32,
    MIXED,
    TOLERANCES,
    assert_close,
    by_reference,
    ffn_inputs,
    outcome,
    seeded_noise,
)

from moe_core import MoEConfig, MoELayer
from moe_core.ops import ExpertWeights, expert_ffn
from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.ffn import cpp as ffn_cpp
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import MoEFFNInputs
from moe_core.ops.ffn.op import kernels_for
from moe_core.ops.native import instruction_sets, library
from moe_core.ops.native.instruction_sets import sets_of_cpu
from moe_core.options import CPU_KERNELS

OPS = torch.ops.moe_core
each_dtype = pytest.mark.parametrize("dtypes", [FP32, MIXED, BF16], ids=["fp32", "mixed", "bf16"])


@pytest.fixture(params=[known.name for known in sets_of_cpu()] or ["auto"])
def kernels(request) -> str:
    """Each instruction set that this CPU has."""
    if library.chosen(request.param) is None:
        pytest.skip("this CPU or compiler lacks the instructions")
    return request.param


needs_cpp = pytest.mark.skipif(
    library.chosen() is None, reason="this CPU or compiler lacks the instructions"
)


def language(dtypes, device: str = "cpu", kernels: str = "auto", activation: str = "gelu") -> str:
    weight = torch.empty(1, dtype=dtypes[1], device=device)
    return kernels_for(kernels, weight, dtypes[0], activation).language


def by_cpp(case, kernels: str) -> list[torch.Tensor]:
    rows, weights, ends, grad = case

    def run(rows, weights):
        return expert_ffn(rows, weights, ends, "gelu", 0.0, kernels)

    return outcome(run, rows, weights, grad)


@each_dtype
def test_it_is_chosen_for_its_activations(dtypes, kernels):
    used = {language(dtypes, kernels=kernels, activation=name) for name in KERNEL_ACTIVATIONS}
    assert used == {"cpp"}


@each_dtype
@pytest.mark.parametrize(
    ("sizes", "model_dim", "hidden_dim"),
    [([4130, 40], 20, 36), ([20], 40, 3400), ([3, 0, 1], 1100, 200)],
    ids=["rows in several steps", "hidden units in several steps", "wide"],
)
def test_what_one_step_does_not_hold(sizes, model_dim, hidden_dim, dtypes, kernels):
    case = ffn_inputs(sizes, model_dim, hidden_dim, dtypes, gated=False)
    assert_close(by_cpp(case, kernels), by_reference(*case, "gelu"), dtypes[0])


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_activations_and_their_slopes_in_fp32(activation, kernels):
    """Seen through one hidden unit: a relative error, since what is far below zero is tiny.
    exp(-100) is, too."""
    z = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([0.0, -0.0, 100, -100, 1e4, -1e4])])
    rows, one = z.unsqueeze(1).requires_grad_(), torch.ones(1, 1, 1)
    ends = torch.tensor([len(z)], dtype=torch.int32)
    out = expert_ffn(rows, ExpertWeights(one, None, one, None), ends, activation, 0.0, kernels)
    exact = z.double().unsqueeze(1).requires_grad_()
    exact_gelu = lambda z: z * torch.erfc(-z / 2**0.5) / 2  # noqa: E731 - F.gelu cancels far below zero
    functions = {"gelu": exact_gelu, "relu": torch.relu, "silu": lambda z: z * z.sigmoid()}
    expected = functions[activation](exact)
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=1e-30)
    (slope,) = torch.autograd.grad(out.sum(), rows)
    (exact_slope,) = torch.autograd.grad(expected.sum(), exact)
    # a slope has a zero, so no relative error
    assert (slope.double() - exact_slope).abs().max() < 1e-6


def test_gelu_and_its_slope_in_bf16(kernels):
    """Of every bf16 number, within a quarter of bf16's spacing before rounding, which adds a half.
    Smaller values count as 2^-10, smaller slopes as 2^-8: a slope has a zero."""
    z = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    z = z[z.float().abs() < 1e30].unsqueeze(1).requires_grad_()
    ends, one = torch.tensor([len(z)], dtype=torch.int32), torch.ones(1, 1, 1)
    out = expert_ffn(z, ExpertWeights(one, None, one, None), ends, "gelu", 0.0, kernels)
    (slope,) = torch.autograd.grad(out.sum(), z)
    exact = z.detach().double().requires_grad_()
    expected = exact * torch.special.ndtr(exact)
    (exact_slope,) = torch.autograd.grad(expected.sum(), exact)
    for found, wanted, least in ((out, expected, 2**-10), (slope, exact_slope, 2**-8)):
        spacing = torch.exp2(wanted.abs().clamp(min=least).log2().floor() - 7)
        assert ((found.double() - wanted).abs() / spacing).max() < 0.75


@each_dtype
def test_what_is_not_finite_stays_so(dtypes, kernels):
    for value in (float("nan"), float("inf")):
        rows, weights, ends, _ = ffn_inputs([5, 20], dtypes=dtypes, gated=False)
        rows[7, 3] = value
        out = expert_ffn(rows, weights, ends, "gelu", 0.0, kernels)
        assert not out[7].isfinite().any()
        assert out[:7].isfinite().all()
        assert out[8:].isfinite().all()


@each_dtype
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(40, 64), (2112, 80)])
def test_dropout_follows_its_seed_in_both_directions(model_dim, hidden_dim, gated, dtypes, kernels):
    """The hidden units of the second size are computed in several steps."""
    rows, weights, ends, grad = ffn_inputs([33, 0, 47], model_dim, hidden_dim, dtypes, gated=gated)
    seed, activation = torch.tensor([123]), "silu" if gated else "gelu"
    threshold, scale = Dropout.of(0.3)
    kept = (seeded_noise(seed, 80, hidden_dim) >= threshold).double() * scale
    expected = by_reference(rows, weights, ends, grad, activation, kept)
    order = torch.arange(80)
    plan = (order, ends, order.unsqueeze(1), None)
    rest = (*plan, seed, activation, 0.3, True, kernels, "cpp")
    inputs = MoEFFNInputs(rows, None, *weights, None, None, None, *rest)
    out, hidden = OPS.moe_ffn(*inputs)
    needs = [tensor is not None for tensor in inputs[:8]]
    gradients = OPS.moe_ffn_backward(grad, needs, *inputs, hidden)
    found = [out, *[g for g, is_needed in zip(gradients, needs, strict=True) if is_needed]]
    for a, b in zip(found, expected, strict=True):
        limit = TOLERANCES[dtypes[0]] * b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=limit)


@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(40, 6700), (2112, 80)])
@pytest.mark.parametrize("dtypes", [FP32, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_few_experts_divide_their_hidden_units(dtypes, model_dim, hidden_dim, gated, kernels):
    """By 32, for more threads; the number of threads changes no bit."""
    case = ffn_inputs([30, 2], model_dim, hidden_dim, dtypes, gated=gated)
    before, outcomes = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outcomes.append(by_cpp(case, kernels))
    finally:
        torch.set_num_threads(before)
    assert_close(outcomes[0], by_reference(*case, "gelu"), dtypes[0])
    for others in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], others, strict=True))


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_leaves_cpp_out(dtype, monkeypatch):
    for module in (library, ffn_cpp):
        monkeypatch.setattr(module, "library", lambda kernels: pytest.fail("C++"))
    layer = MoELayer(MoEConfig(32, 32, 2, hidden_dropout=0.5, kernels="torch"))
    x = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        layer(x)[0].sum().backward()
        with torch.no_grad():
            layer.eval()(x)


@needs_cpp
def test_weights_of_two_dtypes_or_shapes_are_refused():
    """Read as those of the first, the second's memory would end too early."""
    rows, weights, ends, _ = ffn_inputs([4], 32, 32, FP32, gated=False)
    for other in (weights.w2.bfloat16(), weights.w2[:, :16]):
        with pytest.raises(ValueError, match=r"w1 is .* w2 "):
            expert_ffn(rows, weights._replace(w2=other), ends)


def test_other_dtypes_and_devices_are_left_to_others():
    fp16, fp32 = torch.float16, torch.float32
    assert language((torch.float64, torch.float64)) == "torch"
    assert language((fp16, fp32)) == "torch"
    assert language((fp32, torch.int16)) == "torch"  # packed bf16
    assert language(FP32, "meta") == "torch"


def test_a_cpu_without_the_instructions_is_left_to_torch(monkeypatch, choose_again):
    monkeypatch.setattr(library, "sets_of_cpu", list)
    choose_again()
    assert [language(dtypes) for dtypes in (FP32, MIXED, BF16)] == ["torch"] * 3


def test_instructions_that_are_not_here_are_refused_by_name(monkeypatch, choose_again):
    monkeypatch.setattr(instruction_sets, "cpu_words", lambda: frozenset({"avx2", "fma"}))
    choose_again()
    assert tuple(known.name for known in instruction_sets.SETS) == CPU_KERNELS
    for name in CPU_KERNELS:
        if name == "avx2" and platform.machine() == "x86_64":
            continue
        with pytest.raises(ValueError, match=rf"kernels \('{name}'\).*lacks the instructions"):
            language(FP32, kernels=name)


@pytest.mark.parametrize(
    ("maker", "expected"),
    [
        ("AuthenticAMD", ["avx512_bf16", "avx512", "avx2"]),
        ("GenuineIntel", ["avx512", "avx2", "avx512_bf16"]),
    ],
)
def test_the_order_depends_on_the_maker(monkeypatch, maker, expected):
    instructions = "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16"
    words = frozenset({maker, *instructions.split()})
    monkeypatch.setattr(instruction_sets, "cpu_words", lambda: words)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert [known.name for known in sets_of_cpu()] == expected
