"""The experts' kernel in C++: its edges of blocks and tiles, its division of the work, and its
compilation."""

# N rows, M model dim, H hidden dim

import platform
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_cases import expert_ffn

from moe_core import MoEConfig, MoELayer
from moe_core.choices import CPU_KERNELS
from moe_core.ops import ExpertWeights, backend, pack_weights
from moe_core.ops.backend import Request, select
from moe_core.ops.ffn import cpp as ffn_cpp
from moe_core.ops.ffn import loop, reference
from moe_core.ops.ffn.inputs import FFNInputs
from moe_core.ops.native import instruction_sets, library
from moe_core.ops.native.instruction_sets import sets_of_cpu

OPS = torch.ops.moe_core
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2}  # of the largest value, which is near 1


SETS = [known.name for known in sets_of_cpu()]  # each test runs with all that this CPU has


def form(
    dtype: torch.dtype, weight_dtype: torch.dtype, device: str = "cpu", kernels: str = "auto"
) -> str:
    request = Request(kernels, device, dtype, weight_dtype=weight_dtype, activation="gelu")
    return select("ffn", request)


@pytest.fixture(params=SETS or ["auto"])
def kernels(request) -> str:
    return request.param


def inputs(
    sizes: list[int], model_dim: int, hidden_dim: int, dtypes, seed: int = 0, kernels: str = "auto"
):
    """rows, weights, offsets and a gradient of the output; as large as they are in a network."""
    dtype, weight_dtype = dtypes
    if form(dtype, weight_dtype, kernels=kernels) != "ffn.cpp":
        pytest.skip("this CPU or compiler lacks the instructions")
    generator = torch.Generator().manual_seed(seed)
    experts, num_rows = len(sizes), sum(sizes)

    def random(*shape: int) -> torch.Tensor:
        """In [-1, 1): where sums cancel, an error in bf16 is one of their terms'."""
        return torch.rand(*shape, generator=generator) * 2 - 1

    rows, grad = (random(num_rows, model_dim).to(dtype) for _ in range(2))
    weights = [
        (random(*shape) / scale**0.5).to(weight_dtype)
        for shape, scale in (
            ((experts, hidden_dim, model_dim), model_dim),
            ((experts, hidden_dim), 1),
            ((experts, hidden_dim, model_dim), hidden_dim),
            ((experts, model_dim), 1),
        )
    ]
    return rows, weights, torch.tensor(sizes).cumsum(0).int(), grad


def outcome(function, rows, weights, offsets, grad) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in (rows, *weights)]
    out = function(*leaves, offsets)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_equals_reference(rows, weights, offsets, grad, kernels: str) -> None:
    found = outcome(partial(expert_ffn, kernels=kernels), rows, weights, offsets, grad)
    expected = outcome(
        reference.expert_ffn, rows.double(), [w.double() for w in weights], offsets, grad.double()
    )
    for a, b in zip(found, expected, strict=True):
        largest = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(
            a.double(), b, rtol=0, atol=TOLERANCES[rows.dtype] * max(largest, 1.0)
        )


@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    model_dim=st.integers(1, 80),
    hidden_dim=st.integers(1, 100),
    dtypes=st.sampled_from(DTYPES),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sizes_equal_the_reference(kernels, sizes, model_dim, hidden_dim, dtypes):
    """Blocks of 16 x 16, panels of 12 or 14, pairs of tiles, and what is left over of each."""
    case = inputs(sizes, model_dim, hidden_dim, dtypes, kernels=kernels)
    assert_equals_reference(*case, kernels)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sizes", "model_dim", "hidden_dim"),
    [([9000, 40], 52, 300), ([90], 40, 9000), ([3, 0, 1], 1100, 4400)],
    ids=["rows in several steps", "hidden units in several steps", "wide"],
)
def test_what_one_step_does_not_hold(sizes, model_dim, hidden_dim, dtypes, kernels):
    case = inputs(sizes, model_dim, hidden_dim, dtypes, kernels=kernels)
    assert_equals_reference(*case, kernels)


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_activations_and_their_slopes_in_fp32(activation, kernels):
    """Seen through one hidden unit: a relative error, since what is far below zero is tiny.
    exp(-100) is, too."""
    z = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([0.0, -0.0, 100, -100, 1e4, -1e4])])
    rows, weights, offsets, _ = inputs([len(z)], 1, 1, DTYPES[0], kernels=kernels)
    rows = z.unsqueeze(1).requires_grad_()
    one = torch.ones_like(weights[0])
    out = expert_ffn(rows, one, None, one, None, offsets, activation, kernels=kernels)
    exact = z.double().unsqueeze(1).requires_grad_()
    exact_gelu = lambda z: z * torch.erfc(-z / 2**0.5) / 2  # noqa: E731 - F.gelu cancels far below zero
    functions = {"gelu": exact_gelu, "relu": torch.relu, "silu": lambda z: z * z.sigmoid()}
    function = functions[activation]
    torch.testing.assert_close(out.double(), function(exact), rtol=3e-6, atol=1e-30)
    found, expected = (
        torch.autograd.grad(y.sum(), x)[0].double()
        for y, x in ((out, rows), (function(exact), exact))
    )
    assert (found - expected).abs().max() < 1e-6  # a slope has a zero, so no relative error


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value, kernels):
    for dtypes in DTYPES:
        rows, weights, offsets, _ = inputs([5, 20], 24, 40, dtypes, kernels=kernels)
        rows[7, 3] = value
        out = expert_ffn(rows, *weights, offsets, kernels=kernels)
        assert not out[7].isfinite().any()
        assert out[:7].isfinite().all()
        assert out[8:].isfinite().all()


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_dropout_is_the_loop_s(dtypes, kernels):
    """The same noise in each kernel's own order of the hidden layer gives the same output and
    gradients."""
    rows, weights, offsets, grad = inputs([33, 0, 47], 40, 64, dtypes, kernels=kernels)
    noise = OPS.dropout_noise(rows, weights[0], "gelu", kernels)
    ffn_inputs = FFNInputs(rows, *weights, None, None, offsets, noise, "gelu", 0.3, kernels)
    needs = [True] * 5 + [False] * 2
    out, hidden = OPS.expert_ffn(*ffn_inputs, True)
    found = [out, *OPS.expert_ffn_backward(grad, hidden, needs, *ffn_inputs)[:5]]
    for_loop = torch.zeros_like(noise)
    for group in loop._Groups(rows, offsets, weights[0]):
        noise_of_group = noise.view(-1, 64)[group.start : group.end].t()
        for_loop[64 * group.start : 64 * group.end] = noise_of_group.flatten()
    ffn_inputs = ffn_inputs._replace(noise=for_loop)
    out, hidden = loop.forward(ffn_inputs, True)
    expected = [out, *loop.backward(ffn_inputs, grad, hidden, needs)[:5]]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCES[dtypes[0]] * b.abs().max().item())


@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(40, 9000), (2112, 40)])
@pytest.mark.parametrize("dtypes", DTYPES[:2], ids=str)
def test_threads_divide_the_work_and_repeat_it_to_the_bit(dtypes, model_dim, hidden_dim, kernels):
    """More threads than experts divide an expert's hidden units, by 32; their sums have a fixed
    order."""
    case = inputs([30, 2], model_dim, hidden_dim, dtypes, kernels=kernels)
    run = partial(expert_ffn, kernels=kernels)
    before = torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            assert_equals_reference(*case, kernels)
            first, again = (outcome(run, *case) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtypes", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(32, 32), (96, 384), (64, 9024)])
def test_packed_weights_give_what_the_weights_do(model_dim, hidden_dim, dtypes, kernels):
    sizes = [20, 0, 70, 600 if model_dim < 96 else 1]
    rows, weights, offsets, _ = inputs(sizes, model_dim, hidden_dim, dtypes, kernels=kernels)
    w1, b1, w2, b2 = weights
    packed = pack_weights(ExpertWeights(*weights), rows.dtype, "gelu", kernels)
    assert [p.shape for p in packed.matrices().tensors()] == [w1.shape, w2.shape]
    before = torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            found = expert_ffn(rows, packed.w1, b1, packed.w2, b2, offsets, kernels=kernels)
            expected = expert_ffn(rows, w1, b1, w2, b2, offsets, kernels=kernels)
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_leaves_cpp_out(dtype, monkeypatch):
    inputs([1], 32, 32, (dtype, torch.float32))  # skips where there is no C++
    for module in (library, ffn_cpp):
        monkeypatch.setattr(module, "library", lambda kernels: pytest.fail("C++"))
    layer = MoELayer(MoEConfig(32, 32, 2, hidden_dropout=0.5, kernels="torch"))
    x = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        layer(x)[0].sum().backward()
        with torch.no_grad():
            layer.eval()(x)


def test_what_is_not_packed():
    w1, w2 = (torch.zeros(2, 64, 32) for _ in range(2))
    weights = ExpertWeights(w1, None, w2, None)
    assert pack_weights(weights, torch.float64, "gelu") is None
    assert pack_weights(weights, torch.float32, "gelu", "torch") is None
    halves = weights.map(torch.Tensor.bfloat16)
    assert pack_weights(halves, torch.bfloat16, "gelu") is None
    part = weights.map(lambda weight: weight[:, :48].contiguous())
    assert pack_weights(part, torch.float32, "gelu") is None


def test_weights_of_two_dtypes_or_shapes_are_refused():
    """Read as those of the first, the second's memory would end too early."""
    rows, (w1, b1, w2, b2), offsets, _ = inputs([4], 32, 32, DTYPES[0])
    assert pack_weights(ExpertWeights(w1, b1, w2.bfloat16(), b2), rows.dtype, "gelu") is None
    for other in (w2.bfloat16(), w2[:, :16]):
        with pytest.raises(ValueError, match=r"w1 is .* w2 "):
            expert_ffn(rows, w1, b1, other, b2, offsets)


def test_other_dtypes_and_devices_are_left_to_others():
    assert form(torch.float64, torch.float64) == "ffn.loop"
    assert form(torch.float16, torch.float32) == "ffn.loop"
    assert form(torch.float32, torch.bfloat16) == "ffn.loop"
    assert form(torch.float32, torch.int16) == "ffn.loop"  # packed bf16
    assert form(torch.float32, torch.float32, "meta") == "ffn.loop"


def test_a_cpu_without_the_instructions_is_left_to_the_loop(monkeypatch):
    monkeypatch.setattr(library, "sets_of_cpu", list)
    library.chosen.cache_clear()
    try:
        for dtype, weight_dtype in DTYPES:
            assert form(dtype, weight_dtype) == "ffn.loop"
    finally:
        library.chosen.cache_clear()


def test_instructions_that_are_not_here_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(instruction_sets, "cpu_words", lambda: frozenset({"avx2", "fma"}))
    library.chosen.cache_clear()
    backend._languages.cache_clear()
    try:
        for name in CPU_KERNELS:
            if name == "avx2" and platform.machine() == "x86_64":
                continue
            with pytest.raises(ValueError, match=rf"kernels \('{name}'\).*lacks the instructions"):
                form(torch.float32, torch.float32, kernels=name)
    finally:
        library.chosen.cache_clear()
        backend._languages.cache_clear()


@pytest.mark.parametrize(
    ("maker", "expected"),
    [
        ("AuthenticAMD", ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("GenuineIntel", ["avx512_vnni", "avx512", "avx2", "avx512_bf16"]),
    ],
)
def test_the_order_depends_on_the_maker(monkeypatch, maker, expected):
    instructions = "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16"
    words = frozenset({maker, *instructions.split()})
    monkeypatch.setattr(instruction_sets, "cpu_words", lambda: words)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert [known.name for known in sets_of_cpu()] == expected


@pytest.mark.parametrize("damaged", [False, True])
def test_a_wheels_libraries_need_no_compiler(damaged, tmp_path, monkeypatch, caplog):
    if library.chosen() is None:
        pytest.skip("this CPU or compiler lacks the instructions")
    first = sets_of_cpu()[0]
    prebuilt = tmp_path / library.file_name(first)
    shutil.copy(library._compiled(first), prebuilt)
    if damaged:
        prebuilt.write_bytes(b"not a library")
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    library.chosen.cache_clear()
    try:
        assert (library.chosen() is None) == damaged
    finally:
        library.chosen.cache_clear()
    assert ("C++ does not compile" in caplog.text) == damaged


def test_the_names_are_those_of_the_table():
    assert tuple(known.name for known in instruction_sets.SETS) == CPU_KERNELS


COMPUTE = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from moe_core.ops import ExpertWeights, expert_ffn
w, rows = torch.ones(2, 8, 4), torch.ones(6, 4)
offsets = torch.tensor([3, 6], dtype=torch.int32)
weights = ExpertWeights(w, None, w, None)
print("out", float(expert_ffn(rows, weights, offsets, "relu").sum()))
"""


def run(processes: int = 1, **environment) -> list[str]:
    """What processes print that compute with experts, all at once; all succeed."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMPUTE], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(processes)
    ]
    printed = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    assert all("out 768.0" in text for text in printed)
    return printed


COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo a compiler
while [ "$1" != -o ]; do shift; done
sleep 1  # half a minute in earnest
cp {library} "$2"
"""


def fake_compiler(directory: Path) -> Path:
    compiler = directory / "compiler"
    compiler.write_text(COMPILER.format(library=library._compiled(library.chosen()[0])))
    compiler.chmod(0o755)
    return compiler


def test_processes_compile_it_once_among_them(tmp_path):
    inputs([1], 1, 1, DTYPES[0])
    environment = {
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "CXX": str(fake_compiler(tmp_path)),
    }
    printed = run(2, **environment)
    assert sum("compiling" in text for text in printed) == 1
    assert len(list((tmp_path / "moe_core").glob("*.so"))) == 1
    assert "compiling" not in run(**environment)[0]


def test_without_a_compiler_experts_run_in_torch_and_one_line_says_so(tmp_path):
    inputs([1], 1, 1, DTYPES[0])
    (printed,) = run(XDG_CACHE_HOME=str(tmp_path), CXX="no-such-compiler")
    assert printed.count("C++ does not compile") == 1
    assert "no-such-compiler" in printed


def test_a_compiler_may_have_arguments(tmp_path):
    inputs([1], 1, 1, DTYPES[0])
    compiler = fake_compiler(tmp_path)
    (printed,) = run(XDG_CACHE_HOME=str(tmp_path), PATH="/usr/bin:/bin", CXX=f"env {compiler}")
    assert "does not compile" not in printed
