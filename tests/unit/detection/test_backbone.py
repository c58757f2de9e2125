"""The backbone in mmdetection: registered, any image size, right under mmengine's
initialisation."""

import pytest
import torch
from torch import nn

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import TINY_BACKBONE
from mmdet.registry import MODELS

from moe_core import moe_layers
from swinv2_moe.detection import registry  # noqa: F401
from swinv2_moe.errors import UserError
from swinv2_moe.models import separate_aux_loss

TINY = TINY_BACKBONE | {"drop_path_rate": 0.0}


def make(**kwargs) -> nn.Module:
    """With norms as after some training: those that begin at zero would hide what attention and
    experts do."""
    torch.manual_seed(0)
    backbone = MODELS.build({"type": "SwinV2MoE", **TINY, **kwargs})
    for module in backbone.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return backbone


def test_strides_and_channels():
    backbone = make().eval()
    for size in ((136, 200), (32, 64), (33, 95), (5, 3)):
        with torch.no_grad():
            maps = backbone(torch.randn(1, 3, *size))
        assert [x.shape[1] for x in maps] == [8, 16, 32, 64]
        expected = [[-(-side // stride) for side in size] for stride in (4, 8, 16, 32)]
        assert [list(x.shape[2:]) for x in maps] == expected
    maps = make(out_indices=(1, 3))(torch.randn(1, 3, 64, 64))
    assert [x.shape[1] for x in maps] == [16, 64]


@pytest.mark.parametrize("form", ["swinv2_moe", "swin_moe"])
def test_images_of_leaves_the_padding_out(form):
    backbone = make(model=form, eval_capacity_factor=0.0).eval().double()
    images = torch.randn(2, 3, 96, 64, dtype=torch.float64)
    small = images[1:, :, :40, :50]
    with backbone.images_of([(96, 64), (40, 50)]):
        together = backbone(images)
    alone = backbone(small)
    for found, wanted in zip(together, alone, strict=True):
        height, width = wanted.shape[2:]
        torch.testing.assert_close(found[1:, :, :height, :width], wanted)
        assert not found[1, :, height:].any()
    # forgotten afterwards
    assert (backbone(images)[0][1:, :, :10, :12] - alone[0][:, :, :10, :12]).abs().max() > 1e-3


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


# Arguments, and what the one line says of `backbone.<key>`
WRONG = {
    r"model \('swin'\) must be one of swinv2_moe, swin_moe": {"model": "swin"},
    r"out_indices \(\[0, 1\]\) must end with the last stage \(3\)": {"out_indices": (0, 1)},
    r"out_indices \(3\) must be a list": {"out_indices": 3},
    r"pretrained_window_sizes \(\(0,\)\) must have a number for each": {
        "pretrained_window_sizes": (0,)
    },
    r"expert_strategy \('fast'\) must be 'auto', None": {"expert_strategy": "fast"},
    r"expert_strategy .*: r \(-1\) must be": {"expert_strategy": {"r": -1}},
    r"expert_strategy .*unexpected keyword": {"expert_strategy": {"s": 1}},
    r"init_cfg \(\{'type': 'Pretrained'\}\) must be None": {"init_cfg": {"type": "Pretrained"}},
}
# mmdetection's tests of a backbone expect a TypeError at construction
WRONG_TYPES = {
    r"pretrained \(123\) must be a path or None": {"pretrained": 123},
    r"frozen_stages \(4\) is not an argument of SwinV2MoE": {"frozen_stages": 4},
    r"img_size \(224\) is not an argument of SwinV2MoE": {"img_size": 224},
}


@pytest.mark.parametrize("message", [*WRONG, *WRONG_TYPES])
def test_one_line_for_bad_values(message):
    kwargs = (WRONG | WRONG_TYPES)[message]
    with pytest.raises(UserError, match=rf"backbone\.{message}") as raised:
        make(**kwargs)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, TypeError) == (message in WRONG_TYPES)


def test_one_line_for_values_that_the_model_refuses():
    with pytest.raises(UserError, match="block 7 of stage 0, which has 1 blocks"):
        make(moe_blocks=((7,),))
    with pytest.raises(UserError, match=r"4 stage window sizes, got \(7, 7, 7\)"):
        make(window_size=(7, 7, 7))
