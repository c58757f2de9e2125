"""swinv2_moe.detection.optim: parameter groups and steps of a detector."""

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import TINY_BACKBONE
from mmengine.optim import build_optim_wrapper

from moe_core.ops.native import instruction_sets
from swinv2_moe.detection import optim, run
from swinv2_moe.errors import UserError


class Model(nn.Module):
    """A backbone and a head, without mmdet's."""

    def __init__(self, **backbone) -> None:
        super().__init__()
        tiny = TINY_BACKBONE | {"drop_path_rate": 0.0, "moe": {"router": "cosine"}}
        torch.manual_seed(0)
        self.backbone = run.MODELS.build({"type": "SwinV2MoE", **tiny, **backbone})
        self.head = nn.Conv2d(64, 1, 3)

    def forward(self, images):
        return self.head(self.backbone(images)[-1]).mean() + self.backbone.aux_loss()


SGD = {"type": "SGD", "lr": 1.0}


def wrapper_of(model, layer_decay=1.0, **keys):
    config = {"type": "MoEOptimWrapper", "constructor": "LayerDecayConstructor"}
    config["optimizer"] = {"type": "AdamW", "lr": 0.1, "weight_decay": 0.05}
    config["paramwise_cfg"] = {"layer_decay": layer_decay}
    return build_optim_wrapper(model, config | keys)


def settings(model, wrapper) -> dict[str, tuple[float, float]]:
    found = {
        p: (g["lr"], g["weight_decay"]) for g in wrapper.optimizer.param_groups for p in g["params"]
    }
    return {name: found[p] for name, p in model.named_parameters() if p in found}


def test_two_groups_without_layer_decay():
    model = Model()
    wrapper = wrapper_of(model)
    assert sorted(group["weight_decay"] for group in wrapper.optimizer.param_groups) == [0.0, 0.05]
    found = settings(model, wrapper)
    assert len(found) == len(list(model.named_parameters()))
    spared = ("bias", "norm", "cpb_mlp", "logit_scale", "router", "experts.b", "q_bias", "v_bias")
    for name, (lr, decay) in found.items():
        assert lr == 0.1
        assert (decay == 0.0) == any(part in name for part in spared), name


def test_layer_decay():
    """The head learns at lr, the last block at 0.5 of it, each block below at 0.5 of that."""
    model = Model()
    found = settings(model, wrapper_of(model, 0.5))
    rates = {name: lr / 0.1 for name, (lr, _) in found.items()}
    assert rates["head.weight"] == rates["backbone.norms.0.weight"] == 1
    layers = "backbone.trunk.layers"
    expected = {
        f"{layers}.3.blocks.0.attn.qkv.weight": 0.5,
        f"{layers}.3.blocks.0.mlp.moe.experts.w1": 0.5,
        f"{layers}.2.blocks.1.mlp.moe.router.sim_matrix": 0.25,
        f"{layers}.2.blocks.0.attn.qkv.weight": 0.125,
        f"{layers}.0.blocks.0.attn.qkv.weight": 0.5**5,
        "backbone.trunk.patch_embed.proj.weight": 0.5**6,
    }
    assert {name: pytest.approx(rates[name]) for name in expected} == expected
    assert found[f"{layers}.2.blocks.1.mlp.moe.router.sim_matrix"][1] == 0
    assert len(wrapper_of(model, 0.5).optimizer.param_groups) <= 2 * 7


def test_frozen_parameters_are_left_out():
    model = Model(freeze_moe=True)
    wrapper = wrapper_of(model)
    assert not any(".moe." in name for name in settings(model, wrapper))
    assert len(settings(model, wrapper)) == sum(p.requires_grad for p in model.parameters())


@pytest.fixture
def cpu_features(monkeypatch):
    """`cpu_features(*words)`: those of the CPU; without words it computes in any dtype."""
    patch = partial(monkeypatch.setattr, instruction_sets, "cpu_words")
    return lambda *words: patch(lambda: frozenset(words))


@pytest.mark.parametrize(("dtype", "feature"), [("bfloat16", "amx_bf16"), ("float16", "asimdhp")])
def test_autocast_is_off_on_a_cpu_without_instructions(dtype, feature, cpu_features, monkeypatch):
    lines = []
    monkeypatch.setattr(optim, "print_log", lambda line, **_: lines.append(line))
    cpu_features("avx512f", feature)
    assert wrapper_of(Model(), dtype=dtype).dtype == getattr(torch, dtype)
    cpu_features("avx512f")
    wrapper = wrapper_of(Model(), dtype=dtype)
    assert (wrapper.dtype, wrapper.scaler.enabled) == (None, False)
    assert [line.partition(", because")[0] for line in lines] == [
        f"optim_wrapper.dtype is {dtype}: off"
    ]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_step_clips_by_the_norm_of_all(dtype, cpu_features):
    cpu_features()
    model = Model()
    wrapper = wrapper_of(model, dtype=dtype, clip_grad={"max_norm": 1e-3}, optimizer=SGD)
    before = [p.detach().clone() for p in model.parameters()]
    with wrapper.optim_context(model):
        loss = model(torch.randn(1, 3, 96, 96))
    wrapper.update_params(loss)
    moved = torch.cat(
        [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    )
    assert moved.norm() == pytest.approx(1e-3, rel=1e-2)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_half_precision_steps_over_an_overflow(cpu_features):
    cpu_features()
    model = Model()
    wrapper = wrapper_of(model, dtype="float16", optimizer=SGD)
    scale, weight = wrapper.scaler.scale, model.head.weight.detach().clone()
    wrapper.update_params(model.head.weight.sum() * float("inf"))
    assert torch.equal(model.head.weight, weight)
    assert wrapper.scaler.scale == scale / 2
    wrapper.update_params(model.head.weight.sum())
    torch.testing.assert_close(model.head.weight, weight - 1)
    restored = wrapper_of(model, dtype="float16", optimizer=SGD)
    restored.load_state_dict(wrapper.state_dict())
    assert restored.scaler.state() == wrapper.scaler.state()


def test_a_gradient_that_is_not_finite_ends_the_run():
    model = Model()
    wrapper, weight = wrapper_of(model), model.head.weight.detach().clone()
    with pytest.raises(UserError, match="the gradient norm is nan"):
        wrapper.update_params(model.head.weight.sum() * float("nan"))
    assert torch.equal(model.head.weight, weight)


def test_accumulation():
    model = Model()
    wrapper = wrapper_of(model, accumulative_counts=2, optimizer=SGD)
    weight = model.head.weight.detach().clone()
    wrapper.update_params(model.head.weight.sum())
    assert torch.equal(model.head.weight, weight)
    wrapper.update_params(model.head.weight.sum() * 3)
    torch.testing.assert_close(model.head.weight, weight - 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dtype": "int8"}, "optim_wrapper.dtype"),
        ({"clip_grad": {"type": "value", "clip_value": 1.0}}, "optim_wrapper.clip_grad"),
        ({"paramwise_cfg": {"custom_keys": {}}}, "knows layer_decay alone, not custom_keys"),
    ],
)
def test_one_line_for_bad_values(keys, message):
    with pytest.raises(UserError, match=message):
        wrapper_of(Model(), **keys)
