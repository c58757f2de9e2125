"""The C++ kernels that sum rows, against the torch ones, in the dtypes and shapes that a layer
has."""

import pytest
import torch

from moe_core.ops import make_plan
from moe_core.ops.backend import Request, select
from moe_core.ops.combine import cpp, reference

DTYPES = [torch.float32, torch.bfloat16]


def form(dtype: torch.dtype, device: str = "cpu", **dtypes) -> str:
    return select("combine", Request("auto", device, dtype, **dtypes))


def case(
    dtype: torch.dtype, top_k: int, capacity: int | None, model_dim: int, num_tokens: int = 60
):
    """rows [N, M] with NaN in those that hold no choice, gates [T, K] and the plan."""
    if form(dtype) != "combine.cpp":
        pytest.skip("this CPU or compiler lacks the instructions")
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(num_tokens, 4, generator=generator).softmax(1)
    gates, ids = probs.topk(top_k)
    plan = make_plan(ids, 4, capacity)
    rows = torch.randn(len(plan.choices), model_dim, generator=generator).to(dtype)
    rows[plan.offsets[-1] :] = float("nan")
    return rows, gates, plan


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_tokens", [60, 3000])  # on one thread, and on all
@pytest.mark.parametrize(("top_k", "capacity"), [(1, None), (1, 9), (2, None), (2, 20), (3, 400)])
@pytest.mark.parametrize("model_dim", [1, 37, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_equal_torch_s(dtype, model_dim, top_k, capacity, num_tokens, weighted):
    rows, gates, plan = case(dtype, top_k, capacity, model_dim, num_tokens)
    gates = gates if weighted else None
    found = cpp.sum_rows(rows, plan.slots, plan.kept, gates)
    exact = reference.sum_rows(
        rows.double(), plan.slots, plan.kept, None if gates is None else gates.double()
    )
    expected = reference.sum_rows(rows, plan.slots, plan.kept, gates)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, exact.to(found.dtype), rtol=1e-5, atol=1e-6)  # rounded once


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [60, 3000])
@pytest.mark.parametrize(("top_k", "capacity"), [(1, None), (1, 9), (2, None), (2, 20), (3, 400)])
@pytest.mark.parametrize("model_dim", [1, 37, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_equal_torch_s(dtype, model_dim, top_k, capacity, num_tokens, grad_dtype):
    rows, gates, plan = case(dtype, top_k, capacity, model_dim, num_tokens)
    grad = torch.randn(num_tokens, model_dim, generator=torch.Generator().manual_seed(1)).to(
        grad_dtype
    )
    if form(dtype, grad_dtype=grad_dtype) != "combine.cpp":
        assert (dtype, grad_dtype) == (torch.float32, torch.bfloat16)
        return
    plan_of = (plan.choices, plan.slots, plan.kept)
    found = cpp.combine_rows_backward(grad, rows, gates, *plan_of)
    expected = reference.combine_rows_backward(
        grad.double(), rows.double(), gates.double(), *plan_of
    )
    assert [t.dtype for t in found] == [dtype, torch.float32]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)


def test_rows_that_an_exchange_did_not_bring_back():
    """Those without a choice may be missing at the end."""
    rows, gates, plan = case(torch.float32, 2, 20, 16)
    used = int(plan.offsets[-1])
    whole = cpp.combine_rows_backward(
        torch.ones(60, 16), rows, gates, plan.choices, plan.slots, plan.kept
    )
    cut = (torch.ones(60, 16), rows[:used], gates, plan.choices[:used], plan.slots, plan.kept)
    part = cpp.combine_rows_backward(*cut)
    assert torch.equal(part[0], whole[0][:used])
    assert torch.equal(part[1], whole[1])


def test_what_is_left_to_torch():
    assert form(torch.float64) == "combine.reference"
    assert form(torch.float32, gate_dtype=torch.float64) == "combine.reference"
    assert form(torch.float32, device="meta") == "combine.reference"


def test_capacity_0_gives_no_row_and_zeros():
    rows, gates, plan = case(torch.float32, 2, 0, 16)
    assert torch.equal(cpp.sum_rows(rows, plan.slots, plan.kept, gates), torch.zeros(60, 16))
    grad_rows, grad_gates = cpp.combine_rows_backward(
        torch.ones(60, 16), rows, gates, plan.choices, plan.slots, plan.kept
    )
    assert grad_rows.shape == (0, 16)
    assert torch.equal(grad_gates, torch.zeros(60, 2))
