"""The experts' networks from tokens to tokens in one C++ operation, against the specification in
fp64: values, gradients, threads, memory, damaged plans, and the calls that take another form."""

# T tokens, E experts, K top-k, C capacity, N rows, M model dim, H hidden dim

import pytest
import torch
from ffn_cases import FP32, MoECase, assert_close, ffn_inputs, random_moe_case
from torch.utils.flop_counter import FlopCounterMode

from moe_core import MoEConfig, MoELayer, prepared
from moe_core.ops import ExpertWeights, expert_ffn, moe_ffn, pack_weights
from moe_core.ops.ffn import cpp as fused
from moe_core.ops.ffn.inputs import MoEFFNInputs, hidden_rows
from moe_core.ops.native import library
from moe_core.ops.native.instruction_sets import sets_of_cpu
from moe_core.registry import ACTIVATIONS

pytestmark = pytest.mark.skipif(
    library.chosen() is None, reason="this CPU or compiler lacks the instructions"
)
OPS = torch.ops.moe_core
SETS = [known.name for known in sets_of_cpu()] or ["auto"]
# What differs from Case's own arguments. A range of tokens is divided by experts (Cells in
# ops/native/ffn.cpp); with few experts there are more ranges, of at least 64 tokens.
CASES = {
    "odd widths": {"num_tokens": 33, "model_dim": 17, "hidden_dim": 23, "gated": True},
    "one row": {"num_tokens": 1, "top_k": 1, "model_dim": 1, "hidden_dim": 1},
    "whole vectors": {"num_tokens": 64, "model_dim": 32, "hidden_dim": 48},
    "rows in two parts": {
        "num_tokens": 700, "num_experts": 16, "top_k": 1, "model_dim": 8, "hidden_dim": 18,
        "skewed": True, "gated": True,
    },
    "ranges of few experts": {"num_tokens": 200, "num_experts": 2},
    "ranges of many rows": {
        "num_tokens": 1100, "num_experts": 16, "top_k": 8, "model_dim": 256, "hidden_dim": 3,
    },
    "hidden units in steps": {"num_tokens": 20, "model_dim": 2100, "hidden_dim": 70, "gated": True},
    "many small rows": {
        "num_tokens": 2100, "num_experts": 9, "top_k": 8, "model_dim": 3, "hidden_dim": 2,
    },
    "one expert": {"num_tokens": 70, "num_experts": 1, "top_k": 1},
    "idle experts": {"num_tokens": 5, "num_experts": 16, "top_k": 1, "gated": True},
    "all to one": {"num_tokens": 90, "top_k": 1, "skewed": True},
    "drops": {"num_tokens": 130, "capacity": 9, "gated": True},
    "drops by priority": {"num_tokens": 130, "capacity": 9, "by_priority": True},
    "one choice of each": {  # some experts have none in the first range
        "num_tokens": 130, "num_experts": 8, "top_k": 1, "capacity": 1, "by_priority": True,
    },
    "top-8": {"num_tokens": 30, "num_experts": 11, "top_k": 8, "capacity": 12},
    "no bias": {"bias": False, "gated": True},
    "no gates": {"num_tokens": 90, "top_k": 1, "gates": False},
    "no tokens": {"num_tokens": 0, "gated": True},
    "none kept": {"capacity": 0, "gated": True},
    # two kept rows in each of 32 pieces, if ranges did not depend on the kept rows
    "most dropped": {
        "num_tokens": 8192, "num_experts": 2, "top_k": 1, "capacity": 32, "by_priority": True,
        "model_dim": 256, "hidden_dim": 2,
    },
}  # fmt: skip
FEW = ["odd widths", "rows in two parts", "hidden units in steps", "drops"]
HALF = torch.bfloat16
DTYPES = [torch.float32, HALF]
THREADED = ["rows in two parts", "ranges of few experts", "ranges of many rows", "many small rows"]


def skip_without(dtype: torch.dtype, kernels: str = "auto") -> None:
    if library.chosen(kernels) is None:
        pytest.skip("this CPU or compiler lacks the instructions")
    if dtype == HALF and library.packed_dtype(dtype, kernels) != torch.int16:
        pytest.skip("these instructions have no products of bf16")


class Case(MoECase):
    def op_inputs(self, keep_hidden=True, **changes) -> MoEFFNInputs:
        choices, offsets, slots, kept, _ = self.plan
        rest = (choices, offsets, slots, kept, None, self.activation, 0.0, keep_hidden)
        casts = (None, None, None)
        arguments = (self.tokens, self.gates, *self.weights, *casts, *rest, "auto", "cpp")
        return MoEFFNInputs(*arguments)._replace(**changes)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The passes that the operation has computed."""
    called = []

    def counted(name):
        function = getattr(fused, name)

        def run(*arguments):
            called.append(name)
            return function(*arguments)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(fused, name, counted(name))
    return called


@pytest.fixture
def guarded(monkeypatch):
    """Memory that the operation allocates is followed by bytes that it must leave alone."""
    ends = []

    def empty(shape, dtype, device):
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((size + (1 << 16),), 0x5A, dtype=torch.uint8)
        ends.append(memory[size:])
        return memory[:size].view(dtype).view(shape)

    monkeypatch.setattr(fused, "empty", empty)
    yield
    assert all(end.eq(0x5A).all() for end in ends)


@pytest.fixture
def threads():
    """Sets the number of threads; that of before comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# 1. Values and gradients


@pytest.mark.parametrize(
    ("kernels", "name"),
    [(SETS[0], name) for name in CASES] + [(kernels, name) for kernels in SETS[1:] for name in FEW],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("guarded")
def test_it_equals_the_specification(kernels, name, dtype, calls):
    skip_without(dtype, kernels)
    Case(**CASES[name]).in_dtype(dtype).assert_equals_the_specification(kernels)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize(
    ("activation", "gated"),
    [("relu", False), ("silu", False), ("gelu", True), ("relu", True), ("clamped_swiglu", True)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(activation, gated, dtype, calls):
    skip_without(dtype)
    case = Case(33, gated=gated).in_dtype(dtype)
    if dtype == HALF and activation in ("relu", "clamped_swiglu"):
        # A product beside a place where the slope jumps may round to the other side.
        out = case.run(case.tensors(), activation=activation)
        doubles = [tensor.double() for tensor in case.tensors()]
        case.assert_close([out], [case.run(doubles, "torch", activation=activation)])
        return
    case.tokens *= 4  # beyond the limits of the clamped one
    case.assert_equals_the_specification(activation=activation)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("guarded")
def test_any_sizes(dtype, calls):
    skip_without(dtype)
    for seed in range(80):
        random_moe_case(seed, most_tokens=130).in_dtype(dtype).assert_equals_the_specification()
    assert calls == ["forward", "backward"] * 80


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", THREADED)
def test_the_number_of_threads_changes_no_bit(name, dtype, threads):
    skip_without(dtype)
    case, outcomes = Case(**CASES[name]).in_dtype(dtype), []
    for count in (1, 2, 3, 5):
        threads(count)
        outcomes.append(case.outcome())
    for others in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], others, strict=True))


def test_only_needed_gradients_are_computed(monkeypatch):
    case = Case(gated=True)
    expected, needed = case.outcome()[1:], []
    backward = fused.backward

    def recorded(inputs, grad, hidden, needs):
        needed.append(needs)
        return backward(inputs, grad, hidden, needs)

    monkeypatch.setattr(fused, "backward", recorded)
    for i, gradient in enumerate(expected):
        tensors = [t.detach().requires_grad_(i == j) for j, t in enumerate(case.tensors())]
        case.run(tensors).backward(case.grad)
        torch.testing.assert_close(tensors[i].grad, gradient)
        assert needed.pop() == [i == j for j in range(len(tensors))]
        assert all(t.grad is None for j, t in enumerate(tensors) if i != j)


def test_nothing_is_kept_without_gradients():
    case = Case(gated=True)
    num_rows = hidden_rows(80, 4)
    assert OPS.moe_ffn(*case.op_inputs())[1].shape == (2 * num_rows, 40)
    out, hidden = OPS.moe_ffn(*case.op_inputs(keep_hidden=False))
    assert hidden.shape == (0, 40)
    assert torch.equal(out, case.run(case.tensors()))


def test_other_strides_of_tokens_and_gradients():
    """Also of what sum().backward() gives."""
    case = Case()
    case.grad = torch.ones_like(case.grad)
    expected = case.outcome()
    case.grad = torch.ones(1, 1).expand_as(case.grad)
    case.tokens = torch.cat([case.tokens.t(), torch.ones(1, 40)])[:-1].t()
    case.gates = case.gates.t().contiguous().t()
    case.weights = case.weights._replace(b1=case.weights.b1.t().contiguous().t())
    assert all(torch.equal(a, b) for a, b in zip(case.outcome(), expected, strict=True))


def test_biases_of_another_dtype_have_gradients_of_it():
    case = Case()
    expected = case.outcome()
    b1, b2 = case.weights.b1.double(), case.weights.b2.double()
    case.weights = case.weights._replace(b1=b1, b2=b2)
    inputs = [tensor.detach().requires_grad_() for tensor in case.tensors()]
    out = case.run(inputs)
    found = [out, *torch.autograd.grad(out, inputs, case.grad)]
    assert [t.dtype for t in found] == [torch.float32] * 4 + [torch.float64, torch.float32] + [
        torch.float64
    ]
    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16], ids=str)
def test_biases_of_another_dtype_count_as_their_numbers(dtype):
    case = Case()
    weights = case.weights._replace(b1=torch.ones(4, 40), b2=torch.ones(4, 24))
    others = weights._replace(b1=weights.b1.to(dtype), b2=weights.b2.to(dtype))
    inputs = (case.tokens, case.gates)
    assert torch.equal(moe_ffn(*inputs, others, case.plan), moe_ffn(*inputs, weights, case.plan))


def test_choices_in_32_bits_are_the_same():
    case = Case()
    plan = case.plan._replace(choices=case.plan.choices.int(), offsets=case.plan.offsets.long())
    expected = case.run(case.tensors())
    assert torch.equal(case.run(case.tensors(), plan=plan), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_token(value, dtype):
    skip_without(dtype)
    case = Case(70, gated=True).in_dtype(dtype)
    plain = case.outcome()
    case.tokens[7, 3] = value
    out, by_tokens, *_ = case.outcome()
    others = torch.arange(70) != 7
    assert not out[7].isfinite().any()
    assert torch.equal(out[others], plain[0][others])
    assert torch.equal(by_tokens[others], plain[1][others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropped_choices_are_not_read(dtype):
    """Neither their tokens nor their gates, nor the gradients of their outputs."""
    skip_without(dtype)
    case = Case(130, capacity=9, gated=True).in_dtype(dtype)
    plain, kept = case.outcome(), case.plan.kept
    idle = ~kept.any(1)
    assert idle.sum() > 10
    assert (kept.any(1) & ~kept.all(1)).any()
    case.tokens[idle], case.grad[idle], case.gates[~kept] = (float("nan") for _ in range(3))
    found = case.outcome()
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert found[0][idle].eq(0).all()
    assert found[1][idle].eq(0).all()
    assert found[2][~kept].eq(0).all()


def test_rows_of_no_expert_hold_no_choice():
    case = Case(130, capacity=9)
    expected = case.run(case.tensors())
    choices, used = case.plan.choices.clone(), int(case.plan.offsets[-1])
    plan = case.plan._replace(choices=torch.cat([choices[:used], torch.full((7,), -1)]))
    assert torch.equal(case.run(case.tensors(), plan=plan), expected)


# 2. What is refused


def changed(tensor: torch.Tensor, place: int, value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choices": 80}, "choices: one is not below"),
        ({"choices": -1}, "choices: one is not below"),
        ({"choices": 2**32}, "choices: one is not below"),
        ({"offsets": (1, 99)}, r"offsets \(.*99.*must ascend"),
        ({"offsets": (3, 81)}, r"offsets \(.*81.*must ascend"),
        ({"offsets": (0, -1)}, r"offsets \(\[-1.*must ascend"),
    ],
    ids=str,
)
def test_a_damaged_plan_is_refused_in_both_directions(changes, message):
    case = Case()
    inputs = case.op_inputs()
    hidden = OPS.moe_ffn(*inputs)[1]
    if "choices" in changes:
        inputs = inputs._replace(choices=changed(inputs.choices, 11, changes["choices"]))
    else:
        inputs = inputs._replace(offsets=changed(inputs.offsets, *changes["offsets"]))
    with pytest.raises(ValueError, match=message) as raised:
        fused.forward(inputs)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=message):
        fused.backward(inputs, case.grad, hidden, [True] * 8)


@pytest.mark.parametrize("shape", [(40, 1), (39, 2), (80,)], ids=str)
def test_gates_of_another_shape_are_refused(shape):
    case = Case()
    with pytest.raises(ValueError, match=r"gates is \[.*\], the plan has \[40, 2\] choices"):
        moe_ffn(case.tokens, torch.ones(shape), case.weights, case.plan)


@pytest.mark.parametrize(("hidden_dim", "model_dim"), [(0, 8), (8, 0)])
def test_weights_without_elements_are_refused(hidden_dim, model_dim):
    """C++ would divide by these sizes."""
    case, w = Case(), torch.ones(4, hidden_dim, model_dim)
    weights = ExpertWeights(w, None, w, None)
    with pytest.raises(ValueError, match=r"w1 is \[4, \d, \d\], and no size of it may be 0"):
        moe_ffn(torch.ones(40, model_dim), case.gates, weights, case.plan)


def test_weights_that_do_not_fit_are_refused():
    case = Case()
    for changes, message in (
        ({"w2": case.weights.w2[:, :16]}, r"w1 is .* w2 "),
        ({"b1": torch.ones(4, 39)}, r"b1 is \[4, 39\], not \[4, 40\]"),
        ({"b2": torch.ones(3, 24)}, r"b2 is \[3, 24\], not \[4, 24\]"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_ffn(case.tokens, case.gates, case.weights._replace(**changes), case.plan)
    with pytest.raises(ValueError, match="the rows have 23 columns"):
        moe_ffn(case.tokens[:, 1:], case.gates, case.weights, case.plan)


# 3. The form of a call


def close(found, expected, limit=1e-5) -> None:
    limit *= expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=limit)


def test_weights_and_gates_of_any_kind(calls):
    """Also interleaved halves of one weight, of which only the experts in use are copied."""
    case = Case(5, gated=True, model_dim=32, hidden_dim=64, num_experts=8)
    weights = case.weights
    expected = case.run(case.tensors())
    both = torch.cat([weights.w1, weights.w3], 1)
    interleaved = torch.stack([weights.w1.mT, weights.w3.mT], 3).flatten(2)
    for others in (
        weights._replace(w1=weights.w1.mT.contiguous().mT, w2=weights.w2.mT.contiguous().mT),
        weights._replace(w1=both[:, :64], w3=both[:, 64:]),
        weights._replace(w1=interleaved[..., ::2].mT, w3=interleaved[..., 1::2].mT),
        pack_weights(weights, torch.float32, "silu"),
    ):
        close(moe_ffn(case.tokens, case.gates, others, case.plan, "silu"), expected)
    double = torch.float64
    for tokens_in, gates_in, weights_in in (
        (torch.float32, double, torch.float32), (HALF, HALF, HALF), (HALF, HALF, torch.float32),
        (torch.float32, torch.float32, HALF),
    ):  # fmt: skip
        others = weights.map(lambda weight, dtype=weights_in: weight.to(dtype))
        tokens, gates = case.tokens.to(tokens_in), case.gates.to(gates_in)
        out = moe_ffn(tokens, gates, others, case.plan, "silu")
        assert out.dtype == torch.promote_types(tokens_in, gates_in)
        close(out, expected, 1e-5 if HALF not in (tokens_in, weights_in) else 0.05)
    assert calls == ["forward"] * 9


def test_calls_that_take_another_form_give_the_same(calls, monkeypatch):
    case = Case(gated=True, model_dim=32, hidden_dim=64)
    inputs = (case.gates, case.weights, case.plan)
    expected = case.run(case.tensors())
    assert calls.pop() == "forward"
    close(moe_ffn(case.tokens, *inputs, "silu", kernels="torch"), expected)
    doubles = case.weights.map(torch.Tensor.double)
    in_fp64 = (case.tokens.double(), case.gates.double(), doubles, case.plan)
    close(moe_ffn(*in_fp64, "silu"), expected)
    monkeypatch.setitem(ACTIVATIONS._values, "mine", torch.nn.functional.silu)
    close(moe_ffn(case.tokens, *inputs, "mine"), expected)
    by_sample = torch.func.vmap(lambda tokens: moe_ffn(tokens, *inputs, "silu"))
    close(by_sample(case.tokens.unsqueeze(0))[0], expected)
    assert not calls


def test_rows_alone_take_it_too(calls):
    rows, weights, ends, _ = ffn_inputs([4, 8], dtypes=FP32)
    expert_ffn(rows, weights, ends, "silu")
    assert calls == ["forward"]


# 4. In a layer, and with torch's own tools


def test_a_layer_under_autocast_uses_it(calls):
    """Also in evaluation, where other forms have prepared weights."""
    skip_without(HALF)
    layer = MoELayer(MoEConfig(32, 32, 8, top_k=4, capacity_factor=0.0, gate_activation="sigmoid"))
    x = torch.randn(64, 32, requires_grad=True)
    with torch.autocast("cpu", HALF):
        y, _ = layer(x)
        y.sum().backward()
        assert calls == ["forward", "backward"]
        with torch.no_grad(), prepared(layer):
            again, _ = layer(x)
    assert calls == ["forward", "backward", "forward"]
    close(again, y, 0.05)
    assert all(p.grad.dtype == torch.float32 for p in (x, *layer.parameters()))


def test_a_layer_uses_it_compiled_with_any_number_of_tokens(calls):
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(24, 40, 4, top_k=2, capacity_factor=0.0))
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_tokens in (17, 30, 90):
        outcomes = []
        for run in (layer, compiled):
            layer.zero_grad()
            x = torch.randn(num_tokens, 24, generator=torch.Generator().manual_seed(1))
            y, aux_loss = run(x.requires_grad_())
            (y.square().sum() + aux_loss).backward()
            outcomes.append([y, x.grad, *(p.grad.clone() for p in layer.parameters())])
        torch.testing.assert_close(*outcomes)
    assert calls == ["forward", "backward"] * 6


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_flops_are_counted(gated):
    case = Case(gated=gated)
    with FlopCounterMode(display=False) as counter:
        case.outcome()
    assert counter.get_total_flops() == 3 * (3 if gated else 2) * 2 * 80 * 40 * 24


def test_opcheck(monkeypatch):
    """With zeros in the hidden layer's gaps, since it compares all numbers."""
    monkeypatch.setattr(fused, "empty", lambda shape, dtype, _: torch.zeros(shape, dtype=dtype))
    case = Case(9, capacity=3, gated=True, model_dim=5, hidden_dim=7)
    inputs = case.op_inputs()
    hidden = OPS.moe_ffn(*inputs)[1]
    needs = [True, False, True, True, False, True, True, True]
    torch.library.opcheck(OPS.moe_ffn_backward.default, (case.grad, needs, *inputs, hidden))
    differentiable = len(MoEFFNInputs._fields[: MoEFFNInputs._fields.index("b3") + 1])
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:differentiable]]
    torch.library.opcheck(OPS.moe_ffn.default, (*leaves, *inputs[differentiable:]))


def test_second_derivatives(calls):
    case = Case(9, capacity=3, gated=True, model_dim=5, hidden_dim=7)
    outcomes = []
    for kernels, dtype in (("auto", torch.float32), ("torch", torch.float64)):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in case.tensors()]
        out = case.run(tensors, kernels)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        total = sum(gradient.square().sum() for gradient in first)
        outcomes.append(torch.autograd.grad(total, tensors))
    # `out` is squared, so its own gradient is part of the second ones
    assert calls == ["forward", "backward"]
    assert_close(*outcomes, torch.float32)
