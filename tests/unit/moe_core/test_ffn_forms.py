"""The experts' networks, plain and gated: each form for CPUs and `F.grouped_mm` against torch's
linear layers, and what torch.compile plans with."""

# E experts, N rows, M model dim, H hidden dim

import pytest
import torch
import torch.nn.functional as F
from ffn_cases import (
    BF16,
    DTYPES,
    FP32,
    MIXED,
    assert_close,
    by_reference,
    ffn_inputs,
    outcome,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moe_core.ops import ExpertWeights, expert_ffn, pack_weights
from moe_core.ops.backend import chosen
from moe_core.ops.ffn import grouped, linear
from moe_core.ops.ffn.op import kernels_for
from moe_core.ops.native.instruction_sets import sets_of_cpu

OPS = torch.ops.moe_core
SETS = [known.name for known in sets_of_cpu()]
KERNELS = ["torch", *SETS]
each_kernel = pytest.mark.parametrize("kernels", KERNELS)
each_kind = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# each expert's rows, rows of none, with biases
CASES = [
    ([4, 4, 4], 0, True),
    ([0, 37, 0, 70, 3, 0], 3, False),
    ([70], 40, True),
    ([1, 1, 1], 0, False),
    ([0, 0], 0, True),
    ([0, 0], 2, False),
]


def by_form(kernels: str, case, activation="silu") -> list[torch.Tensor]:
    rows, weights, ends, grad = case

    def run(rows, weights):
        return expert_ffn(rows, weights, ends, activation, 0.0, kernels)

    return outcome(run, rows, weights, grad)


@pytest.mark.parametrize(
    ("gated", "activation"),
    [(False, "gelu"), (False, "relu"), (True, "silu"), (True, "clamped_swiglu")],
)
def test_gradcheck(gated, activation):
    rows, weights, ends, _ = ffn_inputs([2, 0, 3], 3, 2, gated=gated)
    inputs = [tensor.requires_grad_() for tensor in (rows, *weights.tensors())]

    def run(rows, *tensors):
        return expert_ffn(rows, weights.with_tensors(tensors), ends, activation)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@each_kind
@pytest.mark.parametrize(
    ("kernels", "dtypes"),
    [("torch", name) for name in DTYPES]
    + [(name, dtypes) for name in SETS for dtypes in ("fp32", "bf16", "mixed")],
)
def test_each_form_equals_the_specification(kernels, dtypes, gated):
    """Rows of no expert are never read: the half-precision loop computes on tiles of rows."""
    dtypes = DTYPES[dtypes]
    for sizes, spare, bias in CASES:
        case = ffn_inputs(sizes, dtypes=dtypes, bias=bias, gated=gated, spare=spare)
        found = by_form(kernels, case)
        num_weights = len(case[1].tensors())
        assert [t.dtype for t in found] == [dtypes[0]] * 2 + [dtypes[1]] * num_weights
        assert all(t.isfinite().all() for t in found)
        assert_close(found, by_reference(*case), dtypes[0])


@each_kernel
@pytest.mark.parametrize(
    ("model_dim", "hidden_dim", "activation", "gated"),
    [
        (5, 7, "relu", True),
        (5, 7, "relu", False),
        (5, 7, "silu", False),
        (2112, 64, "gelu", True),
        (64, 2112, "clamped_swiglu", True),
    ],
)
def test_activations_and_sizes(model_dim, hidden_dim, activation, gated, kernels):
    """Also sizes at which sums over k, and a step's hidden units, come in several parts."""
    case = ffn_inputs([33, 0, 20], model_dim, hidden_dim, FP32, gated=gated)
    case[0].mul_(4)  # beyond the limits of the clamped one
    found = by_form(kernels, case, activation)
    assert_close(found, by_reference(*case, activation), torch.float32)


@each_kernel
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    model_dim=st.integers(1, 80),
    hidden_dim=st.integers(1, 100),
    dtypes=st.sampled_from([FP32, MIXED, BF16]),
    bias=st.booleans(),
    gated=st.booleans(),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sizes(kernels, sizes, model_dim, hidden_dim, dtypes, bias, gated):
    """Blocks of 16 x 16, panels of 12 or 14, pairs of tiles, and what is left over of each."""
    case = ffn_inputs(sizes, model_dim, hidden_dim, dtypes, bias, gated)
    assert_close(by_form(kernels, case), by_reference(*case), dtypes[0])


@each_kernel
def test_weights_in_other_memory_layouts(kernels):
    """As halves of one tensor [E, 2 H, M], as [E, M, H], and with neither dim contiguous."""
    for dtypes in (FP32, MIXED):
        rows, weights, ends, grad = ffn_inputs([33, 0, 20], 48, 72, dtypes)
        both = torch.cat([weights.w1, weights.w3], 1)
        interleaved = torch.stack([weights.w1, weights.w3], 2).flatten(1, 2).mT.contiguous().mT
        layouts = [
            weights._replace(w1=both[:, :72], w3=both[:, 72:]),
            weights._replace(w2=weights.w2.mT.contiguous().mT, w1=weights.w1.mT.contiguous().mT),
            weights._replace(w1=interleaved[:, ::2], w3=interleaved[:, 1::2]),
        ]
        expected = by_reference(rows, weights, ends, grad)
        for layout in layouts:
            assert_close(by_form(kernels, (rows, layout, ends, grad)), expected, dtypes[0])


@each_kernel
def test_an_expanded_gradient_and_other_strides(kernels):
    rows, weights, ends, grad = ffn_inputs([4, 8], dtypes=FP32, gated=False)
    expected = by_reference(rows, weights, ends, torch.ones_like(grad))
    turned = weights.map(lambda weight: weight.transpose(0, 1).contiguous().transpose(0, 1))
    one = torch.ones(1, 1, dtype=rows.dtype).expand_as(rows)
    found = by_form(kernels, (rows.t().contiguous().t(), turned, ends, one))
    assert_close(found, expected, torch.float32)


@each_kernel
def test_no_gradient_where_none_is_wanted(kernels):
    for gated in (False, True):
        rows, weights, ends, grad = ffn_inputs([4, 8], dtypes=FP32, gated=gated)
        expected = by_reference(rows, weights, ends, grad)
        tensors = (rows, *weights.tensors())
        for wanted in range(len(tensors)):
            inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
            out = expert_ffn(inputs[0], ExpertWeights(*inputs[1:]), ends, "silu", 0.0, kernels)
            out.backward(grad)
            assert_close([inputs[wanted].grad], [expected[1 + wanted]], torch.float32)
            assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)


@each_kernel
@pytest.mark.parametrize(
    ("gated", "share", "dtypes"), [(False, 0.1, FP32), (False, 0.5, BF16), (True, 0.25, FP32)]
)
def test_dropout_zeroes_its_share_in_both_directions(gated, share, dtypes, kernels):
    """Through experts that pass on what they get: the gradient of an input is its factor."""
    x = torch.ones(2, 640, dtype=dtypes[0]).requires_grad_()
    eye = torch.eye(640, dtype=dtypes[1]).expand(2, 640, 640).contiguous()
    weights = ExpertWeights(eye, None, eye, None)
    if gated:
        ones = torch.ones(2, 640, dtype=dtypes[1])
        weights = weights._replace(w3=torch.zeros_like(eye), b3=ones)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    torch.manual_seed(0)
    out = expert_ffn(x, weights, ends, "relu", share, kernels)
    if kernels != "torch":
        share = round(share * 65536) / 65536
    factor = 1 / (1 - share)
    assert set(out.tolist()[0]) == {0.0, torch.tensor(factor, dtype=dtypes[0]).item()}
    dropped = (out == 0).double().mean().item()
    assert abs(dropped - share) < 4 * (share * (1 - share) / out.numel()) ** 0.5
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtypes", [FP32, MIXED], ids=["fp32", "mixed"])
def test_packed_weights_give_what_the_weights_do(dtypes, kernels):
    """600 rows, and 2,080 hidden units, are computed in two steps."""
    before = torch.get_num_threads()
    for model_dim, hidden_dim, last, gated in (
        (32, 32, 600, False), (96, 384, 1, False), (64, 2080, 1, False), (64, 96, 20, True)
    ):  # fmt: skip
        rows, weights, ends, _ = ffn_inputs(
            [20, 0, 70, last], model_dim, hidden_dim, dtypes, gated=gated
        )
        packed = pack_weights(weights, rows.dtype, "silu", kernels)
        matrices = zip(packed.matrices().tensors(), weights.matrices().tensors(), strict=True)
        for found, expected in matrices:
            assert found.shape == expected.shape
            assert not found.is_floating_point()
        found = []
        try:
            for threads in (1, 5):
                torch.set_num_threads(threads)
                found.append(expert_ffn(rows, packed, ends, "silu", 0.0, kernels))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(*found)
        expected = expert_ffn(rows, weights, ends, "silu", 0.0, kernels)
        assert_close(found[:1], [expected], dtypes[0])


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(32, 64), (2112, 96)])
def test_packed_weights_drop_out_what_the_weights_do(model_dim, hidden_dim, kernels):
    """The hidden units of the second size are computed in several steps."""
    rows, weights, ends, _ = ffn_inputs([20, 0, 7], model_dim, hidden_dim, FP32)
    packed, outcomes = pack_weights(weights, rows.dtype, "silu", kernels), []
    for each in (packed, weights):
        torch.manual_seed(0)
        outcomes.append(expert_ffn(rows, each, ends, "silu", 0.4, kernels))
    assert_close(outcomes[:1], outcomes[1:], torch.float32)
    plain = expert_ffn(rows, weights, ends, "silu", 0.0, kernels)
    assert (outcomes[0] - plain).abs().max() > 0.1


@pytest.mark.parametrize("kernels", SETS[:1])
def test_packed_weights_are_refused_where_they_would_be_read_as_numbers(kernels):
    rows, weights, ends, _ = ffn_inputs([5, 2], 32, 64, FP32)
    packed = pack_weights(weights, rows.dtype, "silu", kernels)

    def call(x, kernels=kernels):
        return expert_ffn(x, packed, ends, "silu", 0.0, kernels)

    assert call(rows).isfinite().all()
    for of_gradients in (rows.clone().requires_grad_(), packed.b1.requires_grad_()):
        with pytest.raises(ValueError, match=r"packed as torch.int32 are not for gradients"):
            call(rows if of_gradients is packed.b1 else of_gradients)
    with torch.no_grad():
        call(rows)
        for wrong in (
            lambda: call(rows.double()),
            lambda: call(rows, "torch"),
            lambda: torch.func.vmap(call)(rows[None]),
        ):
            with pytest.raises(ValueError, match=r"packed as torch.int32 are not for rows in"):
                wrong()


def test_what_is_not_packed():
    _, weights, _, _ = ffn_inputs([1], 32, 64, FP32, bias=False, gated=False)
    assert pack_weights(weights, torch.float64, "gelu") is None
    assert pack_weights(weights, torch.float32, "gelu", "torch") is None
    assert pack_weights(weights.map(torch.Tensor.bfloat16), torch.bfloat16, "gelu") is None
    part = weights.map(lambda weight: weight[:, :48].contiguous())
    assert pack_weights(part, torch.float32, "gelu") is None
    two_dtypes = weights._replace(w2=weights.w2.bfloat16())
    assert pack_weights(two_dtypes, torch.float32, "gelu") is None


def test_opcheck_of_linear_layers():
    rows, weights, ends, _ = ffn_inputs([0, 7, 5], dtypes=BF16)
    needs, grad = [True, False, True], torch.randn(12, 40).bfloat16()
    arguments = (rows, weights.w1, weights.b1, ends)
    torch.library.opcheck(OPS.expert_linear_backward.default, (grad, needs, *arguments))
    leaves = [tensor.requires_grad_() for tensor in arguments[:3]]
    torch.library.opcheck(OPS.expert_linear.default, (*leaves, ends))


def test_the_plain_form_compiles_without_reading_the_offsets():
    rows, weights, ends, grad = ffn_inputs([3, 0, 6], dtypes=FP32)

    def run(rows, weights):
        return expert_ffn(rows, weights, ends, "silu", 0.0, "torch")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_close(
        outcome(compiled, rows, weights, grad), outcome(run, rows, weights, grad), torch.float32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_compile_chooses_the_kernels_that_run_without_it(dtype):
    """Each call has its own constant, by all arguments. int32 and int16: packed weights."""
    weights = [torch.ones(2, dtype=dtype), torch.ones(2, dtype=torch.int32)]

    def languages(x: torch.Tensor) -> list[str]:
        chosen_here = [chosen(kernels, x).language for kernels in ("auto", "torch")]
        return chosen_here + [
            kernels_for(kernels, weight, dtype, activation).language
            for weight in weights
            for kernels in ("auto", "torch")
            for activation in ("gelu", "an_own_one")
        ]

    compiled = torch.compile(languages, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)) == languages(torch.ones(2))


@each_kind
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_flops_are_counted(kernels, gated):
    case = ffn_inputs([5, 8], 6, 10, FP32, gated=gated)
    with FlopCounterMode(display=False) as counter:
        by_form(kernels, case)
    num_products = 3 if gated else 2
    assert counter.get_total_flops() == 3 * num_products * 2 * 13 * 6 * 10


# F.grouped_mm, the GPU path, runs on a CPU too


@pytest.fixture
def grouped_mm(monkeypatch) -> None:
    monkeypatch.setattr(linear, "_form", lambda rows: grouped)


# 24 x 16 needs no padding in either dtype, 5 x 7 needs it everywhere
@pytest.mark.parametrize("model_dim", [24, 16, 5])
@pytest.mark.parametrize("hidden_dim", [16, 7])
@each_kind
@pytest.mark.usefixtures("grouped_mm")
def test_grouped_mm_equals_the_specification(gated, hidden_dim, model_dim):
    for dtype in (torch.float32, torch.bfloat16):
        for sizes, spare, bias in CASES:
            case = ffn_inputs(
                sizes, model_dim, hidden_dim, (dtype, torch.float32), bias, gated, spare
            )
            assert_close(by_form("torch", case), by_reference(*case), dtype)


def test_grouped_mm_may_leave_anything_for_an_expert_without_rows(monkeypatch):
    """As on a B200, NVIDIA/cutlass issue 2674: a product over no rows is not 0."""
    grouped_mm = F.grouped_mm

    def on_a_b200(a, b, offs):
        out, used = grouped_mm(a, b, offs=offs), offs.diff(prepend=offs.new_zeros(1)) > 0
        return out if b.dim() == 3 else out.masked_fill(~used.view(-1, 1, 1), float("nan"))

    monkeypatch.setattr(F, "grouped_mm", on_a_b200)
    rows, ends = torch.randn(12, 24), torch.tensor([0, 7, 7, 12, 12]).int()
    for found in (grouped.weight_grad(rows, rows, ends), grouped.bias_grad(rows, ends)):
        assert found[[0, 2, 4]].eq(0).all()
        assert found[[1, 3]].ne(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_takes_any_strides(dtype):
    views = (
        lambda x: x[:1].expand_as(x),  # what sum().backward() gives
        lambda x: x[:1, :1].expand_as(x),
        lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],  # rows 4 bytes longer than a multiple of 16
        # starts between two multiples of 16
        lambda x: torch.cat([x[:1, :1].flatten(), x.flatten()])[1:].view_as(x),
    )
    weight, bias = torch.randn(2, 16, 24).to(dtype), torch.randn(2, 16).to(dtype)
    ends = torch.tensor([4, 12]).int()
    for view in views:
        rows, grad = (view(torch.randn(12, n).to(dtype)) for n in (24, 16))
        assert grouped._aligned(rows).data_ptr() % 16 == 0  # a GPU insists on it, a CPU does not
        plain_rows, plain_grad = (
            t.clone(memory_format=torch.contiguous_format) for t in (rows, grad)
        )
        for found, expected in (
            (grouped.linear(rows, weight, bias, ends),
             grouped.linear(plain_rows, weight, bias, ends)),
            (grouped.weight_grad(grad, rows, ends),
             grouped.weight_grad(plain_grad, plain_rows, ends)),
            (grouped.bias_grad(grad, ends), grouped.bias_grad(plain_grad, ends)),
        ):  # fmt: skip
            torch.testing.assert_close(found, expected)
