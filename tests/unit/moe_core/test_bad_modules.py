"""Modules, weights and arguments that do not fit a layer: one ValueError, before anything is read
or written."""

# N rows, E experts, M model dim, H hidden dim

import pytest
import torch
from torch import nn

from moe_core import MoEConfig, MoELayer, clip_gradients
from moe_core.checkpoint import save_tensors
from moe_core.experts import Experts
from moe_core.export import StandardMoE
from moe_core.ops import ExpertWeights, expert_ffn
from moe_core.ops.native import library
from moe_core.parallel.cost_model import LayerShape
from moe_core.router import route_by_experts
from moe_core.tutel import to_tutel

M, H, E = 16, 32, 4


def make_config(**options) -> MoEConfig:
    options = {"model_dim": M, "hidden_dim": H, "num_experts": E} | options
    return MoEConfig(**options)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"num_experts": 2}, r"the experts have num_experts 2, the layer 4"),
        ({"num_experts": 64}, r"the experts have num_experts 64, the layer 4"),
        ({"model_dim": 4096}, r"the experts have model_dim 4096, the layer 16"),
    ],
)
def test_experts_of_another_layer(other, says):
    with pytest.raises(ValueError, match=says):
        MoELayer(make_config(), experts=Experts(make_config(**other)))


def make_weights(**shapes) -> ExpertWeights:
    all_shapes = {"w1": (2, H, M), "b1": (2, H), "w2": (2, H, M), "b2": (2, M)} | shapes
    return ExpertWeights(**{name: torch.randn(shape) for name, shape in all_shapes.items()})


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    ("rows", "offsets", "shapes", "says"),
    [
        ((6, 8), [3, 6], {}, r"the rows have 8 columns, w1 is \[2, 32, 16\]"),
        ((6, M), [3], {}, r"offsets has 1 experts, w1 \[2, 32, 16\]"),
        ((6, M), [3, 6], {"b1": (2, 4)}, r"b1 is \[2, 4\], not \[2, 32\]"),
        ((6, M), [3, 6], {"b2": (1, M)}, r"b2 is \[1, 16\], not \[2, 16\]"),
    ],
)
def test_shapes_that_do_not_fit(kernels, rows, offsets, shapes, says):
    offsets = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(ValueError, match=says):
        expert_ffn(torch.randn(rows), make_weights(**shapes), offsets, "gelu", kernels=kernels)


@pytest.mark.parametrize("offsets", [[3, 600_000], [6, 3], [-1, 6]])
def test_offsets_beyond_the_rows_are_not_read(offsets):
    if not library.usable(torch.float32):
        pytest.skip("no C++ kernels here")
    offsets = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(ValueError, match="must ascend from 0 to at most the 6 rows"):
        expert_ffn(torch.randn(6, M), make_weights(), offsets, "gelu")


class FourNetworks(nn.ModuleList):
    """Experts as a list of modules, whose tensors are not [E, ...]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(M, M) for _ in range(E))


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("experts", [FourNetworks, WithScalar])
def test_custom_experts_that_cannot_be_saved_by_expert(experts, tmp_path):
    layer = MoELayer(make_config(), experts=experts())
    with pytest.raises(ValueError, match=r"experts\..* is \[.*\]; .* it must be \[4, \.\.\.\]"):
        save_tensors(tmp_path / "saved", layer, layer.state_dict())
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(("slots_per_expert", "num_logits"), [(3, 16), (2, 4), (1, 8), (0, 4)])
def test_a_router_of_soft_moe_with_another_number_of_logits(slots_per_expert, num_logits):
    config = make_config(router="soft", slots_per_expert=slots_per_expert)
    layer = MoELayer(config, router=nn.Linear(M, num_logits))
    with pytest.raises(
        ValueError, match=rf"\[10, {num_logits}\], not \[T, {4 * slots_per_expert}\]"
    ):
        layer(torch.randn(10, M))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": 1.5}, r"top_k \(1.5\) must be an integer of at least 1"),
        ({"num_experts": True}, r"num_experts \(True\) must be an integer"),
        ({"hidden_dim": float("inf")}, r"hidden_dim \(inf\) must be an integer"),
        (
            {"slots_per_expert": 1.5, "router": "soft"},
            r"slots_per_expert \(1.5\) must be an integer",
        ),
        ({"num_shared_experts": 0.5}, r"num_shared_experts \(0.5\) must be an integer"),
        ({"round_to": -1}, r"round_to \(-1\) must be an integer of at least 0"),
        ({"router": ["linear"]}, r"router \(\['linear'\]\) must be one of"),
        ({"activation": None}, r"activation \(None\) must be one of"),
    ],
)
def test_values_of_another_type(options, says):
    with pytest.raises(ValueError, match=says):
        make_config(**options)


@pytest.mark.parametrize("num_tokens", [2, 5])
def test_num_tokens_that_does_not_fit_the_mask(num_tokens):
    mask = torch.tensor([True, False, True, True])
    message = rf"num_tokens is {num_tokens}, mask has 3 True values"
    with pytest.raises(ValueError, match=message):
        MoELayer(make_config())(torch.randn(4, M), mask=mask, num_tokens=num_tokens)


@pytest.mark.parametrize("options", [{"num_shared_experts": 1}, {"router": "soft"}])
def test_what_tutel_has_not(options):
    layer = MoELayer(make_config(slots_per_expert=2, **options))
    with pytest.raises(ValueError, match="which Tutel has not"):
        to_tutel(layer.state_dict())


def test_the_norm_of_fp16_gradients_does_not_overflow():
    linear = nn.Linear(4, 1, bias=False).half()
    linear.weight.grad = torch.full((1, 4), 6e4, dtype=torch.float16)
    norm = clip_gradients(linear, 1.0)
    assert float(norm) == pytest.approx(120_000, rel=1e-3)
    assert linear.weight.grad.float().norm() == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_norm_in_half_precision(dtype):
    layer, norm = MoELayer(make_config()).to(dtype), nn.LayerNorm(M).to(dtype)
    y, _ = layer(torch.randn(10, M, dtype=dtype), output_norm=norm)
    assert y.dtype == dtype
    assert y.isfinite().all()


def test_expert_choice_the_z_loss_is_without_noise_and_probs_are_probabilities():
    config = make_config(
        router="expert_choice", gate_noise=40.0, z_loss_weight=1.0, gate_activation="sigmoid"
    )
    logits = torch.zeros(64, E)
    routing = route_by_experts(logits, config, num_images=1, training=True)
    quiet = route_by_experts(logits, config, num_images=1, training=False)
    assert routing.aux_loss == quiet.aux_loss
    torch.testing.assert_close(routing.probs.sum(1), torch.ones(64))
    assert not torch.equal(routing.gates, quiet.gates)


def test_the_cost_model_counts_the_tokens_that_experts_choose():
    config = make_config(router="expert_choice", capacity_factor=2.0)
    assert LayerShape.of(config, tokens=96).rows_per_expert == 48
    config = make_config(router="expert_choice", capacity_factor=8.0)
    assert LayerShape.of(config, tokens=96).rows_per_expert == 96


def test_the_standard_form_of_no_tokens():
    layer = MoELayer(make_config(capacity_factor=0)).eval()
    assert StandardMoE(layer)(torch.randn(0, M)).shape == (0, M)
