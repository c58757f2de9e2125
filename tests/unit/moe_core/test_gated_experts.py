"""Gated experts, `(act(x w1^T + b1) * (x w3^T + b3)) w2 + b2`: the specification against plain
torch, each form against the specification, and the layer."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import pytest
import torch
import torch.nn.functional as F
from gated_cases import DTYPES, FUNCTIONS, assert_close, by_reference, gated_inputs, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import make_layer
from torch.utils.flop_counter import FlopCounterMode

from moe_core import (
    MoEConfig,
    MoELayer,
    prepared,
    register_activation,
    register_gated_activation,
)
from moe_core.einsum import use_einsum
from moe_core.export import StandardMoE
from moe_core.ops import ExpertWeights, expert_ffn, make_plan, moe_ffn, pack_weights
from moe_core.ops.ffn import grouped, reference
from moe_core.ops.ffn.inputs import FFNInputs
from moe_core.ops.moe_ffn import reference as moe_ffn_reference
from moe_core.ops.native import library
from moe_core.ops.native.instruction_sets import sets_of_cpu
from moe_core.parallel.cost_model import LayerShape
from moe_core.registry import ACTIVATIONS, GATED_ACTIVATIONS
from moe_core.tutel import to_tutel

OPS = torch.ops.moe_core
SIZES = {"even": [4, 4, 4], "empty": [0, 37, 0, 5, 0], "one": [70], "none": [0, 0], "ones": [1] * 3}
KERNELS = ["torch", *(known.name for known in sets_of_cpu())]


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_the_specification_is_what_torch_s_modules_compute(activation):
    rows, weights, ends, grad = gated_inputs([3, 0, 6])
    found = by_reference(rows, weights, ends, grad, activation)

    def plain(rows, weights):
        w1, b1, w2, b2, w3, b3 = (weight.unbind() for weight in weights)
        parts = []
        for e, part in enumerate(rows.split([3, 0, 6])):
            z, u = F.linear(part, w1[e], b1[e]), F.linear(part, w3[e], b3[e])
            if activation == "clamped_swiglu":
                z, u = z.clamp(max=7), u.clamp(-7, 7)
                hidden = (u + 1) * (z * torch.sigmoid(z * 1.702))
            else:
                hidden = FUNCTIONS[activation](z) * u
            parts.append(F.linear(hidden, w2[e].T, b2[e]))
        return torch.cat(parts)

    expected = outcome(plain, rows, weights, grad)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_swiglu"])
def test_gradcheck(activation):
    rows, weights, ends, _ = gated_inputs([2, 0, 3], 3, 2)
    inputs = [tensor.requires_grad_() for tensor in (rows, *weights)]

    def run(rows, *weights):
        return expert_ffn(rows, ExpertWeights(*weights), ends, activation)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_each_form_equals_the_specification(dtypes, sizes, bias, kernels):
    case = gated_inputs(sizes, dtypes=dtypes, bias=bias)
    rows, weights, ends, grad = case
    found = outcome(
        lambda rows, weights: expert_ffn(rows, weights, ends, "silu", 0.0, kernels),
        rows,
        weights,
        grad,
    )
    assert [t.dtype for t in found] == [dtypes[0]] * 2 + [dtypes[1]] * len(weights.tensors())
    assert_close(found, by_reference(*case), dtypes[0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", ["gelu", "relu", "clamped_swiglu"])
@pytest.mark.parametrize(("model_dim", "hidden_dim"), [(5, 7), (2112, 64), (64, 2112)])
def test_activations_and_sizes(model_dim, hidden_dim, activation, kernels):
    """Also sizes at which sums over k, and a step's hidden units, come in several parts."""
    case = gated_inputs([33, 0, 20], model_dim, hidden_dim, DTYPES["fp32"])
    case[0].mul_(4)  # beyond the limits of the clamped one
    rows, weights, ends, grad = case
    found = outcome(
        lambda rows, weights: expert_ffn(rows, weights, ends, activation, 0.0, kernels),
        rows,
        weights,
        grad,
    )
    assert_close(found, by_reference(*case, activation), torch.float32)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtypes", [DTYPES["fp32"], DTYPES["mixed"]], ids=str)
def test_weights_in_other_memory_layouts(dtypes, kernels):
    """As halves of one tensor [E, 2 H, M], as [E, M, H], and with neither dim contiguous."""
    rows, weights, ends, grad = gated_inputs([33, 0, 20], 48, 72, dtypes)
    both = torch.cat([weights.w1, weights.w3], 1)
    interleaved = torch.stack([weights.w1, weights.w3], 2).flatten(1, 2).mT.contiguous().mT
    layouts = [
        weights._replace(w1=both[:, :72], w3=both[:, 72:]),
        weights._replace(w2=weights.w2.mT.contiguous().mT, w1=weights.w1.mT.contiguous().mT),
        weights._replace(w1=interleaved[:, ::2], w3=interleaved[:, 1::2]),
    ]
    expected = by_reference(rows, weights, ends, grad)
    for layout in layouts:
        leaves = [t.detach().requires_grad_() for t in layout]  # which keeps the strides
        x = rows.detach().requires_grad_()
        out = expert_ffn(x, ExpertWeights(*leaves), ends, "silu", 0.0, kernels)
        found = [out, *torch.autograd.grad(out, [x, *leaves], grad)]
        assert_close(found, expected, dtypes[0])
        rest = (ends, None, "silu", 0.0, kernels)
        hidden = OPS.expert_ffn(x, *leaves, *rest, True)[1]
        # which compares the strides of the gradients with those that torch.compile plans with
        arguments = (grad, hidden, [True] * 7, x.detach(), *layout, *rest)
        torch.library.opcheck(
            OPS.expert_ffn_backward.default, arguments, test_utils="test_faketensor"
        )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_sizes(data):
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    model_dim, hidden_dim = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    dtypes = data.draw(st.sampled_from([DTYPES["fp32"], DTYPES["mixed"], DTYPES["bf16"]]))
    bias = data.draw(st.booleans())
    case = gated_inputs(sizes, model_dim, hidden_dim, dtypes, bias)
    rows, weights, ends, grad = case
    found = outcome(
        lambda rows, weights: expert_ffn(rows, weights, ends, "silu"), rows, weights, grad
    )
    assert_close(found, by_reference(*case), dtypes[0])


def test_a_registered_function_of_both_products(monkeypatch):
    for registry in (ACTIVATIONS, GATED_ACTIVATIONS):
        monkeypatch.setattr(registry, "_values", dict(registry))  # nothing stays registered

    @register_gated_activation("test_difference")
    def difference(z, u):
        return z.tanh() - 2 * u

    rows, weights, ends, grad = gated_inputs([3, 0, 6])
    found = outcome(
        lambda rows, weights: expert_ffn(rows, weights, ends, "test_difference"),
        rows,
        weights,
        grad,
    )

    def specification(rows, weights):
        w1, b1, w2, b2, w3, b3 = weights
        return reference.expert_ffn(rows, w1, b1, w2, b2, ends, difference, None, w3, b3)

    assert_close(found, outcome(specification, rows, weights, grad), torch.float64)
    for register in (register_gated_activation, register_activation):
        with pytest.raises(ValueError, match="'test_difference' is registered already"):
            register("test_difference")
    with pytest.raises(ValueError, match="'silu' is registered already"):
        register_gated_activation("silu")


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_gradient_where_none_is_wanted(kernels):
    rows, weights, ends, grad = gated_inputs([4, 8], dtypes=DTYPES["fp32"])
    expected = by_reference(rows, weights, ends, grad)
    for wanted in range(7):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((rows, *weights))]
        out = expert_ffn(inputs[0], ExpertWeights(*inputs[1:]), ends, "silu", 0.0, kernels)
        out.backward(grad)
        assert_close([inputs[wanted].grad], [expected[1 + wanted]], torch.float32)
        assert all(t.grad is None for i, t in enumerate(inputs) if i != wanted)


@pytest.mark.parametrize("kernels", KERNELS)
def test_dropout_is_the_same_in_both_directions(kernels):
    """Through experts that pass on what they get: the gradient of an input is its factor."""
    x = torch.ones(2, 640).requires_grad_()
    eye = torch.eye(640).expand(2, 640, 640).contiguous()
    ones = torch.ones(2, 640)
    weights = ExpertWeights(eye, None, eye, None, torch.zeros_like(eye), ones)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    torch.manual_seed(0)
    out = expert_ffn(x, weights, ends, "relu", 0.25, kernels)
    assert set(out.detach().unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert 0.15 < (out == 0).float().mean() < 0.35
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[4, 0, 8], [0, 37, 5], [0, 0]], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_mm_equals_the_specification(bias, sizes, dtype):
    case = gated_inputs(sizes, 24, 40, (dtype, torch.float32), bias)
    rows, weights, ends, grad = case
    inputs = FFNInputs(rows, *weights, ends, None, "silu", 0.0, "auto")
    out, hidden = grouped.forward(inputs, True)
    needs = [tensor is not None for tensor in (rows, *weights)]
    gradients = grouped.backward(inputs, grad, hidden, needs)
    found = [out, *(g for g in gradients if g is not None)]
    assert_close(found, by_reference(*case), dtype)


def test_grouped_mm_drops_alike_in_both_directions():
    rows, weights, ends, grad = gated_inputs([4, 8], 24, 16, DTYPES["fp32"])
    noise = torch.randint(-32768, 32768, (12 * 16,), dtype=torch.int16)
    inputs = FFNInputs(rows, *weights, ends, noise, "silu", 0.25, "auto")
    out, hidden = grouped.forward(inputs, True)
    found = [out, *grouped.backward(inputs, grad, hidden, [True] * 7)]
    kept = ((noise >= 16384 - 32768).view(12, 16) / 0.75).double()
    assert_close(found, by_reference(rows, weights, ends, grad, "silu", kept), torch.float32)


@pytest.mark.parametrize("kernels", KERNELS[1:])
@pytest.mark.parametrize("dtypes", [DTYPES["fp32"], DTYPES["mixed"]], ids=str)
def test_packed_weights_give_what_the_weights_do(dtypes, kernels):
    rows, weights, ends, _ = gated_inputs([33, 0, 20], 64, 96, dtypes)
    packed = pack_weights(weights, rows.dtype, "silu", kernels)
    assert not any(weight.is_floating_point() for weight in packed.matrices().tensors())
    found = expert_ffn(rows, packed, ends, "silu", 0.0, kernels)
    assert torch.equal(found, expert_ffn(rows, weights, ends, "silu", 0.0, kernels))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_opcheck(kernels, dtypes):
    rows, weights, ends, grad = gated_inputs([0, 7, 5], dtypes=dtypes)
    noise = OPS.dropout_noise(rows, weights.w1, "silu", kernels)
    rest = (ends, noise, "silu", 0.5, kernels)
    hidden = OPS.expert_ffn(rows, *weights, *rest, True)[1]
    leaves = [tensor.detach().requires_grad_() for tensor in (rows, *weights)]
    torch.library.opcheck(OPS.expert_ffn.default, (*leaves, *rest, True))
    needs = [True, False, True, True, False, True, True]
    torch.library.opcheck(
        OPS.expert_ffn_backward.default, (grad, hidden, needs, rows, *weights, *rest)
    )


def test_flops_are_counted():
    rows, weights, ends, grad = gated_inputs([5, 8], 6, 10)
    with FlopCounterMode(display=False) as counter:
        outcome(lambda rows, weights: expert_ffn(rows, weights, ends, "silu"), rows, weights, grad)
    assert counter.get_total_flops() == 3 * 3 * 2 * 13 * 6 * 10


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_whole_layer_equals_its_specification(top_k):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(9, 24, generator=generator, dtype=torch.float64)
    gates, ids = torch.rand(9, 4, generator=generator, dtype=torch.float64).topk(top_k)
    _, weights, _, grad = gated_inputs([3, 2, 2, 2])
    capacity = 3 * top_k

    def layer(tokens, weights):
        return moe_ffn(tokens, gates, weights, make_plan(ids, 4, capacity), "silu")

    def specification(tokens, weights):
        w1, b1, w2, b2, w3, b3 = weights
        return moe_ffn_reference.moe_ffn(
            tokens, ids, gates, w1, b1, w2, b2, F.silu, capacity, None, w3, b3
        )

    found = outcome(layer, tokens, weights, grad)
    torch.testing.assert_close(found, outcome(specification, tokens, weights, grad))


class TestLayer:
    def test_parameters(self):
        config = MoEConfig(6, 10, 4, gated=True)
        experts = MoELayer(config).experts
        shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
        assert shapes == {
            "w1": (4, 10, 6), "b1": (4, 10), "w2": (4, 10, 6), "b2": (4, 6),
            "w3": (4, 10, 6), "b3": (4, 10),
        }  # fmt: skip
        assert not torch.equal(experts.w1, experts.w3)
        without = MoELayer(MoEConfig(6, 10, 4, gated=True, bias=False)).experts
        assert [name for name, _ in without.named_parameters()] == ["w1", "w2", "w3"]

    def test_the_initial_values_of_the_other_parameters_are_the_ungated_ones(self):
        torch.manual_seed(3)
        plain = MoELayer(MoEConfig(6, 10, 4)).experts
        torch.manual_seed(3)
        with_gate = MoELayer(MoEConfig(6, 10, 4, gated=True)).experts
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter, getattr(with_gate, name))

    def test_einsums_give_the_same(self):
        layer = make_layer(gated=True, activation="silu", top_k=2, capacity_factor=1.0)
        x = torch.randn(12, 6, dtype=torch.float64)
        expected = layer(x)[0]
        use_einsum(layer)
        torch.testing.assert_close(layer(x)[0], expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_prepared_weights_give_the_same(self, dtype):
        layer = make_layer(
            model_dim=32, hidden_dim=64, gated=True, activation="silu", dtype=torch.float32
        )
        layer.eval()
        x = torch.randn(12, 32)
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            expected = layer(x)[0]
            with prepared(layer):
                found = layer(x)[0]
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]  # of rounded biases
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)

    def test_shared_experts_are_gated_too(self):
        layer = make_layer(gated=True, activation="silu", num_shared_experts=2)
        assert layer.shared.w3.shape == (1, 20, 6)
        x = torch.randn(5, 6, dtype=torch.float64)
        w1, b1, w2, b2, w3, b3 = (p[0] for p in layer.shared.parameters_by_field)
        hidden = F.silu(F.linear(x, w1, b1)) * F.linear(x, w3, b3)
        torch.testing.assert_close(layer.shared(x), F.linear(hidden, w2.T, b2))

    @pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
    @pytest.mark.parametrize("batched", [False, True])
    def test_exported_in_standard_operations(self, batched, activation):
        layer = make_layer(gated=True, activation=activation, top_k=2, capacity_factor=2.0).eval()
        x = torch.randn(12, 6, dtype=torch.float64)
        standard = StandardMoE(layer, batched=batched)
        torch.testing.assert_close(standard(x), layer(x)[0])

    def test_the_cost_model_counts_their_parameters(self):
        for bias in (True, False):
            config = MoEConfig(6, 10, 4, gated=True, bias=bias)
            parameters = list(MoELayer(config).experts.parameters())
            shape = LayerShape.of(config, tokens=8)
            assert 4 * shape.expert_parameters == sum(p.numel() for p in parameters)
            assert shape.expert_tensors == len(parameters)

    def test_tutel_has_no_such_experts(self):
        state = make_layer(gated=True).state_dict()
        with pytest.raises(ValueError, match="gated experts, which Tutel has not"):
            to_tutel(state)


class TestBadInput:
    def test_an_activation_of_gated_experts_without_them(self):
        with pytest.raises(ValueError, match=r"activation \('clamped_swiglu'\) needs gated"):
            MoEConfig(6, 10, 4, activation="clamped_swiglu")
        rows, weights, ends, _ = gated_inputs([2, 2])
        with pytest.raises(ValueError, match="needs gated"):
            expert_ffn(rows, weights._replace(w3=None, b3=None), ends, "clamped_swiglu")

    def test_an_unknown_activation(self):
        with pytest.raises(ValueError, match="did you mean 'silu'"):
            MoEConfig(6, 10, 4, activation="sillu", gated=True)

    def test_weights_that_do_not_fit(self):
        rows, weights, ends, _ = gated_inputs([2, 2])
        for wrong in (weights.w3.float(), weights.w3[:, :16]):
            with pytest.raises(ValueError, match=r"w1 is .* w3 "):
                expert_ffn(rows, weights._replace(w3=wrong), ends, "silu")
        with pytest.raises(ValueError, match="b3 needs w3"):
            expert_ffn(rows, weights._replace(w3=None), ends, "silu")


def test_the_kernels_of_this_cpu_take_gated_experts(monkeypatch):
    if not library.usable(torch.float32):
        pytest.skip("no C++ kernels on this CPU")
    monkeypatch.setattr(
        "moe_core.ops.ffn.loop.forward", lambda *arguments: pytest.fail("the loop ran")
    )
    rows, weights, ends, _ = gated_inputs([2, 2], dtypes=DTYPES["fp32"])
    assert expert_ffn(rows, weights, ends, "clamped_swiglu").isfinite().all()
