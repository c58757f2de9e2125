"""Standard forms held to what they stand for: each MoE layer to MoELayer, the whole to the
model."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from moe_cases import make_layer, plain_logits
from torch import nn

from moe_core import MoEConfig, MoELayer
from moe_core.export import StandardMoE
from swinv2_moe.export.forms import StandardForm
from swinv2_moe.models import SwinTransformerMoE, SwinTransformerV2MoE

CONFIGS = st.fixed_dictionaries(
    {
        "model_dim": st.integers(1, 8),
        "hidden_dim": st.integers(1, 8),
        "num_experts": st.integers(1, 12),
        "top_k": st.integers(1, 4),
        "capacity_factor": st.sampled_from([0.0, 0.01, 0.5, 1.0, 1.25, -1.25, 3.0]),
        "router": st.sampled_from(["linear", "cosine"]),
        "normalize_gates": st.booleans(),
        "batch_prioritized": st.booleans(),
        "activation": st.sampled_from(["gelu", "relu", "silu"]),
        "bias": st.booleans(),
        "output_bias": st.booleans(),
    }
)


def may_tie_by_rounding(layer: MoELayer, x: torch.Tensor) -> bool:
    """Whether fp32 may choose other experts, or another order of tokens, than exact numbers do."""
    probs = plain_logits(copy.deepcopy(layer).double(), x.double()).softmax(1)
    gaps = torch.cat([probs.sort(1).values.diff().flatten(), probs.amax(1).sort().values.diff()])
    return bool(((gaps > 1e-12) & (gaps < 1e-5)).any())


@settings(max_examples=150, deadline=None)
@given(
    CONFIGS, st.integers(1, 40), st.integers(0, 99), st.sampled_from([torch.float64, torch.float32])
)
def test_a_layers_form_equals_the_layer(config, num_tokens, seed, dtype):
    layer = make_layer(seed, dtype, **config).eval()
    x = torch.randn(num_tokens, config["model_dim"], dtype=dtype)
    with torch.no_grad():
        if config["router"] == "linear":
            # Tokens that tie: the earlier one has precedence. Equal tokens have equal logits only
            # if nothing is rounded, since products of matrices add each row in its own order.
            for tensor in (x, layer.router.weight):
                tensor.copy_((64 * tensor / tensor.abs().max()).round() / 64)
            x[num_tokens // 2 :] = x[: num_tokens - num_tokens // 2].clone()
        assume(not may_tie_by_rounding(layer, x))
        torch.testing.assert_close(StandardMoE(layer)(x), layer(x)[0])
        torch.testing.assert_close(StandardMoE(layer, batched=True)(x), layer(x)[0])
        torch.testing.assert_close(StandardMoE(layer, 1.0)(x), layer(x, capacity_factor=1.0)[0])


def test_a_form_keeps_its_own_copies():
    layer = make_layer()
    form, x = StandardMoE(layer), torch.randn(9, 6, dtype=torch.float64)
    before = form(x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(form(x), before)
    # a view's file would hold it all
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in form.parameters())


@pytest.mark.parametrize(
    "others", [{"router": [nn.Linear(6, 4)]}, {"experts": nn.Identity()}], ids=str
)
def test_a_layer_with_parts_of_ones_own_is_refused(others):
    with pytest.raises(ValueError, match="one router and the built-in experts"):
        StandardMoE(MoELayer(MoEConfig(6, 10, 4), **others))


def make_model(cls, num_experts: int = 4, **moe) -> nn.Module:
    """16 px in patches of 2, shifted windows; no weight is zero (SwinV2's norms start there, and
    hide the rest)."""
    size = {
        "img_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    }
    model = cls(**size, num_classes=5, num_experts=num_experts, moe_blocks=((), (0, 1)), moe=moe)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


@pytest.mark.parametrize("cls", [SwinTransformerV2MoE, SwinTransformerMoE])
@pytest.mark.parametrize("num_experts", [0, 4])
@torch.no_grad()
def test_a_models_form_equals_the_model(cls, num_experts):
    model = make_model(cls, num_experts, top_k=2, capacity_factor=0.75)
    images, names = torch.randn(3, 3, 16, 16), [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(StandardForm(model)(images), model(images))
    torch.testing.assert_close(StandardForm(model, batched_experts=True)(images), model(images))
    assert [name for name, _ in model.named_parameters()] == names


@torch.no_grad()
def test_a_form_in_bfloat16_is_near_the_model_and_routes_in_float32():
    model = make_model(SwinTransformerMoE, capacity_factor=0.0)
    form = StandardForm(model, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in form.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".router." in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if ".router." not in name} == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    images = torch.randn(8, 3, 16, 16)
    found, wanted = form(images), model(images)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() / wanted.norm() < 0.1
