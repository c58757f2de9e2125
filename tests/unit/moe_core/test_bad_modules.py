"""Configurations, modules, weights and arguments that do not fit a layer: one ValueError that names
both values, before anything is read or written."""

# N rows, E experts, M model dim, H hidden dim

import pytest
import torch
from torch import nn

from moe_core import MoEConfig, MoELayer, clip_gradients
from moe_core.checkpoint import save_tensors
from moe_core.experts import Experts
from moe_core.export import StandardMoE
from moe_core.ops import ExpertWeights, expert_ffn
from moe_core.parallel import largest_group
from moe_core.parallel.cost_model import LayerShape
from moe_core.routing import route_by_experts
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


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("offsets", [[3, 600_000], [6, 3], [-1, 6]])
def test_offsets_beyond_the_rows_are_not_read(offsets, kernels):
    offsets = torch.tensor(offsets, dtype=torch.int32)
    with pytest.raises(ValueError, match="must ascend from 0 to at most the 6 rows"):
        expert_ffn(torch.randn(6, M), make_weights(), offsets, "gelu", kernels=kernels)


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


NAN, INF = float("nan"), float("inf")
SOFT = {"router": "soft", "slots_per_expert": 1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_dim": 0}, r"model_dim \(0\) must be an integer of at least 1"),
        ({"num_experts": -1}, "num_experts.*-1.*at least 1"),
        ({"num_experts": True}, r"num_experts \(True\) must be an integer"),
        ({"top_k": 0}, "top_k.*0.*at least 1"),
        ({"num_shared_experts": 0.5}, r"num_shared_experts \(0.5\) must be an integer"),
        ({"router": "hash"}, "router.*hash.*linear, cosine"),
        ({"aux_loss": "z"}, "aux_loss.*z.*gshard"),
        ({"aux_loss": "load_importance_tutel"}, "load_importance_tutel.*gate_noise.*0.0"),
        ({"activation": "tanh"}, "activation.*tanh.*gelu"),
        ({"gate_activation": "relu"}, "gate_activation"),
        ({"balance": "none"}, "balance"),
        ({"hidden_dropout": 1.0}, "hidden_dropout.*1.0.*below 1"),
        ({"hidden_dropout": -0.1}, "hidden_dropout.*-0.1.*at least 0"),
        ({"gate_noise": -1.0}, "gate_noise.*-1.0.*negative"),
        ({"gate_noise": INF}, "gate_noise"),
        ({"z_loss_weight": NAN}, "z_loss_weight"),
        ({"init_std": 0.0}, "init_std"),
        ({"capacity_factor": NAN}, "capacity_factor.*nan.*finite"),
        ({"choose_per_image": True}, "choose_per_image"),
        ({"router": "soft"}, "slots_per_expert"),
        ({"router": "soft", "slots_per_expert": 1.5}, r"slots_per_expert \(1.5\) must be an int"),
        (SOFT | {"balance": "bias"}, "balance"),
        ({"router": "expert_choice", "capacity_factor": 0.0}, "capacity_factor"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be(options, says):
    with pytest.raises(ValueError, match=says):
        MoELayer(make_config(**options))


@pytest.mark.parametrize(
    ("x", "call", "says"),
    [
        (torch.zeros(3, 5), {}, "5.*16"),
        (torch.tensor(1.0), {}, "x is 0-d.*model_dim"),
        (torch.zeros(3, M, dtype=torch.int64), {}, "x has dtype torch.int64.*floating-point"),
        ([[0.0] * M], {}, "x must be a tensor, not list"),
        (torch.zeros(3, M), {"mask": [True] * 3}, "mask must be a tensor, not list"),
        (torch.zeros(3, M), {"mask": torch.ones(3)}, "mask has dtype torch.float32.*bool"),
        (torch.zeros(3, M), {"top_k": 0}, "top_k.*0.*1"),
        (torch.zeros(3, M), {"capacity_factor": INF}, "capacity_factor.*inf.*finite"),
    ],
    ids=str,
)
def test_calls_that_cannot_be(x, call, says):
    with pytest.raises(ValueError, match=says):
        MoELayer(make_config())(x, **call)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "expected"),
    [(8, 4, 4), (8, 16, 16), (12, 8, 4), (8, 3, 1), (1, 7, 7)],
)
def test_the_largest_group(num_experts, num_ranks, expected):
    assert largest_group(num_experts, num_ranks) == expected


@pytest.mark.parametrize(
    ("group_size", "says"),
    [
        (3, r"num_experts \(4\) must be divisible by the expert-parallel size \(3\)"),
        (6, r"num_experts \(4\) must be a divisor of the expert-parallel size \(6\)"),
        (16, r"hidden_dim \(10\) must .* by the 4 ranks of one expert: num_experts \(4\).* of 16"),
        (12, r"hidden_dim \(10\) must be divisible by the 3 ranks"),
    ],
)
def test_experts_that_do_not_divide_over_the_ranks_name_both_values(group_size, says):
    with pytest.raises(ValueError, match=says):
        make_config(hidden_dim=10).shard(0, group_size)


def test_the_output_bias_is_cut_along_model_dim():
    sizes = {"hidden_dim": 12, "model_dim": 7}
    with pytest.raises(ValueError, match=r"model_dim \(7\) must be divisible by the 3 ranks"):
        make_config(**sizes).shard(0, 12)
    make_config(**sizes, output_bias=False).shard(0, 12)


def test_experts_that_return_another_shape():
    class Wide(nn.Module):
        def forward(self, rows, offsets):
            return rows.repeat(1, 2)

    layer = MoELayer(make_config(capacity_factor=0.0), experts=Wide())
    with pytest.raises(ValueError, match=r"\(13, 32\).*\(13, 16\)"):
        layer(torch.randn(13, M))


@pytest.mark.parametrize("num_tokens", [2, 5])
def test_num_tokens_that_does_not_fit_the_mask(num_tokens):
    mask = torch.tensor([True, False, True, True])
    message = rf"num_tokens is {num_tokens}, mask has 3 True values"
    with pytest.raises(ValueError, match=message):
        MoELayer(make_config())(torch.randn(4, M), mask=mask, num_tokens=num_tokens)


@pytest.mark.parametrize("options", [{"num_shared_experts": 1}, {"router": "soft"}])
def test_what_tutel_has_not(options):
    layer = MoELayer(make_config(slots_per_expert=2, **options))
    with pytest.raises(ValueError, match="which Tutel does not have"):
        to_tutel(layer.state_dict())


def test_the_norm_of_fp16_gradients_does_not_overflow():
    linear = nn.Linear(4, 1, bias=False).half()
    linear.weight.grad = torch.full((1, 4), 6e4, dtype=torch.float16)
    norm = clip_gradients(linear, 1.0)
    assert float(norm) == pytest.approx(120_000, rel=1e-3)
    assert linear.weight.grad.float().norm() == pytest.approx(1.0, rel=1e-2)


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


def test_a_norm_that_is_not_finite_changes_no_gradient():
    linear = nn.Linear(2, 1, bias=False)
    linear.weight.grad = torch.tensor([[torch.inf, 1.0]])
    clip_gradients(linear, 1.0)
    assert linear.weight.grad.tolist() == [[torch.inf, 1.0]]
