"""The norm of blocks with experts: behind the gate value, or before it."""

import re

import pytest
import torch
from torch import nn

from moe_core import moe_layers
from swinv2_moe.models import SwinTransformerMoE, SwinTransformerV2MoE
from swinv2_moe.models.padding import mask_blocks, stage_maps

SWIN = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
SWIN |= {"window_size": 4, "num_classes": 10, "num_experts": 4, "moe_blocks": ((1,), (1,))}


def make_model(model_type=SwinTransformerV2MoE, **options) -> nn.Module:
    torch.manual_seed(0)
    return model_type(**SWIN | options)


def test_names_and_initial_norms_are_those_of_post():
    expected, model = make_model(), make_model(moe_norm="before_gate")
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert not model.layers[0].blocks[1].norm2.weight.any()


def test_blocks_differ_only_in_the_place_of_the_norm():
    """Computed by hand for one block, on random weights."""
    model = make_model(moe_norm="before_gate").eval().double()
    block = model.layers[0].blocks[1]
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 8, 8, 16, dtype=torch.float64)
    with torch.no_grad():
        y = block(x)
        x = x + block.norm1(block._attn(x))
        branch, _ = block.mlp.moe(x, output_norm=block.norm2)
    torch.testing.assert_close(y, x + branch)


@pytest.mark.parametrize("position", ["post", "before_gate"])
def test_masked_blocks_equal_the_model(position):
    """Detection's form of the blocks, on images that fill the canvas."""
    model = make_model(moe_norm=position, always_partition=True).eval().double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, std=0.3)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = model.layers(model.patch_embed(images))
        *_, (y, _) = stage_maps(mask_blocks(model), images)
    torch.testing.assert_close(y, expected)


def test_gradients_of_the_task_reach_the_router():
    model = make_model(moe_norm="before_gate")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
    model(torch.randn(4, 3, 16, 16)).logsumexp(1).sum().backward()
    for layer in moe_layers(model).values():
        assert layer.router.weight.grad.norm() > 0


def test_refused():
    for options, line in (
        ({"moe_norm": "middle"}, "moe_norm ('middle') must be one of post, before_gate"),
        (
            {"moe_norm": "before_gate", "moe": {"router": "soft"}},
            "moe_norm ('before_gate') needs tokens that choose experts, not router 'soft'",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(line)):
            make_model(**options)
    # the released form has its norm before the experts
    with pytest.raises(ValueError, match="must be 'post' for SwinTransformerMoE"):
        make_model(SwinTransformerMoE, moe_norm="before_gate")
