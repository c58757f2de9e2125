"""What timm users expect of the registered models: names, features, heads, sizes, optimisers."""

import pytest
import timm
import torch

from moe_core import moe_layers
from swinv2_moe.models import SwinTransformerMoE, SwinTransformerV2MoE

NANO, FOUR = "swinv2_moe_nano_window4_16", {"num_experts": 4}
V2 = {f"swinv2_moe_{size}_{at}" for size, at in (("nano", "window4_16"), ("tiny", "window8_256"))}
V2 |= {f"swinv2_moe_{size}_window12_192" for size in ("small", "base")}
RELEASED = {f"swin_moe_{size}_window12_192" for size in ("small", "base")}
# Small enough for seconds; of four stages, like the registered models
SMALL = {"img_size": 48, "window_size": 3, "embed_dim": 16, "num_heads": (1, 1, 2, 2)}
SMALL |= {"depths": (1, 1, 2, 1), "moe_blocks": ((), (), (1,), (0,))}


def images(size=16, channels=3):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_list_models():
    assert set(timm.list_models("swinv2_moe_*")) == V2 | {"swinv2_moe_bundled_tiny"}
    assert set(timm.list_models("swin_moe_*")) == RELEASED
    assert timm.list_models("swinv2_moe_*", pretrained=True) == []


@pytest.mark.parametrize("name", sorted(V2 | RELEASED))
def test_every_name_builds_with_its_experts(name):
    model = timm.create_model(name, device="meta")
    assert type(model) is (SwinTransformerMoE if name in RELEASED else SwinTransformerV2MoE)
    layers = moe_layers(model)
    if "window12" in name:
        blocks = [(2, i) for i in range(1, 18, 2)] + [(3, 1)]
        assert list(layers) == [f"layers.{i}.blocks.{j}.mlp.moe" for i, j in blocks]
    config = next(iter(layers.values())).config
    assert (config.num_experts, config.top_k, config.capacity_factor) == (8, 1, 1.25)
    assert (config.batch_prioritized, config.gate_noise) == (True, 1.0)
    assert (config.normalize_gates, config.aux_loss) == (False, "load_importance")
    sizes = model.pretrained_cfg
    features = model.forward_features(torch.empty(2, *sizes["input_size"], device="meta"))
    assert features.shape[-1] == model.num_features
    assert features.shape[1:3] == sizes["pool_size"]  # timm's name for height and width
    assert model.forward_head(features).shape == (2, sizes["num_classes"])
    if name == "swin_moe_small_window12_192":  # as published
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 173.3


@pytest.fixture(params=[NANO, "swin_moe_small_window12_192"])
def case(request):
    """A small variant by its name: how to build it, its image size, its channels."""
    kwargs = FOUR if request.param == NANO else FOUR | SMALL
    size, stages = (16, 3) if request.param == NANO else (48, 4)
    channels = [(32 if request.param == NANO else 16) * 2**i for i in range(stages)]

    def build(**more):
        return timm.create_model(request.param, **kwargs | more)

    return build, size, channels


def test_features_only(case):
    build, size, channels = case
    model = build(features_only=True)
    patch = 2 if size == 16 else 4
    reductions = [patch * 2**i for i in range(len(channels))]
    assert model.feature_info.channels() == channels
    assert model.feature_info.reduction() == reductions
    sides = [-(-size // reduction) for reduction in reductions]
    shapes = [tuple(f.shape) for f in model(images(size))]
    assert shapes == [(2, side, side, c) for side, c in zip(sides, channels, strict=True)]
    assert len(build(features_only=True, out_indices=(0, 1))(images(size))) == 2


def test_forward_intermediates(case):
    build, size, channels = case
    model = build().eval()
    final, features = model.forward_intermediates(images(size))
    assert [f.shape[1] for f in features] == channels
    torch.testing.assert_close(model.forward_head(final), model(images(size)))
    assert len(model.forward_intermediates(images(size), indices=1, intermediates_only=True)) == 1


def test_head_and_channels(case):
    build, size, channels = case
    model = build(num_classes=7)
    assert model(images(size)).shape == (2, 7)
    model.reset_classifier(3)
    assert model(images(size)).shape == (2, 3)
    assert model.get_classifier().out_features == 3
    model.reset_classifier(0)
    assert model(images(size)).shape == (2, channels[-1])
    assert build(num_classes=0)(images(size)).shape == (2, channels[-1])
    assert build(in_chans=1)(images(size, 1)).shape[0] == 2


def test_resizing(case):
    build, size, _ = case
    model, twin = build(num_classes=5).eval(), build(num_classes=5, img_size=2 * size).eval()
    with pytest.raises(AssertionError):
        model(images(2 * size))
    window = model.layers[0].blocks[0].window_size
    model.set_input_size((2 * size, 2 * size), window_size=window)
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(images(2 * size)), twin(images(2 * size)))
    model.set_input_size((3 * size, 2 * size))
    assert model(torch.randn(1, 3, 3 * size, 2 * size)).shape == (1, 5)


def test_a_typo_in_an_argument_is_refused():
    with pytest.raises(TypeError, match="num_expert"):
        timm.create_model(NANO, num_expert=4)
