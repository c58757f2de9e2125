"""Each custom op against plain torch: outputs, gradients, fake kernels, and the GPU kernels where they run on a CPU."""

# T tokens, E experts, K top-k, N rows, I input features, O output features, M model dim

import pytest
import torch
from moe_cases import make_layer
from torch.utils.flop_counter import FlopCounterMode

from moe_core.dispatch import make_plan
from moe_core.kernels import combine_rows, dispatch_rows, grouped_linear, reference
from moe_core.kernels.grouped import (
    _aligned,
    group_sum_by_grouped_mm,
    grouped_linear_by_grouped_mm,
    grouped_weight_grad_by_grouped_mm,
)

OPS = torch.ops.moe_core
LAYOUTS = ["plain", "transposed"]
# Where the rows of each expert end: empty experts at the start, in the middle and at the end.
ENDS = {"even": [4, 8, 12], "empty": [0, 7, 7, 12, 12], "one": [12], "none": [0, 0]}


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_inputs(ends, num_rows=12, in_features=5, out_features=7, layout="plain", dtype=torch.float64):
    """rows, weight [E, O, I] in the wanted layout, bias, offsets."""
    weight = random(len(ends), out_features, in_features, dtype=dtype, seed=1)
    if layout == "transposed":
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    bias = random(len(ends), out_features, dtype=dtype, seed=2)
    return random(num_rows, in_features, dtype=dtype), weight, bias, torch.tensor(ends, dtype=torch.int32)


def plan_inputs(top_k: int, capacity: int | None):
    """choices, slots, kept of 7 tokens over 4 experts."""
    ids = torch.rand(7, 4, generator=torch.Generator().manual_seed(5)).topk(top_k).indices
    plan = make_plan(ids, 4, capacity)
    return plan.choices, plan.slots, plan.kept


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("num_rows", [12, 15])
@pytest.mark.parametrize("with_bias", [True, False])
def test_grouped_linear_equals_reference(with_bias, num_rows, ends, layout):
    rows, weight, bias, offsets = linear_inputs(ends, num_rows, layout=layout)
    inputs = [t.requires_grad_() for t in ((rows, weight, bias) if with_bias else (rows, weight))]
    outcomes = []
    for function in (grouped_linear, reference.grouped_linear):
        out = function(rows, weight, bias if with_bias else None, offsets)[: ends[-1]]
        gradients = torch.autograd.grad(out.sin().sum(), inputs, materialize_grads=True)
        outcomes.append((out, *gradients))
    torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_weight_gradient_has_the_layout_of_the_weight(ends, layout):
    rows, weight, _, offsets = linear_inputs(ends, layout=layout)
    grad = OPS.grouped_weight_grad(random(12, 7), rows, weight, offsets)
    assert grad.stride() == weight.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_grouped_linear(layout):
    rows, weight, bias, offsets = linear_inputs([2, 2, 5], 5, 3, 2, layout)
    inputs = [t.requires_grad_() for t in (rows, weight, bias)]
    assert torch.autograd.gradcheck(lambda *inputs: grouped_linear(*inputs, offsets), inputs)


@pytest.mark.parametrize("capacity", [None, 2, 0])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_gradcheck_dispatch_and_combine(top_k, capacity):
    choices, slots, kept = plan_inputs(top_k, capacity)
    num_used = len(choices) if kept is None else int(kept.sum())
    tokens = random(7, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: dispatch_rows(t, choices, slots, kept)[:num_used], tokens)
    rows, gates = random(len(choices), 3).requires_grad_(), random(7, top_k).requires_grad_()
    assert torch.autograd.gradcheck(lambda r, g: combine_rows(r, g, choices, slots, kept), (rows, gates))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_combine_returns_the_wider_dtype_and_gradients_of_each_input(dtypes):
    choices, slots, kept = plan_inputs(2, 2)
    rows, gates = random(len(choices), 3, dtype=dtypes[0]).requires_grad_(), random(7, 2, dtype=dtypes[1])
    out = combine_rows(rows, gates.requires_grad_(), choices, slots, kept)
    assert out.dtype == dtypes[1]
    torch.testing.assert_close(out, combine_rows(rows.to(dtypes[1]), gates, choices, slots, kept))
    out.sum().backward()
    assert (rows.grad.dtype, gates.grad.dtype) == dtypes


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("op", ["dispatch_rows", "combine_rows", "combine_rows_backward", "sum_rows"])
def test_opcheck_rows(op, top_k, capacity):
    choices, slots, kept = plan_inputs(top_k, capacity)
    tokens, gates = random(7, 3).requires_grad_(), random(7, top_k).requires_grad_()
    rows = random(len(choices), 3).requires_grad_()
    arguments = {
        "dispatch_rows": (tokens, choices, slots, kept),
        "combine_rows": (rows, gates, choices, slots, kept),
        "combine_rows_backward": (tokens.detach(), rows.detach(), gates.detach(), choices, slots, kept),
        "sum_rows": (rows.detach(), slots, kept, gates.detach()),
    }
    torch.library.opcheck(getattr(OPS, op).default, arguments[op])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["grouped_linear", "grouped_weight_grad", "group_sum"])
def test_opcheck_grouped(op, layout):
    rows, weight, bias, offsets = linear_inputs([0, 7, 12], layout=layout)
    arguments = {
        "grouped_linear": (rows.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), offsets),
        "grouped_weight_grad": (random(12, 7), rows.detach(), weight.detach(), offsets),
        "group_sum": (rows.detach(), offsets),
    }
    torch.library.opcheck(getattr(OPS, op).default, arguments[op])


# F.grouped_mm, the GPU path, runs on a CPU too. 24 x 16 needs no padding in either dtype; 5 x 7 needs it everywhere.
SIZES = {"aligned": (24, 16), "odd": (5, 7), "odd-out": (16, 7), "odd-in": (5, 16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ends", "num_rows"), [([4, 8, 12], 12), ([0, 7, 7, 12, 12], 15), ([3], 5), ([0, 0], 0)])
def test_grouped_mm_path_equals_reference(ends, num_rows, layout, sizes, dtype):
    rows, weight, bias, offsets = linear_inputs(ends, num_rows, *sizes, layout, dtype)
    grad = random(num_rows, sizes[1], dtype=dtype, seed=3)
    rows[ends[-1] :], grad[ends[-1] :] = float("nan"), float("nan")  # belongs to nobody
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    inputs = [t.float().requires_grad_() for t in (rows, weight, bias)]
    expected = reference.grouped_linear(*inputs, offsets)[: ends[-1]]
    expected_grads = torch.autograd.grad(expected, inputs, grad.float()[: ends[-1]])

    for b in (bias, None):
        out = grouped_linear_by_grouped_mm(rows, weight, b, offsets)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((num_rows, sizes[1]), dtype, True)
        plain = reference.grouped_linear(inputs[0], inputs[1], None if b is None else inputs[2], offsets)
        torch.testing.assert_close(out.float()[: ends[-1]], plain[: ends[-1]], **tolerance)
    grad_rows = grouped_linear_by_grouped_mm(grad, weight.transpose(1, 2), None, offsets)
    grad_weight = grouped_weight_grad_by_grouped_mm(grad, rows, weight, offsets)
    assert (grad_weight if layout == "plain" else grad_weight.transpose(1, 2)).is_contiguous()
    got = (grad_rows[: ends[-1]], grad_weight, group_sum_by_grouped_mm(grad, offsets))
    expected_grads = (expected_grads[0][: ends[-1]], *expected_grads[1:])
    torch.testing.assert_close([g.float() for g in got], list(expected_grads), **tolerance)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:1].expand_as(x),  # what sum().backward() gives
        lambda x: x[:1, :1].expand_as(x),
        lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],  # rows 4 bytes longer than a multiple of 16
        lambda x: torch.cat([x[:1, :1].flatten(), x.flatten()])[1:].view_as(x),  # starts between two multiples of 16
    ],
    ids=["expanded-rows", "expanded", "row-stride", "start"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_path_takes_any_strides(dtype, view):
    rows, weight, bias, offsets = linear_inputs([4, 12], 12, 24, 16, dtype=dtype)
    rows, grad = view(rows), view(random(12, 16, dtype=dtype))
    assert _aligned(rows).data_ptr() % 16 == 0  # a GPU insists on it, a CPU does not
    plain = [t.clone(memory_format=torch.contiguous_format) for t in (rows, grad)]
    for function, inputs in (
        (grouped_linear_by_grouped_mm, lambda r, g: (r, weight, bias, offsets)),
        (grouped_weight_grad_by_grouped_mm, lambda r, g: (g, r, weight, offsets)),
        (group_sum_by_grouped_mm, lambda r, g: (g, offsets)),
    ):
        torch.testing.assert_close(function(*inputs(rows, grad)), function(*inputs(*plain)))


@pytest.mark.parametrize("top_k", [1, 2])
def test_flops_are_counted(top_k):
    layer = make_layer(top_k=top_k, capacity_factor=0.0)
    x = random(13, 6).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layer(x)[0].sum().backward()
    router, experts = 2 * 13 * 6 * 4, 2 * 2 * 13 * top_k * 6 * 10
    assert counter.get_total_flops() == 3 * (router + experts)  # once forward, twice backward
