"""The ViT with experts: timm's conventions, its configuration, places of tokens, dense weights."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay

from moe_core import moe_layers
from swinv2_moe.config import load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model, load_dense
from swinv2_moe.models.vit_moe import VisionTransformerMoE

NAMES = timm.list_models("vit_moe_*")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}
SMALL |= {"num_classes": 5, "num_experts": 4}
KEYS = "MODEL.TYPE vit_moe MODEL.VIT.PATCH_SIZE 4 MODEL.VIT.EMBED_DIM 16 MODEL.VIT.DEPTH 2"
KEYS += " MODEL.VIT.NUM_HEADS 2 DATA.IMG_SIZE 16 MODEL.MOE.NUM_EXPERTS 4 MODEL.MOE.BLOCKS [[1]]"


@pytest.fixture
def make(randomize):
    """`make(**kwargs)`: a small model with weights that are nowhere zero."""

    def make(**kwargs):
        name = "vit_moe_tiny_patch16_224"
        return randomize(timm.create_model(name, **SMALL | kwargs))

    return make


def configure(*opts: str):
    return load_config(None, [*KEYS.split(), *opts])


def test_names_and_places_of_the_experts():
    assert NAMES == ["vit_moe_small_patch16_224", "vit_moe_tiny_patch16_224"]
    for name in NAMES:
        model = timm.create_model(name, device="meta")
        assert list(moe_layers(model)) == [f"blocks.{i}.mlp.moe" for i in range(1, 12, 2)]
        assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize("size", [(32, 32), (40, 24), (64, 64)])
def test_any_image_size(make, size):
    images = torch.randn(2, 3, *size)
    assert make(img_size=size)(images).shape == (2, 5)
    assert make(dynamic_img_size=True)(images).shape == (2, 5)
    model = make()
    model.set_input_size(size)
    assert model(images).shape == (2, 5)
    assert model.input_shape() == (3, *size)


@pytest.mark.parametrize("kwargs", [{}, {"global_pool": "avg", "class_token": False}])
def test_token_maps_have_the_patches_where_they_are(make, kwargs):
    model = make(img_size=(16, 24), **kwargs)
    count = 6 + model.num_prefix_tokens
    numbers = torch.arange(2 * count).view(-1, 1)  # [T, K]
    maps = model.token_maps(numbers, torch.empty(2, count, 16))
    assert maps.shape == (2, 2, 3, 1)
    first = model.num_prefix_tokens
    assert (maps[0, ..., 0] - first).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="7 patches do not fill the model's 2 x 3"):
        model.token_maps(torch.arange(count + 1).view(-1, 1), torch.empty(1, count + 1, 16))


def test_an_upcycled_model_gives_the_dense_models_logits(make, randomize):
    dense = randomize(timm.create_model("vit_tiny_patch16_224", **SMALL | {"num_experts": None}))
    model = make(moe={"top_k": 2, "normalize_gates": True})
    kept = load_dense(model, dense.state_dict(), upcycle=True)
    assert kept == ["blocks.1.mlp.moe.router.weight", "blocks.3.mlp.moe.router.weight"]
    model, dense = model.double(), dense.double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(images), dense.eval()(images))
    model = make(img_size=64)  # dense weights of another image size
    load_dense(model, dense.state_dict())
    assert model.pos_embed.shape == (1, 65, 16)


def test_parameter_groups(make):
    model = make(moe={"router": "cosine"})
    exceptions = model.no_weight_decay()
    assert {"pos_embed", "cls_token", "blocks.1.mlp.moe.experts.b1"} <= exceptions
    assert "blocks.1.mlp.moe.router.temperature" in exceptions
    groups = param_groups_layer_decay(model, 0.1, exceptions, layer_decay=0.5)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    scales = {group["lr_scale"] for group in groups}
    assert scales == {0.5**depth for depth in range(6)}  # stem, four blocks, head


def test_recomputed_activations_give_the_same_gradients(make):
    images, gradients = torch.randn(2, 3, 32, 32, dtype=torch.float64), []
    for recompute in (False, True):
        model = make(moe={"gate_noise": 0.0}).double()
        model.set_grad_checkpointing(recompute)
        logits, aux_loss = model.forward_with_aux(images)
        (logits.square().mean() + aux_loss).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_configured_model():
    model = build_model(model_config(configure("MODEL.VIT.GLOBAL_POOL", "avg")), num_classes=7)
    assert isinstance(model, VisionTransformerMoE)
    assert list(moe_layers(model)) == ["blocks.1.mlp.moe"]
    assert model.classifier_names() == ("head.weight", "head.bias")
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)
    dense = build_model(model_config(load_config(None, ["MODEL.TYPE", "vit_moe"])), num_classes=7)
    assert moe_layers(dense) == {}


@pytest.mark.parametrize(
    ("opts", "parts"),
    [
        (["MODEL.TYPE", "vit_mo"], ["MODEL.TYPE", "'vit_mo'", "did you mean vit_moe?"]),
        (["MODEL.VIT.NUM_HEADS", "3"], ["MODEL.VIT.NUM_HEADS", "16", "3 heads"]),
        (["MODEL.VIT.DEPTH", "0"], ["MODEL.VIT.DEPTH is 0", "at least 1"]),
        (["MODEL.VIT.GLOBAL_POOL", "max"], ["GLOBAL_POOL", "'max'", "token, avg"]),
        (["DATA.CHANNELS", "2"], ["DATA.CHANNELS is 2", "1, 3"]),
        (["MODEL.VIT.DEPHT", "2"], ["MODEL.VIT.DEPHT", "did you mean MODEL.VIT.DEPTH?"]),
        (["DATA.IMG_SIZE", "18"], ["DATA.IMG_SIZE is 18", "MODEL.VIT.PATCH_SIZE", "16 or 20"]),
        (["MODEL.MOE.BLOCKS", "[[2]]"], ["MODEL.MOE.BLOCKS", "no block 2", "2 blocks"]),
        (["MODEL.MOE.BLOCKS", "[[1], []]"], ["MODEL.MOE.BLOCKS", "only stage"]),
        (["MODEL.MOE.BLOCKS", "[[], [1]]"], ["MODEL.MOE.BLOCKS", "last stage of the model is 0"]),
        (["MODEL.MOE.BLOCKS", "[[]]"], ["MODEL.MOE.NUM_EXPERTS is 4", "names no block"]),
    ],
)
def test_bad_configurations_are_named_in_one_line(opts, parts):
    with pytest.raises(UserError) as raised:
        configure(*opts)
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
