"""The C++ kernels that sum rows, against the torch ones, in the dtypes and shapes that a layer
has."""

import pytest
import torch

from moe_core.ops import make_plan
from moe_core.kernels import rows as torch_kernels
from moe_core.kernels import rows_x86

DTYPES = [torch.float32, torch.bfloat16]


def case(
    dtype: torch.dtype, top_k: int, capacity: int | None, model_dim: int, num_tokens: int = 60
):
    """rows [N, M] with NaN in those that hold no choice, gates [T, K] and the plan."""
    if not rows_x86.sums(torch.empty(1, 1, dtype=dtype), None):
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
    found = rows_x86.sum_rows(rows, plan.slots, plan.kept, gates)
    exact = torch_kernels._sum_rows_by_torch(
        rows.double(), plan.slots, plan.kept, None if gates is None else gates.double()
    )
    expected = torch_kernels._sum_rows_by_torch(rows, plan.slots, plan.kept, gates)
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
    if not rows_x86.differentiates(grad, rows, gates):
        assert (dtype, grad_dtype) == (torch.float32, torch.bfloat16)
        return
    plan_of = (plan.choices, plan.slots, plan.kept)
    found = rows_x86.combine_rows_backward(grad, rows, gates, *plan_of)
    expected = torch_kernels._combine_rows_backward_by_torch(
        grad.double(), rows.double(), gates.double(), *plan_of
    )
    assert [t.dtype for t in found] == [dtype, torch.float32]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)


def test_rows_that_an_exchange_did_not_bring_back():
    """Those without a choice may be missing at the end."""
    rows, gates, plan = case(torch.float32, 2, 20, 16)
    used = int(plan.offsets[-1])
    whole = rows_x86.combine_rows_backward(
        torch.ones(60, 16), rows, gates, plan.choices, plan.slots, plan.kept
    )
    cut = (torch.ones(60, 16), rows[:used], gates, plan.choices[:used], plan.slots, plan.kept)
    part = rows_x86.combine_rows_backward(*cut)
    assert torch.equal(part[0], whole[0][:used])
    assert torch.equal(part[1], whole[1])


def test_what_is_left_to_torch():
    rows = torch.zeros(2, 3)
    assert not rows_x86.sums(rows.double(), None)
    assert not rows_x86.sums(rows, torch.zeros(2, 1, dtype=torch.float64))
    assert not rows_x86.sums(rows[:0], None)  # capacity 0
    assert not rows_x86.sums(rows.to("meta"), None)
