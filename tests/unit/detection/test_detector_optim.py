"""swinv2_moe.detection.optim: parameter groups and steps of a detector."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import TINY_BACKBONE
from mmengine.optim import build_optim_wrapper

from moe_core.ops.native import instruction_sets
from swinv2_moe.detection import hooks, optim, run
from swinv2_moe.detection.hooks import CycleHook
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


class Training:
    """mmengine's runner, as far as CycleHook sees it: epochs of ten steps, each of which takes a
    second, and validations of two seconds."""

    def __init__(
        self, monkeypatch, hook: CycleHook, epochs: int, groups: list[dict], done: int = 0
    ) -> None:
        self.epoch, self.iter, self.max_iters = done, 10 * done, 10 * epochs
        self.time = 1000.0
        self.optim_wrapper = SimpleNamespace(param_groups=groups)
        self.train_loop = SimpleNamespace(_max_epochs=epochs)
        self.rates, self.validated, self.saved, self.hook = [], [], [], hook
        monkeypatch.setattr(hooks.time, "monotonic", lambda: self.time)
        hook.before_train(self)

    def run(self, epochs: int = 1000) -> "Training":
        """Until the end, or after so many epochs more."""
        end = self.epoch + epochs
        while self.epoch < min(end, self.train_loop._max_epochs):
            for step in range(10):
                self.hook.before_train_iter(self, step)
                self.rates.append(self.optim_wrapper.param_groups[0]["lr"])
                self.iter, self.time = self.iter + 1, self.time + 1
            self.hook.after_train_epoch(self)
            self.epoch += 1
            last = self.epoch == self.train_loop._max_epochs
            if self.epoch % self.train_loop.save_interval == 0 or last:
                self.saved.append(self.epoch)
            if self.epoch % self.train_loop.val_interval == 0 or last:
                self.validated.append(self.epoch)
                self.time += 2
        return self


def test_a_cycle_of_epochs(monkeypatch):
    training = Training(monkeypatch, CycleHook(None, 5), 20, [{"lr": 0.2}, {"lr": 0.1}]).run()
    rates = training.rates
    assert len(rates) == 200
    assert rates[:2] == pytest.approx([0.01, 0.02], rel=1e-3)
    assert max(rates) == pytest.approx(0.2, rel=0.03)
    assert rates[100] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.002)
    assert training.optim_wrapper.param_groups[1]["lr"] == pytest.approx(0.001)
    assert len(training.validated) <= 6
    assert training.validated[-1] == training.saved[-1] == 20
    assert set(training.validated) < set(training.saved)
    assert 8 <= len(training.saved) <= 12


def test_a_cycle_ends_with_the_time_and_is_continued(monkeypatch):
    groups = [{"lr": 0.2}]
    whole = Training(monkeypatch, CycleHook(100.0, 3), 50, groups).run()
    assert whole.epoch == 10  # after nine, more than half an epoch is left
    assert len(whole.validated) in (3, 4)
    assert whole.rates[-1] < 0.01
    slow = Training(monkeypatch, CycleHook(2.0, 3, 1), 50, [{"lr": 0.2}]).run()
    assert slow.epoch == 1  # an epoch at least, over all of which the rate falls
    assert slow.rates[5] == pytest.approx(0.2 * (1 + math.cos(math.pi * 0.6)) / 2)
    groups = [{"lr": 0.2}]
    killed = Training(monkeypatch, CycleHook(100.0, 3), 50, groups).run(4)
    assert killed.epoch == 4
    saved = [dict(group) for group in groups]
    rest = Training(monkeypatch, CycleHook(100.0, 3), 50, saved, done=4).run()
    assert 8 <= rest.epoch <= 10
    assert rest.rates[0] == pytest.approx(killed.rates[-1], rel=0.1)
    assert rest.rates[-1] < 0.01
    assert Training(monkeypatch, CycleHook(100.0, 3), 50, saved, rest.epoch).run().rates == []
