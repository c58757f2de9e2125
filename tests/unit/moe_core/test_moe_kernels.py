"""Each custom op against plain torch: outputs, gradients, fake kernels, and the GPU kernels where
they run on a CPU."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import pytest
import torch
from moe_cases import expert_ffn, make_layer
from torch.utils.flop_counter import FlopCounterMode

from moe_core.ops import DispatchPlan, combine, dispatch, make_plan
from moe_core.ops.ffn import grouped, reference
from moe_core.ops.ffn.grouped import _aligned, group_sum, grouped_linear, grouped_weight_grad
from moe_core.ops.ffn.inputs import FFNInputs
from moe_core.ops.native import library

OPS = torch.ops.moe_core
DTYPES = {  # of rows and of weights; the last pair as under autocast
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
# of the largest value
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}
# Where the rows of each expert end: empty experts at the start, in the middle and at the end.
ENDS = {"even": [4, 8, 12], "empty": [0, 7, 7, 12, 12], "one": [12], "none": [0, 0]}


@pytest.fixture(params=["this CPU's", "loop"])
def kernel(request, monkeypatch):
    """The experts' kernel that is chosen on this CPU, and the one for any other."""
    if request.param == "loop":
        monkeypatch.setattr(library, "usable", lambda dtype, kernels="auto": False)


def random(*shape: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def ffn_inputs(
    ends,
    num_rows=12,
    dtype=torch.float64,
    weight_dtype=torch.float64,
    model_dim=5,
    hidden_dim=7,
    with_bias=True,
):
    """rows [N, M], the weights w1, b1, w2, b2, offsets, and a gradient of the output [N, M]."""
    matrix = (len(ends), hidden_dim, model_dim)
    shapes = [matrix, matrix[:2], matrix, (len(ends), model_dim)]
    weights = [random(*shape, dtype=weight_dtype, seed=1 + i) for i, shape in enumerate(shapes)]
    if not with_bias:
        weights[1] = weights[3] = None
    rows, grad = (random(num_rows, model_dim, dtype=dtype, seed=seed) for seed in (0, 9))
    return rows, weights, torch.tensor(ends, dtype=torch.int32), grad


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def outcome(function, rows, weights, offsets, grad=None, num_used=None) -> tuple[torch.Tensor, ...]:
    """The output and, for a gradient of its first `num_used` rows, the gradients of all that is
    there."""
    rows, *weights = (None if t is None else t.detach().requires_grad_() for t in (rows, *weights))
    out = function(rows, *weights, offsets)
    if grad is None:
        return (out,)
    inputs = [t for t in (rows, *weights) if t is not None]
    used = slice(offsets[-1] if num_used is None else num_used)
    return out, *torch.autograd.grad(out[used], inputs, grad[used], materialize_grads=True)


def assert_close(found, expected, num_used: int, dtype: torch.dtype) -> None:
    """Output, gradient of the rows, gradients of weights; of the first two the used rows alone
    count."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        a, b = (a[:num_used], b[:num_used]) if i < 2 else (a, b)
        largest = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0, atol=TOLERANCES[dtype] * max(largest, 1e-30)
        )


def plan_inputs(top_k: int, capacity: int | None) -> DispatchPlan:
    """Of 7 tokens over 4 experts."""
    ids = torch.rand(7, 4, generator=torch.Generator().manual_seed(5)).topk(top_k).indices
    return make_plan(ids, 4, capacity)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("num_rows", [12, 15])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_expert_ffn_equals_reference(dtypes, with_bias, num_rows, ends):
    rows, weights, offsets, grad = ffn_inputs(ends, num_rows, *dtypes, with_bias=with_bias)
    out, *gradients = outcome(expert_ffn, rows, weights, offsets, grad)
    assert (out.dtype, [g.dtype for g in gradients]) == (
        rows.dtype,
        [t.dtype for t in (rows, *weights) if t is not None],
    )
    expected = outcome(
        reference.expert_ffn, rows.double(), [double(w) for w in weights], offsets, grad.double()
    )
    assert_close((out, *gradients), expected, ends[-1], rows.dtype)


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_gradcheck_expert_ffn(activation):
    rows, weights, offsets, _ = ffn_inputs([2, 2, 5], 5, model_dim=3, hidden_dim=2)
    inputs = [t.requires_grad_() for t in (rows, *weights)]
    assert torch.autograd.gradcheck(
        lambda *inputs: expert_ffn(*inputs, offsets, activation), inputs
    )


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "sizes", [[37, 0, 70, 3], [16, 16, 16, 16], [1, 1, 1, 1], [0, 0, 0, 90]], ids=str
)
@pytest.mark.parametrize("spare", [0, 40])
def test_expert_ffn_in_half_precision_computes_on_tiles_of_rows(spare, sizes):
    """Groups are rounded up into the next ones' rows and past the last one, where NaN may lie."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows, weights, offsets, grad = ffn_inputs(
        ends, ends[-1] + spare, torch.bfloat16, torch.float32, 24, 32
    )
    rows[ends[-1] :], grad[ends[-1] :] = float("nan"), float("nan")
    found = outcome(expert_ffn, rows, weights, offsets, grad)
    assert all(t.isfinite().all() for t in found)
    expected = outcome(
        reference.expert_ffn, rows.double(), [w.double() for w in weights], offsets, grad.double()
    )
    assert_close(found, expected, ends[-1], torch.bfloat16)


@pytest.mark.usefixtures("kernel")
def test_expert_ffn_takes_an_expanded_gradient_and_other_strides():
    rows, weights, offsets, _ = ffn_inputs([4, 12], 12)
    expected = outcome(expert_ffn, rows, weights, offsets, torch.ones_like(rows))
    grad = torch.ones(1, 1, dtype=rows.dtype).expand_as(rows)
    transposed = [w.transpose(0, 1).contiguous().transpose(0, 1) for w in weights]
    torch.testing.assert_close(
        outcome(expert_ffn, rows.t().contiguous().t(), transposed, offsets, grad), expected
    )


@pytest.mark.usefixtures("kernel")
def test_expert_ffn_gives_no_gradient_where_none_is_wanted():
    rows, weights, offsets, grad = ffn_inputs([4, 12], 12)
    expected = outcome(expert_ffn, rows, weights, offsets, grad)
    for wanted in range(5):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((rows, *weights))]
        expert_ffn(*inputs, offsets).backward(grad)
        torch.testing.assert_close(inputs[wanted].grad, expected[1 + wanted])
        assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_zeroes_its_share_and_keeps_the_mean(share, dtypes):
    """Seen through experts that pass every activation on: w1 = w2 = 1, no bias, relu of ones."""
    rows = torch.eye(64).repeat(10, 1).to(dtypes[0]).requires_grad_()
    w = torch.eye(64).expand(2, 64, 64).contiguous().to(dtypes[1])
    torch.manual_seed(0)
    out = expert_ffn(
        rows, w, None, w, None, torch.tensor([300, 640], dtype=torch.int32), "relu", share
    )
    kept = out[rows.detach().bool()]
    scale = 1 / (1 - round(share * 65536) / 65536)
    assert set(kept.tolist()) == {0.0, torch.tensor(scale, dtype=dtypes[0]).item()}
    assert abs((kept == 0).float().mean().item() - share) < 4 * (share * (1 - share) / 640) ** 0.5
    out.sum().backward()  # the gradient of x_ii is the factor that y_ii got
    torch.testing.assert_close(rows.grad[rows.detach().bool()], kept)


def test_gradcheck_dropout():
    rows, weights, offsets, _ = ffn_inputs([2, 2, 5], 5, model_dim=3, hidden_dim=4)
    noise = OPS.dropout_noise(rows, weights[0], "gelu", "auto")
    inputs = [t.requires_grad_() for t in (rows, *weights)]
    settings = (None, None, offsets, noise, "gelu", 0.4, "auto", True)
    assert torch.autograd.gradcheck(lambda *i: OPS.expert_ffn(*i, *settings)[0], inputs)


def test_dropout_noise_is_even_and_follows_the_seed():
    rows, w1 = torch.empty(1000, 2), torch.empty(1, 32, 2)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(OPS.dropout_noise(rows, w1, "gelu", "auto"))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    lanes = draws[0].view(-1, 4).double()  # of one number of the generator
    assert (lanes.mean(0).abs() < 1000).all()
    assert ((lanes < 0).double().mean(0) - 0.5).abs().max() < 0.03


@pytest.mark.parametrize("capacity", [None, 2, 0])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_gradcheck_dispatch_and_combine(top_k, capacity):
    plan = plan_inputs(top_k, capacity)
    num_used = int(plan.offsets[-1])
    tokens = random(7, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: dispatch(t, plan)[:num_used], tokens)
    rows = random(len(plan.choices), 3).requires_grad_()
    gates = random(7, top_k).requires_grad_()
    assert torch.autograd.gradcheck(lambda r, g: combine(r, g, plan), (rows, gates))


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_combine_returns_the_wider_dtype_and_gradients_of_each_input(dtypes):
    plan = plan_inputs(2, 2)
    rows = random(len(plan.choices), 3, dtype=dtypes[0]).requires_grad_()
    gates = random(7, 2, dtype=dtypes[1]).requires_grad_()
    out = combine(rows, gates, plan)
    assert out.dtype == dtypes[1]
    torch.testing.assert_close(out, combine(rows.to(dtypes[1]), gates, plan))
    out.sum().backward()
    assert (rows.grad.dtype, gates.grad.dtype) == dtypes


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(
    "op", ["dispatch_rows", "combine_rows", "combine_rows_backward", "sum_rows"]
)
def test_opcheck_rows(op, top_k, capacity):
    plan = plan_inputs(top_k, capacity)
    choices, slots, kept = plan.choices, plan.slots, plan.kept
    tokens, gates = random(7, 3).requires_grad_(), random(7, top_k).requires_grad_()
    rows = random(len(choices), 3).requires_grad_()
    arguments = {
        "dispatch_rows": (tokens, choices, slots, kept),
        "combine_rows": (rows, gates, choices, slots, kept),
        "combine_rows_backward": (
            tokens.detach(),
            rows.detach(),
            gates.detach(),
            choices,
            slots,
            kept,
        ),
        "sum_rows": (rows.detach(), slots, kept, gates.detach()),
    }
    torch.library.opcheck(getattr(OPS, op).default, (*arguments[op], "auto"))


def test_fake_kernels_give_the_strides_of_real_ones():
    """What torch.compile plans with, also for transposed rows, which an experts module may
    return."""
    plan = plan_inputs(2, 2)
    choices, slots, kept = plan.choices, plan.slots, plan.kept
    rows, gates, tokens = random(3, len(choices)).t(), random(2, 7).t(), random(7, 3)
    of_experts, weights, offsets, _ = ffn_inputs([0, 7, 12])
    settings = (None, None, offsets, None, "gelu", 0.0, "auto", False)
    for op, inputs in (
        (OPS.combine_rows_backward, (tokens, rows, gates, choices, slots, kept, "auto")),
        (
            OPS.expert_ffn,
            (of_experts.t().contiguous().t(), *weights, *settings),
        ),
    ):
        real, fake = (
            op(*inputs),
            op(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in inputs)),
        )
        assert [x.stride() for x in fake] == [x.stride() for x in real]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("op", ["expert_ffn", "expert_ffn_backward"])
def test_opcheck_ffn(op, dtypes):
    rows, weights, offsets, grad = ffn_inputs([0, 7, 12], 12, *dtypes)
    noise = OPS.dropout_noise(rows, weights[0], "gelu", "auto")
    settings = (None, None, offsets, noise, "gelu", 0.5, "auto")
    hidden = OPS.expert_ffn(rows, *weights, *settings, True)[1]
    needs = [True, False, True, True, False, False, False]
    arguments = {
        "expert_ffn_backward": (grad, hidden, needs, rows, *weights, *settings),
        "expert_ffn": (
            rows.detach().requires_grad_(),
            *(w.detach().requires_grad_() for w in weights),
            *settings,
            True,
        ),
    }
    torch.library.opcheck(getattr(OPS, op).default, arguments[op])


# F.grouped_mm, the GPU path, runs on a CPU too. 24 x 16 needs no padding in either dtype; 5 x 7
# needs it everywhere.
SIZES = {"aligned": (24, 16), "odd": (5, 7), "odd-out": (16, 7), "odd-in": (5, 16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("ends", "num_rows"), [([4, 8, 12], 12), ([0, 7, 7, 12, 12], 15), ([3], 5), ([0, 0], 0)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_grouped_mm_path_equals_reference(with_bias, ends, num_rows, sizes, dtype):
    rows, weights, offsets, grad = ffn_inputs(
        ends, num_rows, dtype, torch.float32, *sizes, with_bias=with_bias
    )
    rows[ends[-1] :], grad[ends[-1] :] = float("nan"), float("nan")  # belongs to nobody
    expected = outcome(
        reference.expert_ffn,
        rows.double(),
        [double(w) for w in weights],
        offsets,
        grad.double(),
        ends[-1],
    )
    inputs = FFNInputs(rows, *weights, None, None, offsets, None, "gelu", 0.0, "auto")
    out, hidden = grouped.forward(inputs, True)
    assert (out.shape, out.dtype, out.is_contiguous()) == (rows.shape, dtype, True)
    needs = [t is not None for t in (rows, *weights, None, None)]
    gradients = grouped.backward(inputs, grad, hidden, needs)
    assert_close((out, *(g for g in gradients if g is not None)), expected, ends[-1], dtype)


def test_grouped_mm_may_leave_anything_for_an_expert_without_rows(monkeypatch):
    """As on a B200, NVIDIA/cutlass issue 2674: a product over no rows is not 0."""
    grouped_mm = torch.nn.functional.grouped_mm

    def on_a_b200(a, b, offs):
        out, used = grouped_mm(a, b, offs=offs), offs.diff(prepend=offs.new_zeros(1)) > 0
        return out if b.dim() == 3 else out.masked_fill(~used.view(-1, 1, 1), float("nan"))

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", on_a_b200)
    rows, offsets = random(12, 24, dtype=torch.float32), torch.tensor(ENDS["empty"]).int()
    for found in (grouped_weight_grad(rows, rows, offsets), group_sum(rows, offsets)):
        assert found[[0, 2, 4]].eq(0).all()
        assert found[[1, 3]].ne(0).all()


def test_grouped_mm_path_drops_alike_in_both_directions():
    rows, weights, offsets, grad = ffn_inputs([4, 12], 12, torch.float32, torch.float32, 24, 16)
    noise = torch.randint(-32768, 32768, (12 * 16,), dtype=torch.int16)
    inputs = FFNInputs(rows, *weights, None, None, offsets, noise, "gelu", 0.25, "auto")
    out, hidden = grouped.forward(inputs, True)
    gradients = grouped.backward(inputs, grad, hidden, [True] * 5 + [False] * 2)
    found = (out, *gradients[:5])
    kept = (noise >= 16384 - 32768).view(12, 16) / 0.75
    inputs = [t.double().requires_grad_() for t in (rows, *weights)]
    expected = reference.expert_ffn(*inputs, offsets, kept=kept.double())
    expected = (expected, *torch.autograd.grad(expected, inputs, grad.double()))
    assert_close(found, expected, 12, torch.float32)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:1].expand_as(x),  # what sum().backward() gives
        lambda x: x[:1, :1].expand_as(x),
        lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],  # rows 4 bytes longer than a multiple of 16
        # starts between two multiples of 16
        lambda x: torch.cat([x[:1, :1].flatten(), x.flatten()])[1:].view_as(x),
    ],
    ids=["expanded-rows", "expanded", "row-stride", "start"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_path_takes_any_strides(dtype, view):
    weight, bias, offsets = (
        random(2, 16, 24, dtype=dtype),
        random(2, 16, dtype=dtype),
        torch.tensor([4, 12]).int(),
    )
    rows, grad = view(random(12, 24, dtype=dtype)), view(random(12, 16, dtype=dtype))
    assert _aligned(rows).data_ptr() % 16 == 0  # a GPU insists on it, a CPU does not
    plain = [t.clone(memory_format=torch.contiguous_format) for t in (rows, grad)]
    for function, inputs in (
        (grouped_linear, lambda r, g: (r, weight, bias, offsets)),
        (grouped_weight_grad, lambda r, g: (g, r, offsets)),
        (group_sum, lambda r, g: (g, offsets)),
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
