"""Dispatch of tokens to rows, and their weighted sums: gradients, dtypes, what torch.compile plans
with, and the C++ kernels against the torch ones."""

# T tokens, E experts, K top-k, N rows, M model dim

import pytest
import torch
from ffn_cases import ffn_inputs
from moe_cases import make_layer
from torch.utils.flop_counter import FlopCounterMode

from moe_core.ops import DispatchPlan, combine, dispatch, make_plan
from moe_core.ops.backend import chosen
from moe_core.ops.combine import cpp, reference
from moe_core.ops.combine.op import _language

OPS = torch.ops.moe_core
FP32, BF16 = torch.float32, torch.bfloat16
CPP = "cpp"


def plan_of_7_tokens(top_k: int, capacity: int | None) -> DispatchPlan:
    ids = torch.rand(7, 4, generator=torch.Generator().manual_seed(5)).topk(top_k).indices
    return make_plan(ids, 4, capacity)


def random(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("top_k", "capacity"), [(1, None), (1, 2), (2, 2), (4, None), (2, 0)])
def test_gradcheck(top_k, capacity):
    plan = plan_of_7_tokens(top_k, capacity)
    num_used = int(plan.offsets[-1])
    tokens = random(7, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: dispatch(t, plan)[:num_used], tokens)
    rows = random(len(plan.choices), 3).requires_grad_()
    gates = random(7, top_k).requires_grad_()
    assert torch.autograd.gradcheck(lambda r, g: combine(r, g, plan), (rows, gates))


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, torch.float64)])
def test_combine_returns_the_wider_dtype_and_gradients_of_each_input(dtypes):
    plan = plan_of_7_tokens(2, 2)
    rows = random(len(plan.choices), 3, dtype=dtypes[0]).requires_grad_()
    gates = random(7, 2, dtype=dtypes[1]).requires_grad_()
    out = combine(rows, gates, plan)
    assert out.dtype == dtypes[1]
    torch.testing.assert_close(out, combine(rows.to(dtypes[1]), gates, plan))
    out.sum().backward()
    assert (rows.grad.dtype, gates.grad.dtype) == dtypes


@pytest.mark.parametrize("capacity", [None, 2])
def test_opcheck(capacity):
    if language(FP32) != CPP:
        pytest.skip("this CPU or compiler lacks the instructions")
    choices, _, slots, kept, _ = plan_of_7_tokens(2, capacity)
    shapes = (7, 3), (len(choices), 3), (7, 2)
    tokens, rows, gates = (random(*shape, dtype=FP32) for shape in shapes)
    leaves = [t.clone().requires_grad_() for t in (tokens, rows, gates)]
    plan = (choices, slots, kept, CPP)
    needs = [True, True]
    for op, arguments in (
        (OPS.dispatch_rows, (leaves[0], *plan)),
        (OPS.combine_rows, (*leaves[1:], *plan)),
        (OPS.combine_rows_backward, (tokens, needs, rows, gates, *plan)),
        (OPS.sum_rows, (rows, slots, kept, CPP)),
    ):
        torch.library.opcheck(op.default, arguments)


def test_fake_kernels_give_the_strides_of_real_ones():
    """What torch.compile plans with, also for transposed rows, which an experts module may
    return."""
    if language(FP32) != CPP:
        pytest.skip("this CPU or compiler lacks the instructions")
    choices, _, slots, kept, _ = plan_of_7_tokens(2, 2)
    shapes = (3, len(choices)), (2, 7), (3, 7)
    rows, gates, tokens = (random(*shape, dtype=FP32).t() for shape in shapes)
    of_experts, weights, ends, _ = ffn_inputs([0, 7, 5], dtypes=(FP32, FP32), gated=False)
    of_experts = of_experts.t().contiguous().t()
    order = torch.arange(len(of_experts))
    rest = (order, ends, order.unsqueeze(1), None, None, "gelu", 0.0, False, "auto", CPP)
    for op, inputs in (
        (OPS.combine_rows_backward, (tokens, [True, True], rows, gates, choices, slots, kept, CPP)),
        (OPS.moe_ffn, (of_experts, None, *weights, None, None, None, *rest)),
    ):
        on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs]
        assert [x.stride() for x in op(*on_meta)] == [x.stride() for x in op(*inputs)]


def test_flops_of_a_layer_are_counted():
    layer = make_layer(top_k=2, capacity_factor=0.0)
    x = random(13, 6).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layer(x)[0].sum().backward()
    router, experts = 2 * 13 * 6 * 4, 2 * 2 * 13 * 2 * 6 * 10
    assert counter.get_total_flops() == 3 * (router + experts)  # once forward, twice backward


# C++


def language(dtype: torch.dtype, device: str = "cpu", gate_dtype: torch.dtype = FP32) -> str:
    rows, gates = (torch.empty(1, dtype=d, device=device) for d in (dtype, gate_dtype))
    return _language(chosen("auto", rows), rows, gates)


def case(dtype, top_k: int, capacity: int | None, model_dim: int, num_tokens: int = 60):
    """rows [N, M] with NaN in those that hold no choice, gates [T, K] and the plan."""
    if language(dtype) != CPP:
        pytest.skip("this CPU or compiler lacks the instructions")
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(num_tokens, 4, generator=generator).softmax(1)
    gates, ids = probs.topk(top_k)
    plan = make_plan(ids, 4, capacity)
    rows = torch.randn(len(plan.choices), model_dim, generator=generator).to(dtype)
    rows[plan.offsets[-1] :] = float("nan")
    return rows, gates, plan


# K, capacity, M, T: 3,000 tokens are summed on all threads; a capacity of 32 leaves rows unused
CPP_CASES = [
    (1, None, 37, 60), (1, 9, 64, 60), (2, None, 1, 60), (2, 20, 37, 60), (3, 400, 64, 3000),
    (2, None, 37, 3000), (2, 32, 37, 60),
]  # fmt: skip


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """A sum in fp32 of at most 64 products (64 * 6e-8), rounded to its dtype, by half of its
    spacing at most (bf16: 2^-8)."""
    rtol = 2**-8 + 1e-5 if found.dtype == BF16 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sums_equal_torch_s(dtype):
    for sizes in CPP_CASES:
        rows, gates, plan = case(dtype, *sizes)
        for weights in (gates, None):
            found = cpp.sum_rows(rows, plan.slots, plan.kept, weights)
            exact = reference.sum_rows(
                rows.double(), plan.slots, plan.kept, None if weights is None else gates.double()
            )
            assert found.dtype == reference.sum_rows(rows, plan.slots, plan.kept, weights).dtype
            assert_rounded_once(found, exact)


@pytest.mark.parametrize(("dtype", "grad_dtype"), [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
def test_gradients_equal_torch_s(dtype, grad_dtype):
    for sizes in CPP_CASES:
        rows, gates, plan = case(dtype, *sizes)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(len(gates), rows.shape[1], generator=generator).to(grad_dtype)
        plan_of = (plan.choices, plan.slots, plan.kept)
        found = cpp.combine_rows_backward(grad, rows, gates, *plan_of)
        inputs = [t.double().requires_grad_() for t in (rows, gates)]
        out = reference.sum_rows(inputs[0], plan.slots, plan.kept, inputs[1])
        expected = torch.autograd.grad(out, inputs, grad.double())
        assert [t.dtype for t in found] == [dtype, FP32]
        for a, b in zip(found, expected, strict=True):
            assert_rounded_once(a, b)


def test_rows_that_an_exchange_did_not_bring_back():
    """Those without a choice may be missing at the end."""
    rows, gates, plan = case(FP32, 2, 20, 16)
    used = int(plan.offsets[-1])
    ones, slots, kept = torch.ones(60, 16), plan.slots, plan.kept
    whole = cpp.combine_rows_backward(ones, rows, gates, plan.choices, slots, kept)
    part = cpp.combine_rows_backward(ones, rows[:used], gates, plan.choices[:used], slots, kept)
    assert torch.equal(part[0], whole[0][:used])
    assert torch.equal(part[1], whole[1])


def test_what_is_left_to_torch():
    assert language(torch.float64) == "torch"
    assert language(FP32, gate_dtype=torch.float64) == "torch"
    assert language(FP32, device="meta") == "torch"


def test_capacity_0_gives_no_row_and_zeros():
    rows, gates, plan = case(FP32, 2, 0, 16)
    assert torch.equal(cpp.sum_rows(rows, plan.slots, plan.kept, gates), torch.zeros(60, 16))
    grad_rows, grad_gates = cpp.combine_rows_backward(
        torch.ones(60, 16), rows, gates, plan.choices, plan.slots, plan.kept
    )
    assert grad_rows.shape == (0, 16)
    assert torch.equal(grad_gates, torch.zeros(60, 2))


def test_the_row_of_a_dropped_choice_is_not_read():
    """Its slot is 0, and that row may hold NaN. Nor is its gate."""
    nan = float("nan")
    rows = torch.tensor([[nan], [2.0]], requires_grad=True)
    gates = torch.tensor([[1.0], [nan]], requires_grad=True)
    slots, kept = torch.tensor([[1], [0]]), torch.tensor([[True], [False]])
    out = reference.sum_rows(rows, slots, kept, gates)
    assert out.tolist() == [[2.0], [0.0]]
    found = torch.autograd.grad(out.sum(), (rows, gates))
    assert [t.tolist() for t in found] == [[[0.0], [1.0]], [[2.0], [0.0]]]
