"""The backbone in mmdetection: registered, any image size, right under mmengine's
initialisation."""

import pytest
import torch
from torch import nn

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from mmdet.registry import MODELS

from moe_core import moe_layers
from swinv2_moe.detection import registry  # noqa: F401
from swinv2_moe.errors import UserError
from swinv2_moe.models import separate_aux_loss

TINY = {
    "embed_dim": 8,
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 1, 2, 2),
    "window_size": 4,
    "num_experts": 2,
}
TINY |= {"moe_blocks": ((), (), (1,), (0,)), "drop_path_rate": 0.0}


def make(**kwargs) -> nn.Module:
    """With norms as after some training: those that begin at zero would hide what attention and
    experts do."""
    torch.manual_seed(0)
    backbone = MODELS.build({"type": "SwinV2MoE", **TINY, **kwargs})
    for module in backbone.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return backbone


@pytest.mark.parametrize("size", [(136, 200), (32, 64), (33, 95), (800, 1344), (5, 3)])
def test_strides_and_channels(size):
    with torch.no_grad():
        maps = make().eval()(torch.randn(1, 3, *size))
    assert [x.shape[1] for x in maps] == [8, 16, 32, 64]
    expected = [[-(-side // stride) for side in size] for stride in (4, 8, 16, 32)]
    assert [list(x.shape[2:]) for x in maps] == expected


@pytest.mark.parametrize("form", ["swinv2_moe", "swin_moe"])
def test_images_of_leaves_the_padding_out(form):
    backbone = make(model=form, eval_capacity_factor=0.0).eval()
    images = torch.randn(2, 3, 96, 64)
    small = images[1:, :, :40, :50]
    with backbone.images_of([(96, 64), (40, 50)]):
        together = backbone(images)
    alone = backbone(small)
    for found, wanted in zip(together, alone, strict=True):
        height, width = wanted.shape[2:]
        torch.testing.assert_close(found[1:, :, :height, :width], wanted, rtol=1e-4, atol=1e-5)
        assert not found[1, :, height:].any()
    # forgotten afterwards
    assert (backbone(images)[0][1:, :, :10, :12] - alone[0][:, :, :10, :12]).abs().max() > 1e-3


def test_only_the_chosen_stages():
    maps = make(out_indices=(1, 3))(torch.randn(1, 3, 64, 64))
    assert [x.shape[1] for x in maps] == [16, 64]


def test_init_weights_leaves_the_trunk_alone():
    """mmengine's own would call timm's, and mmdet's detectors call it on every child."""
    from mmengine.model import BaseModule, Sequential

    parent = Sequential(make())
    assert isinstance(parent, BaseModule)
    before = {name: tensor.clone() for name, tensor in parent.state_dict().items()}
    parent.init_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in parent.state_dict().items())


@pytest.mark.parametrize("with_cp", [False, True])
def test_every_parameter_has_a_gradient(with_cp):
    """Also with recomputed activations. The auxiliary loss is attached, as for any detector, or
    separate."""
    backbone = make(with_cp=with_cp, moe={"gate_noise": 0.0}).train()
    routers = [layer.router.weight for layer in moe_layers(backbone).values()]
    images = torch.randn(1, 3, 64, 64)
    sum(0 * x.sum() for x in backbone(images)).backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []
    attached = [router.grad.clone() for router in routers]
    assert all(gradient.any() for gradient in attached)
    backbone.zero_grad()
    with separate_aux_loss(backbone):
        backbone(images)
    backbone.aux_loss().backward()
    for router, gradient in zip(routers, attached, strict=True):
        torch.testing.assert_close(router.grad, gradient)


def test_aux_loss_is_weighted():
    backbone = make(aux_loss_weight=0.25, moe={"gate_noise": 0.0}).train()
    backbone(torch.ones(1, 3, 64, 64))
    weighted = backbone.aux_loss()
    backbone.aux_loss_weight = 1.0
    backbone(torch.ones(1, 3, 64, 64))
    torch.testing.assert_close(weighted * 4, backbone.aux_loss())


def test_frozen_layers_do_not_train_or_see_noise():
    backbone = make(freeze_moe=True, moe={"gate_noise": 100.0}).train()
    layers = moe_layers(backbone).values()
    assert not any(p.requires_grad for layer in layers for p in layer.parameters())
    assert all(p.requires_grad for name, p in backbone.named_parameters() if ".moe." not in name)
    images = torch.randn(1, 3, 64, 64)
    first, second = backbone(images), backbone(images)
    assert backbone.aux_loss() is None
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    tuned = make(moe={"gate_noise": 100.0}).train()
    assert any(not torch.equal(a, b) for a, b in zip(tuned(images), tuned(images), strict=True))


def test_dense():
    backbone = make(num_experts=0).train()
    backbone(torch.randn(1, 3, 32, 32))
    assert backbone.aux_loss() is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": "swin"}, r"backbone.model \('swin'\) must be one of swinv2_moe, swin_moe"),
        (
            {"out_indices": (0, 1)},
            r"backbone.out_indices \(\[0, 1\]\) must end with the last stage \(3\)",
        ),
        ({"out_indices": 3}, r"backbone.out_indices \(3\) must be a list"),
        ({"moe_blocks": ((7,),)}, "block 7 of stage 0, which has 1 blocks"),
        (
            {"pretrained_window_sizes": (0,)},
            r"backbone.pretrained_window_sizes \(\(0,\)\) must have a number for each",
        ),
        ({"window_size": (7, 7, 7)}, r"4 stage window sizes, got \(7, 7, 7\)"),
        ({"expert_strategy": "fast"}, r"backbone.expert_strategy \('fast'\) must be 'auto', None"),
        ({"expert_strategy": {"r": -1}}, r"backbone.expert_strategy .*: r \(-1\) must be"),
        ({"expert_strategy": {"s": 1}}, r"backbone.expert_strategy .*unexpected keyword"),
        (
            {"init_cfg": {"type": "Pretrained"}},
            r"backbone.init_cfg \(\{'type': 'Pretrained'\}\) must be None",
        ),
    ],
)
def test_one_line_for_bad_values(kwargs, message):
    with pytest.raises(UserError, match=message) as raised:
        make(**kwargs)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pretrained": 123}, r"backbone.pretrained \(123\) must be a path or None"),
        ({"frozen_stages": 4}, r"backbone.frozen_stages \(4\) is not an argument of SwinV2MoE"),
        ({"img_size": 224}, r"backbone.img_size \(224\) is not an argument of SwinV2MoE"),
    ],
)
def test_wrong_arguments_are_type_errors_too(kwargs, message):
    """mmdetection's tests of a backbone expect a TypeError at construction."""
    with pytest.raises(UserError, match=message) as raised:
        make(**kwargs)
    assert isinstance(raised.value, TypeError)
    assert "\n" not in str(raised.value)
