"""Layers of gated experts, `(act(x w1^T + b1) * (x w3^T + b3)) w2 + b2`: their parameters, the
whole layer, and what cannot be. `test_ffn_forms` has the op."""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import pytest
import torch
import torch.nn.functional as F
from ffn_cases import FP32, ffn_inputs, outcome, plain_experts
from moe_cases import make_layer, plain_moe

from moe_core import MoEConfig, MoELayer, prepared, register_activation, register_gated_activation
from moe_core.export import StandardMoE
from moe_core.ops import expert_ffn, make_plan, moe_ffn
from moe_core.parallel.cost_model import LayerShape
from moe_core.registry import ACTIVATIONS, GATED_ACTIVATIONS
from moe_core.tutel import to_tutel


def test_a_registered_function_of_both_products(monkeypatch):
    for registry in (ACTIVATIONS, GATED_ACTIVATIONS):
        monkeypatch.setattr(registry, "_values", dict(registry))  # nothing stays registered

    @register_gated_activation("test_difference")
    def difference(z, u):
        return z.tanh() - 2 * u

    rows, weights, ends, grad = ffn_inputs([3, 0, 6])

    def by_name(rows, weights):
        return expert_ffn(rows, weights, ends, "test_difference")

    def specification(rows, weights):
        return plain_experts(rows, weights, ends, difference)

    found = outcome(by_name, rows, weights, grad)
    torch.testing.assert_close(found, outcome(specification, rows, weights, grad))
    for register in (register_gated_activation, register_activation):
        with pytest.raises(ValueError, match="'test_difference' is registered already"):
            register("test_difference")
    with pytest.raises(ValueError, match="'silu' is registered already"):
        register_gated_activation("silu")


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_whole_layer_equals_its_specification(top_k):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(9, 24, generator=generator, dtype=torch.float64)
    gates, ids = torch.rand(9, 4, generator=generator, dtype=torch.float64).topk(top_k)
    _, weights, _, grad = ffn_inputs([3, 2, 2, 2])
    capacity = 3 * top_k

    def layer(tokens, weights):
        return moe_ffn(tokens, gates, weights, make_plan(ids, 4, capacity), "silu")

    def specification(tokens, weights):
        return plain_moe(tokens, ids, gates, weights, "silu", capacity)

    found = outcome(layer, tokens, weights, grad)
    torch.testing.assert_close(found, outcome(specification, tokens, weights, grad))


def test_parameters():
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
    for module, bias in ((experts, True), (without, False)):
        shape = LayerShape.of(MoEConfig(6, 10, 4, gated=True, bias=bias), tokens=8)
        parameters = list(module.parameters())
        assert 4 * shape.expert_parameters == sum(p.numel() for p in parameters)
        assert shape.expert_tensors == len(parameters)


def test_the_initial_values_of_the_other_parameters_are_the_ungated_ones():
    torch.manual_seed(3)
    plain = MoELayer(MoEConfig(6, 10, 4)).experts
    torch.manual_seed(3)
    with_gate = MoELayer(MoEConfig(6, 10, 4, gated=True)).experts
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, getattr(with_gate, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_weights_give_the_same(dtype):
    layer = make_layer(
        model_dim=32, hidden_dim=64, gated=True, activation="silu", dtype=torch.float32
    ).eval()
    x = torch.randn(12, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        expected = layer(x)[0]
        with prepared(layer):
            found = layer(x)[0]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]  # of rounded biases
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_shared_experts_are_gated_too():
    layer = make_layer(gated=True, activation="silu", num_shared_experts=2)
    assert layer.shared.w3.shape == (1, 20, 6)
    x = torch.randn(5, 6, dtype=torch.float64)
    w1, b1, w2, b2, w3, b3 = (p[0] for p in layer.shared.parameters_by_field)
    hidden = F.silu(F.linear(x, w1, b1)) * F.linear(x, w3, b3)
    torch.testing.assert_close(layer.shared(x), F.linear(hidden, w2.T, b2))


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("batched", [False, True])
def test_exported_in_standard_operations(batched, activation):
    layer = make_layer(gated=True, activation=activation, top_k=2, capacity_factor=2.0).eval()
    x = torch.randn(12, 6, dtype=torch.float64)
    standard = StandardMoE(layer, batched=batched)
    torch.testing.assert_close(standard(x), layer(x)[0])


def test_what_cannot_be():
    with pytest.raises(ValueError, match="gated experts, which Tutel does not have"):
        to_tutel(make_layer(gated=True).state_dict())
    with pytest.raises(ValueError, match=r"activation \('clamped_swiglu'\) needs gated"):
        MoEConfig(6, 10, 4, activation="clamped_swiglu")
    with pytest.raises(ValueError, match="did you mean 'silu'"):
        MoEConfig(6, 10, 4, activation="sillu", gated=True)
    rows, weights, ends, _ = ffn_inputs([2, 2], dtypes=FP32)
    with pytest.raises(ValueError, match="needs gated"):
        expert_ffn(rows, weights._replace(w3=None, b3=None), ends, "clamped_swiglu")
    for wrong in (weights.w3.double(), weights.w3[:, :16]):
        with pytest.raises(ValueError, match=r"w1 is .* w3 "):
            expert_ffn(rows, weights._replace(w3=wrong), ends, "silu")
    with pytest.raises(ValueError, match="b3 needs w3"):
        expert_ffn(rows, weights._replace(w3=None), ends, "silu")
