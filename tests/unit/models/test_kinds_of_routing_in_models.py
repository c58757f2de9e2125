"""Models whose experts choose, or mix, tokens; results that do not depend on the batch."""

import pytest
import timm
import torch

from moe_core import moe_layers
from swinv2_moe.models import SwinTransformerV2MoE

SWIN = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
SWIN |= {"window_size": 4, "num_classes": 10, "num_experts": 4, "moe_blocks": ((1,), (1,))}


def make_model(**options) -> SwinTransformerV2MoE:
    torch.manual_seed(0)
    return SwinTransformerV2MoE(**SWIN | options)


# Kinds of routing with which the logits of an image do not depend on the rest of its batch.
INVARIANT = {
    "linear": {},
    "linear, K = 2": {"top_k": 2, "normalize_gates": True},
    "cosine": {"router": "cosine", "top_k": 2},
    "bias": {"balance": "bias"},
    "soft": {"router": "soft"},
    "expert choice in an image": {"router": "expert_choice", "choose_per_image": True},
}
VIT = {
    "name": "vit_tiny_patch16_224",
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}


def alone_and_together(model, size: int):
    """Logits of seven images, one by one and in one batch."""
    images = torch.randn(7, 3, size, size, dtype=torch.float64)
    images[3:] = images[3:] * 0.01 + 2  # alike: they crowd a few experts
    model = model.double().eval()
    with torch.no_grad():
        return torch.cat([model(image[None]) for image in images]), model(images)


@pytest.mark.parametrize("kind", INVARIANT)
@pytest.mark.parametrize("name", ["swinv2_moe", "timm_moe"])
def test_logits_do_not_depend_on_the_batch(name, kind, randomize):
    """Also where the tokens of an image do not divide by the experts (ViT: 17 tokens)."""
    shape = {"swinv2_moe": SWIN, "timm_moe": VIT}[name]
    options = shape | {"num_experts": 4, "moe": INVARIANT[kind]}
    model = randomize(timm.create_model(name, **options))
    torch.testing.assert_close(*alone_and_together(model, shape["img_size"]))


@pytest.mark.parametrize(
    "options", [{"eval_capacity_factor": 0.5}, {"moe": {"router": "expert_choice"}}]
)
def test_a_capacity_over_the_batch_makes_logits_depend_on_it(options, randomize):
    model = randomize(timm.create_model("swinv2_moe", **SWIN | options))
    alone, together = alone_and_together(model, 16)
    assert (alone - together).abs().max() > 1e-3


def test_slots_and_hidden_units():
    model = make_model(moe={"router": "soft"})
    slots = [layer.config.slots_per_expert for layer in moe_layers(model).values()]
    assert slots == [8 * 8 // 4, 4 * 4 // 4]  # as many as an image has tokens in each stage
    model = make_model(moe={"router": "soft", "slots_per_expert": 3})
    assert [layer.config.slots_per_expert for layer in moe_layers(model).values()] == [3, 3]
    model = make_model(hidden_ratio=0.5)
    hidden = [layer.experts.w1.shape[1] for layer in moe_layers(model).values()]
    assert hidden == [4 * 16 // 2, 4 * 32 // 2]


@pytest.mark.parametrize("eval_capacity_factor", [0.0, 1.0])
def test_experts_choose_in_evaluation_as_in_training(eval_capacity_factor):
    """A factor of 0 drops nothing where tokens choose; here it is that of training."""
    moe = {"router": "expert_choice", "capacity_factor": 1.0}
    model = make_model(moe=moe, eval_capacity_factor=eval_capacity_factor).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        model(images)
    for layer, tokens in zip(moe_layers(model).values(), (2 * 64, 2 * 16), strict=True):
        assert layer.last_routing.counts.tolist() == [tokens // 4] * 4
