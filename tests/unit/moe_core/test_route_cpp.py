"""Routing in C++ against its specification: choices, gate values, sums and gradients, for each
instruction set of this CPU, any number of threads, and as a program under the sanitizers."""

# T tokens, E experts, K top-k

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_programs import KernelProgram, raw, run_program

from moe_core import MoEConfig, MoELayer, ops
from moe_core.ops import backend
from moe_core.ops.native.instruction_sets import sets_of_cpu
from moe_core.ops.route.reference import route_and_sums

SETS = [known.name for known in sets_of_cpu()]
PROGRAM = KernelProgram("route.cpp", "route.cpp")
EPSILON = 2.0**-23  # of fp32
ODD_VALUES = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0, -100.0, 3e38, -3e38, 1e-40])

pytestmark = pytest.mark.skipif(not SETS, reason="no C++ here")


@pytest.fixture(autouse=True)
def one_thread_more_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@st.composite
def problems(draw) -> tuple[torch.Tensor, torch.Tensor | None, ops.RouteSettings]:
    """Logits and noise: random ones, ties, and values that are infinite or no numbers."""
    num_experts = draw(st.integers(1, 128))
    shape = (draw(st.integers(0, 70)), num_experts)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.1, 3.0, 30.0]))
    kind = draw(st.sampled_from(["distinct", "ties", "odd", "far below 0"]))
    if kind == "ties":
        logits = logits.round()
    if kind == "odd":
        places = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.02, 0.9]))
        drawn = torch.randint(len(ODD_VALUES), shape, generator=generator)
        logits = torch.where(places, ODD_VALUES[drawn], logits)
    if kind == "far below 0":
        logits = logits - 200
    noise = None
    if draw(st.booleans()):
        noise = torch.randn(shape, generator=generator)
    settings = ops.RouteSettings(
        draw(st.integers(1, min(8, num_experts))),
        draw(st.booleans()),
        draw(st.sampled_from(backend.KERNEL_LOSSES)),
        0.25,
        draw(st.sampled_from([0.25, 0.0])),
        draw(st.sampled_from(SETS)),
        draw(st.sampled_from(["softmax", "sigmoid"])),
    )
    return logits, noise, settings


def specified(logits, noise, settings: ops.RouteSettings) -> tuple[torch.Tensor, ...]:
    """Gates, ids, probs and the loss's sums of plain torch, in the dtype of the logits."""
    routed = ops.route(logits, noise, settings._replace(kernels="torch"))
    top_k, normalize, loss, _, std, _, activation = settings
    _, _, sums = route_and_sums(routed.noisy, logits, top_k, normalize, loss, std, activation)
    return routed.gates, routed.ids, routed.probs, sums


def bound(logits: torch.Tensor) -> float:
    """Of relative errors: each exp has that of its argument, and 3 more; sums have E terms."""
    span = 0.0
    if logits.numel():
        span = float(logits.detach().nan_to_num(0, 0, 0).clamp(-87, 87).abs().max())
    return (2 * span + logits.shape[1] + 8) * EPSILON


@given(problems())
def test_equals_the_specification(problem):
    logits, noise, settings = problem
    gates, ids, probs, sums = specified(logits, noise, settings)
    routed = ops.route(logits, noise, settings)
    assert routed.sums is not None, "it runs"
    assert torch.equal(routed.ids, ids)
    limits = {"rtol": bound(logits), "atol": 1e-30, "equal_nan": True}
    torch.testing.assert_close(routed.gates, gates, **limits)
    torch.testing.assert_close(routed.probs, probs, **limits)
    if settings.loss == "none":
        return
    if settings.loss == "gshard":
        assert torch.equal(routed.sums[1], sums[1])
    limits["rtol"] += len(logits) * EPSILON
    torch.testing.assert_close(routed.sums[0], sums[0], **limits)
    limits["atol"] += len(logits) * limits["rtol"] / 0.25  # of the argument of erf
    torch.testing.assert_close(routed.sums[1], sums[1], **limits)


@given(problems(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_gradients_equal_those_in_fp64(problem, is_used):
    """Of gate values, probabilities and sums, alone and together."""
    logits, noise, settings = problem
    logits = logits.nan_to_num(0, 9, -9).clamp(-300, 300)
    weights = [torch.randn(settings.top_k), torch.randn(logits.shape), torch.randn(2, 1)]
    is_used[2] &= settings.loss != "none"
    results = []
    for x in (logits, logits.double()):
        x = x.requires_grad_()
        if x.dtype == torch.float64:
            gates, ids, probs, sums = specified(x, noise, settings)
            if not torch.equal(ids, specified(x.float(), noise, settings)[1]):
                return  # rounding of the noisy logits to fp32 has made ties
        else:
            routed = ops.route(x, noise, settings)
            gates, probs, sums = routed.gates, routed.probs, routed.sums
        total = x.sum() * 0
        for used, value, weight in zip(is_used, (gates, probs, sums), weights, strict=True):
            if used:
                total = total + (value * weight.to(x.dtype)).sum()
        results.append(torch.autograd.grad(total, x)[0])
    # gradients are differences of terms that are at most 4 times the largest weight
    largest = 4 * max([1.0, *(float(w.abs().max()) for w in weights if w.numel())])
    limit = largest * 4 * bound(logits)
    if settings.loss.startswith(
        "load"
    ):  # slopes of a load are up to 1 / std, and of these E are added
        limit *= logits.shape[1] / 0.25**2
    torch.testing.assert_close(results[0].double(), results[1], rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("activation", "loss"),
    [("softmax", "gshard"), ("sigmoid", "gshard"), ("softmax", "load_importance")],
)
def test_any_number_of_threads_gives_the_same_bits(activation, loss):
    logits = torch.randn(3001, 33, generator=torch.Generator().manual_seed(0))
    settings = ops.RouteSettings(4, True, loss, 0.0, 0.5, "auto", activation)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        x = logits.clone().requires_grad_()
        routed = ops.route(x, None, settings)
        total = routed.gates.square().sum() + routed.sums.square().sum()
        results.append([*routed[:4], torch.autograd.grad(total, x)[0]])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["gshard", "load_importance"])
def test_the_op_computes_logits_of_tokens_and_casts_them(loss, dtype):
    generator = torch.Generator().manual_seed(0)
    tokens, weight = torch.randn(50, 8, generator=generator), torch.randn(5, 8, generator=generator)
    noise, factors = (
        torch.randn(50, 5, generator=generator),
        torch.randn(50, 8, generator=generator),
    )
    results = []
    for kernels in ("auto", "torch"):
        settings = ops.RouteSettings(2, True, loss, 0.3, 0.3, kernels, "sigmoid")
        leaves = [tokens.clone().requires_grad_(), weight.clone().requires_grad_()]
        routed = ops.route(ops.LinearLogits(*leaves, dtype), noise, settings)
        assert (routed.logits is None) == (kernels == "auto")
        sums, inputs = routed.sums, routed.inputs
        if kernels == "torch":
            inputs, clean = leaves[0].to(dtype), routed.logits
            sums = route_and_sums(routed.noisy, clean, 2, True, loss, 0.3, "sigmoid")[2]
        assert inputs.dtype == dtype
        total = routed.gates.square().sum() + sums.square().sum() + (inputs * factors).sum()
        results.append([routed.ids, sums, *torch.autograd.grad(total, leaves)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_opcheck(activation, normalize):
    x = torch.randn(20, 7, requires_grad=True)
    settings = ops.RouteSettings(3, normalize, "gshard", 0.0, 0.0, "auto", activation)
    torch.library.opcheck(torch.ops.moe_core.route, (x, None, None, None, "cpp", *settings))


def test_second_derivatives():
    settings = ops.RouteSettings(2, True, "gshard", 0.0, 0.0, "auto", "sigmoid")
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for logits, kernels in ((x, "auto"), (x.double(), "torch")):
        logits = logits.requires_grad_()
        gates = ops.route(logits, None, settings._replace(kernels=kernels)).gates
        (grad,) = torch.autograd.grad(gates[:, 0].square().sum(), logits, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), logits)[0].double())
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_fp64_is_routed_by_torch():
    settings = ops.RouteSettings(1, True, "gshard", 0.0, 0.0)
    for dtype in (torch.float32, torch.float64):
        routed = ops.route(torch.ones(2, 3, dtype=dtype), None, settings)
        assert (routed.sums is None) == (dtype == torch.float64)  # the torch form has none


def test_a_compiled_layer_equals_the_layer():
    config = MoEConfig(32, 16, 6, top_k=2, gate_activation="sigmoid", capacity_factor=0.0)
    layer = MoELayer(config)
    compiled = torch.compile(layer)
    x = torch.randn(40, 32)
    results = []
    for function in (layer, compiled):
        y, aux_loss = function(x)
        (y.square().sum() + aux_loss).backward()
        results.append([y.detach(), aux_loss.detach(), layer.router.weight.grad.clone()])
        layer.zero_grad()
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def run_case(command: list[str], generator: np.random.Generator) -> None:
    """A random problem, forward and backward, against plain torch."""
    num_tokens, num_experts = int(generator.integers(0, 600)), int(generator.integers(1, 129))
    top_k = int(generator.integers(1, min(8, num_experts) + 1))
    normalize, sigmoid, has_noise = (int(n) for n in generator.integers(0, 2, 3))
    logits = torch.tensor(generator.standard_normal((num_tokens, num_experts), np.float32))
    logits, noise = (4 * logits).round() / 2, logits.flip(0)
    by_gates, by_probs = logits[:, :top_k].cos(), logits.sin()
    by_sums = torch.linspace(-1, 1, 2 * num_experts).view(2, -1)
    threads = int(generator.integers(1, 4))
    loss, eighths = int(generator.integers(1, 4)), int(generator.integers(0, 4))
    header = [num_tokens, num_experts, top_k, normalize, sigmoid, threads, has_noise, loss, eighths]
    problem = np.array(header, np.int64).tobytes()
    output = run_program(
        command, problem + b"".join(map(raw, (logits, noise, by_gates, by_probs, by_sums)))
    )
    logits = logits.requires_grad_()
    activation = "sigmoid" if sigmoid else "softmax"
    name = backend.KERNEL_LOSSES[loss]
    noises = (1.0, eighths / 8)
    settings = ops.RouteSettings(top_k, bool(normalize), name, *noises, "torch", activation)
    gates, ids, probs, sums = specified(logits, noise if has_noise else None, settings)
    total = (gates * by_gates).sum() + (probs * by_probs).sum() + (sums * by_sums).sum()
    expected = [ids, gates, probs, sums, torch.autograd.grad(total, logits)[0]]
    start = 0
    for wanted in expected:
        size = wanted.numel() * wanted.element_size()
        found = torch.frombuffer(bytearray(output[start : start + size] or 8), dtype=wanted.dtype)
        found = found[: wanted.numel()].view(wanted.shape)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-4)
        start += size
    assert start == len(output)


def run_cases(command: list[str], count: int) -> None:
    generator = np.random.default_rng(0)
    for _ in range(count):
        run_case(command, generator)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neon", "neon_bf16"])
def test_arm(name, tmp_path):
    run_cases(PROGRAM.on_arm(tmp_path, name), 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SETS)
def test_random_shapes_under_the_sanitizers(name, tmp_path):
    """No access outside of the tensors, whatever their sizes."""
    run_cases(PROGRAM.with_sanitizers(tmp_path, name), 2000)
