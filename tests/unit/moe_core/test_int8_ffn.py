"""Experts in int8: the op against its specification in every instruction set of this CPU, the
kernels as programs of their own, and the layer that uses them."""

# E experts, N rows, M model dim, H hidden dim

from dataclasses import replace

import numpy as np
import pytest
import torch
from ffn_cases import ffn_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_programs import KernelProgram, raw, run_program

from moe_core import MoEConfig, MoELayer, prepared
from moe_core.ops import ExpertWeights, expert_ffn, int8_ffn, quantize_weights
from moe_core.ops.backend import KERNEL_ACTIVATIONS, Request, _first_form, select
from moe_core.ops.int8_ffn import reference
from moe_core.ops.native.instruction_sets import sets_of_cpu
from moe_core.registry import GATED_ACTIVATIONS

PROGRAM = KernelProgram("int8.cpp", "ffn_int8.cpp")
HERE = [known.name for known in sets_of_cpu()]
# A number near the middle of two bytes may become either: a step of 255 of its row's range, which
# one number can make large. So an error may be as large as LARGEST, but few are.
LARGEST, MEAN = 6e-2, 5e-3  # of the largest value


@pytest.fixture(params=HERE or ["auto"])
def kernels(request) -> str:
    if select("int8_ffn", Request(request.param, "cpu", torch.float32, activation="gelu")) != (
        "int8_ffn.cpp"
    ):
        pytest.skip("this CPU or compiler lacks the instructions")
    return request.param


def problem(
    sizes: list[int],
    model_dim: int,
    hidden_dim: int,
    dtype: torch.dtype,
    bias: bool = True,
    gated: bool = False,
) -> tuple[torch.Tensor, ExpertWeights, torch.Tensor]:
    """rows, weights and offsets, as large as they are in a network."""
    return ffn_inputs(sizes, model_dim, hidden_dim, (dtype, torch.float32), bias, gated)[:3]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest = 1.0
    if expected.numel():
        largest = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=LARGEST * largest)
    if expected.numel() >= 100:
        mean = (found.float() - expected.float()).abs().mean().item()
        assert mean <= MEAN * largest, (mean, largest)


@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    model_dim=st.integers(1, 80),
    hidden_dim=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    activation=st.sampled_from(KERNEL_ACTIVATIONS),
    bias=st.booleans(),
    gated=st.booleans(),
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sizes_equal_the_specification(
    kernels, sizes, model_dim, hidden_dim, dtype, activation, bias, gated
):
    gated = gated or activation in GATED_ACTIVATIONS
    rows, weights, offsets = problem(sizes, model_dim, hidden_dim, dtype, bias, gated)
    found = by_int8(rows, weights, offsets, activation, kernels)
    plain = quantize_weights(weights, dtype, activation, "torch")
    expected = reference.forward(rows, plain, offsets, activation)
    assert_near(found, expected)


@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(2500, 40), (40, 2500)])
def test_sums_in_several_stretches(kernels, model_dim, hidden_dim):
    case = (*problem([260, 1], model_dim, hidden_dim, torch.float32), "relu")
    assert_near(by_int8(*case, kernels), by_int8(*case, "torch"))


def test_integers_are_exact(kernels):
    """Rows and weights that int8 holds: only the rounding of fp32 is left."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (30, 70), generator=generator).float()
    rows[:, 0], rows[:, 1] = 0.0, 255.0  # the range of a row
    w1 = torch.randint(-127, 128, (1, 40, 70), generator=generator).float()
    w1[:, :, 2] = 127.0
    w2 = torch.eye(40, 70).unsqueeze(0)
    offsets = torch.tensor([30], dtype=torch.int32)
    found = by_int8(rows, ExpertWeights(w1, None, w2, None), offsets, "relu", kernels)
    hidden = (rows.double() @ w1[0].double().t()).relu()
    step = hidden.amax(1, keepdim=True) / 255  # of the bytes that the hidden layer becomes
    difference = (found[:, :40].double() - hidden).abs()
    assert bool((difference <= 0.501 * step + 1e-6 * hidden.abs()).all())


def test_the_range_of_a_row_is_that_of_its_numbers(kernels):
    """Not that of what pads it to a block: each step would be 101 / 255."""
    rows = 100 + torch.rand(5, 20)
    w1 = torch.zeros(1, 8, 20)
    w1[0, :, 0], w1[0, :, 1] = 1, -1
    weights = ExpertWeights(w1, None, torch.eye(8, 20)[None], None)
    out = by_int8(rows, weights, torch.tensor([5], dtype=torch.int32), "relu", kernels)
    expected = (rows[:, :1] - rows[:, 1:2]).relu().expand(5, 8)
    # half a step of each of two numbers, and one of the hidden layer
    torch.testing.assert_close(out[:, :8], expected, rtol=0, atol=2 / 255)


def by_int8(rows, weights, offsets, activation: str, kernels: str) -> torch.Tensor:
    quantized = quantize_weights(weights, rows.dtype, activation, kernels)
    return int8_ffn(rows, quantized, offsets, activation, kernels)


def test_what_is_not_finite_stays_so(kernels):
    for value in (float("nan"), float("inf"), float("-inf")):
        rows, weights, offsets = problem([5, 4], 33, 20, torch.float32)
        rows[3, 7] = value
        is_finite = by_int8(rows, weights, offsets, "gelu", kernels).isfinite()
        assert not is_finite[3].any()
        assert is_finite[[0, 1, 2, 4, 5, 6, 7, 8]].all()


def test_weights_that_are_not_finite_have_no_finite_results(kernels):
    for name, value in (("w1", float("inf")), ("w1", float("nan")), ("w2", float("nan"))):
        rows, weights, offsets = problem([3, 4], 33, 65, torch.float32)
        getattr(weights, name)[0, 7, 20] = value
        for form in ("torch", kernels):
            out = by_int8(rows, weights, offsets, "gelu", form)
            assert not out[:3].isfinite().all(1).any()
            assert out[3:].isfinite().all()


def test_rows_of_equal_numbers_and_weights_of_zeros(kernels):
    rows, weights, offsets = problem([3], 20, 24, torch.float32)
    rows[:] = 0.25
    weights.w1[0, 3] = 0
    found = by_int8(rows, weights, offsets, "gelu", kernels)
    assert_near(found, expert_ffn(rows, weights, offsets, kernels="torch"))


def test_weights_of_another_layout_are_refused(kernels):
    rows, weights, offsets = problem([3], 20, 24, torch.float32)
    plain = quantize_weights(weights, rows.dtype, "gelu", "torch")
    with pytest.raises(ValueError, match=r"quantized is \[1, 24, 20\] in torch.int8"):
        int8_ffn(rows, plain, offsets, "gelu", kernels)


# 1. The layer


def layer_and_tokens(**settings) -> tuple[MoELayer, torch.Tensor]:
    torch.manual_seed(0)
    config = MoEConfig(48, 96, num_experts=4, capacity_factor=0.0, **settings)
    return MoELayer(config).eval(), torch.randn(2, 50, 48)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2, "num_shared_experts": 1, "gated": True}], ids=str
)
def test_the_layer_computes_in_int8_where_it_is_prepared(kernels, options):
    layer, x = layer_and_tokens(kernels=kernels, int8_inference=True, **options)
    full = MoELayer(replace(layer.config, int8_inference=False)).eval()
    full.load_state_dict(layer.state_dict())
    with torch.no_grad():
        expected = full(x)[0]
        unprepared = layer(x)[0]
        with prepared(layer):
            found = layer(x)[0]
    torch.testing.assert_close(unprepared, expected)
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.03
    assert found.dtype == x.dtype


def test_with_gradients_the_layer_keeps_its_precision():
    layer, x = layer_and_tokens(int8_inference=True)
    expected = layer(x)[0]
    with prepared(layer):
        torch.testing.assert_close(layer(x)[0], expected)


def test_a_compiled_layer_reads_what_was_prepared():
    layer, x = layer_and_tokens(int8_inference=True)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad(), prepared(layer):
        expected = layer(x)[0]
        torch.testing.assert_close(compiled(x)[0], expected)


def test_functions_of_a_layer_may_be_compiled_on_their_own():
    """As torch.compile does beyond its limit of recompilations: reading the CPU's name failed."""
    request = Request("auto", "cpu", torch.int64)
    compiled = torch.compile(lambda: _first_form("plan", request), backend="eager")
    assert compiled() == select("plan", request)


# 2. The kernels as programs


def run_cases(command: list[str], count: int) -> None:
    """Random problems, each against the specification."""
    generator = np.random.default_rng(0)
    for number in range(count):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        sizes = generator.integers(0, 45, generator.integers(1, 5)).tolist()
        sizes[0] += 1  # the kernels are not called without rows
        model_dim, hidden_dim = generator.integers(1, 150, 2).tolist()
        activation = int(generator.integers(len(KERNEL_ACTIVATIONS)))
        name = KERNEL_ACTIVATIONS[activation]
        gated = name in GATED_ACTIVATIONS or number % 4 == 3
        rows, weights, offsets = problem(sizes, model_dim, hidden_dim, dtype, gated=gated)
        q = quantize_weights(weights, dtype, name, "torch")
        header = [len(sizes), sum(sizes), model_dim, hidden_dim, activation]
        header += [dtype == torch.bfloat16, int(generator.integers(1, 4)), gated]
        contents = np.array(header, np.int64).tobytes() + raw(rows)
        for linear in q:
            contents += b"".join(map(raw, linear or ()))
        contents += raw(offsets)
        output = run_program(command, contents)
        found = torch.frombuffer(bytearray(output), dtype=dtype).view(rows.shape)
        expected = reference.forward(rows, q, offsets, name)
        assert_near(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neon", "neon_dotprod", "neon_bf16"])
def test_arm(name, tmp_path):
    run_cases(PROGRAM.on_arm(tmp_path, name), 60)


@pytest.mark.slow
def test_amx_with_emulated_tiles(tmp_path):
    run_cases(PROGRAM.with_emulated_tiles(tmp_path), 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling with the sanitizers takes minutes
@pytest.mark.parametrize("name", HERE)
def test_random_shapes_under_the_sanitizers(name, tmp_path):
    """No access outside of the tensors, whatever their sizes."""
    run_cases(PROGRAM.with_sanitizers(tmp_path, name), 2000)


def test_sums_that_leave_int32():
    """More inputs than an int32 has room for are computed in fp64, by any kernels."""
    size, ends = 70_000, torch.tensor([1], dtype=torch.int32)
    weights = ExpertWeights(torch.ones(1, 1, size), None, torch.ones(1, 1, size), None)
    row = torch.ones(1, size)
    row[0, 0] = 0
    out = by_int8(row, weights, ends, "relu", "auto")
    torch.testing.assert_close(out, torch.full_like(out, size - 1))


def test_rows_near_the_end_of_fp32(kernels):
    """Their range and their products leave fp32 on the way, the results do not."""
    weights = ExpertWeights(torch.full((1, 4, 4), 0.5), None, torch.eye(4)[None], None)
    rows = torch.tensor([[3e38, -3e38, 1e38, 0.0], [1e38] * 4, [2e20, 0.0, 0.0, -1e20]])
    for name in (kernels, "torch"):
        out = by_int8(rows, weights, torch.tensor([3], dtype=torch.int32), "relu", name)
        step = (rows.amax(1) / 255 - rows.amin(1) / 255).unsqueeze(1)
        expected = (rows * 0.5).sum(1, keepdim=True).expand_as(out)
        assert ((out - expected).abs() <= 2 * step + 1e-2 * expected).all(), name


def test_weights_below_the_smallest_range():
    linear = reference.quantize_weight(torch.tensor([[[2e-43, -1e-45]]]), None)
    assert linear.quantized.eq(0).all()
    assert linear.scales.item() == 1
