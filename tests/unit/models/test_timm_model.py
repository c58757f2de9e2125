"""MODEL.TYPE timm: its configuration, dense weights by timm's rules, places of tokens, timm's
conventions."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay

from moe_core import moe_layers
from swinv2_moe.config import load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.models import add_experts, build_model, load_dense, measure_model
from swinv2_moe.models.timm_model import parse_arguments, timm_model
from swinv2_moe.train.routing import record_choices

NAME = "vit_tiny_patch16_224"
SIZES = {"patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2}
SMALL = {"name": NAME, "img_size": 32, "num_classes": 5, "num_experts": 4, **SIZES}
SMALL |= {"moe_blocks": ((1, 3),)}
ARGS = "patch_size=4 embed_dim=16 depth=2 num_heads=2"
KEYS = "MODEL.TYPE timm MODEL.NAME vit_tiny_patch16_224 DATA.IMG_SIZE 16"
KEYS += " MODEL.MOE.NUM_EXPERTS 4 MODEL.MOE.BLOCKS [[1]]"


@pytest.fixture
def make(randomize):
    """`make(**kwargs)`: a small model with weights that are nowhere zero."""

    def make(**kwargs):
        return randomize(timm.create_model("timm_moe", **SMALL | kwargs))

    return make


def configure(*opts: str):
    return load_config(None, [*KEYS.split(), "MODEL.ARGS", ARGS, *opts])


def test_without_places_the_last_two_blocks_have_experts():
    model = timm.create_model("timm_moe", name=NAME, device="meta")
    assert list(moe_layers(model)) == ["blocks.10.mlp.moe", "blocks.11.mlp.moe"]
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)
    assert isinstance(model, VisionTransformer)


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
    dense = randomize(timm.create_model(NAME, img_size=32, num_classes=5, **SIZES))
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


def test_a_configured_model():
    config = configure("MODEL.ARGS", f"{ARGS} global_pool=avg")
    model = build_model(model_config(config), num_classes=7)
    assert isinstance(model, VisionTransformer)
    assert model.global_pool == "avg"
    assert list(moe_layers(model)) == ["blocks.1.mlp.moe"]
    assert model.classifier_names() == ("head.weight", "head.bias")
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)
    keys = ["MODEL.TYPE", "timm", "MODEL.NAME", NAME]
    dense = build_model(model_config(load_config(None, keys)), num_classes=7)
    assert moe_layers(dense) == {}


def test_images_are_those_that_timm_names_unless_keys_are_given():
    name = "vit_small_patch14_dinov2.lvd142m"
    config = load_config(None, ["MODEL.TYPE", "timm", "MODEL.NAME", name])
    assert (config.DATA.IMG_SIZE, config.TEST.CROP_RATIO) == (518, 1.0)
    assert config.DATA.MEAN == [0.485, 0.456, 0.406]
    opts = ["DATA.IMG_SIZE", "56", "DATA.MEAN", "[0.5, 0.5, 0.5]"]
    config = load_config(None, ["MODEL.TYPE", "timm", "MODEL.NAME", name, *opts])
    assert (config.DATA.IMG_SIZE, config.DATA.MEAN) == (56, [0.5, 0.5, 0.5])
    assert config.DATA.STD == [0.229, 0.224, 0.225]


def test_experts_compute_what_the_ffn_computes():
    """SiLU, gated, with a packed fc1 in timm's model; the keys of MODEL.MOE have their defaults."""
    keys = "MODEL.TYPE timm MODEL.NAME eva02_tiny_patch14_224 DATA.IMG_SIZE 28"
    keys += " MODEL.MOE.NUM_EXPERTS 4"
    with torch.device("meta"):
        model = build_model(model_config(load_config(None, keys.split())), num_classes=2)
    found = [layer.config for layer in moe_layers(model).values()]
    assert [(config.activation, config.gated) for config in found] == [("silu", True)] * 2


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_efficientnet"])
def test_any_model_is_a_dense_trunk(name):
    """Also one without blocks with MLPs, and one that takes no rate of stochastic depth."""
    keys = ["MODEL.TYPE", "timm", "MODEL.NAME", name]
    model = build_model(model_config(load_config(None, keys)), num_classes=3).eval()
    images = torch.randn(2, 3, 64, 64)
    logits, aux_loss = model.forward_with_aux(images)
    assert (logits.shape, float(aux_loss)) == ((2, 3), 0)
    weights = timm.create_model(name, num_classes=3).state_dict()
    load_dense(model, weights)
    other = timm.create_model(name, num_classes=3).eval()
    other.load_state_dict(weights)
    assert torch.equal(model(images), other(images))


def test_weights_of_other_sizes_and_channels_are_converted_as_timm_does(make, randomize):
    """Positions are resized and colours are summed; the classifier keeps its classes."""
    dense = randomize(timm.create_model(NAME, img_size=32, num_classes=5, **SIZES))
    model = make(img_size=64, in_chans=1)
    load_dense(model, dense.state_dict(), upcycle=True)
    assert model.pos_embed.shape == (1, 65, 16)
    colours = dense.patch_embed.proj.weight.sum(1, keepdim=True)
    torch.testing.assert_close(model.patch_embed.proj.weight, colours)
    assert torch.equal(model.head.weight, dense.head.weight)
    with pytest.raises(UserError, match=r"2 of another shape: head\.weight"):
        load_dense(make(num_classes=7), dense.state_dict())


def test_weights_with_experts_come_at_another_image_size(make):
    weights = make().state_dict()
    model = make(img_size=64)
    load_dense(model, weights)
    assert model.pos_embed.shape == (1, 65, 16)
    for name, tensor in model.state_dict().items():
        assert name == "pos_embed" or torch.equal(tensor, weights[name])


def test_weights_without_classifier_leave_it_missing(make, randomize):
    dense = randomize(timm.create_model(NAME, img_size=32, num_classes=0, **SIZES))
    with pytest.raises(UserError, match=r"2 missing: head\.weight, head\.bias"):
        load_dense(make(), dense.state_dict())


def test_weights_of_another_model_are_refused_in_one_line(make):
    with pytest.raises(UserError, match="num_batches_tracked is of torch") as raised:
        load_dense(make(), timm.create_model("test_resnet").state_dict())
    assert "\n" not in str(raised.value)


def test_a_size_that_a_model_does_not_take_is_named():
    keys = "MODEL.TYPE timm MODEL.NAME test_coatnet DATA.IMG_SIZE 50"
    with pytest.raises(UserError, match="NAME test_coatnet") as raised:
        measure_model(model_config(load_config(None, keys.split())), 3)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        ("test_convnext", 64, (2, 2, 2)),
        ("test_convnext2", 64, (2, 2, 2)),
        ("test_maxvit", 64, (2, 2, 2)),
        ("swin_s3_tiny_224", 224, (2, 7, 7)),
        ("beit_base_patch16_224", 32, (2, 2, 2)),
        ("hiera_tiny_224", 224, None),
        ("nest_tiny", 64, None),
        ("crossvit_9_240", 240, None),
    ],
)
def test_places_of_tokens_where_they_are_known(name, size, shape):
    """The last block's: not where a model reorders its tokens."""
    small = {"depth": 2, "embed_dim": 16, "num_heads": 2} if name.startswith("beit") else {}
    fixed = timm.get_pretrained_cfg(name).fixed_input_size
    model = timm.create_model(name, **({"img_size": size} if fixed else {}), **small)
    add_experts(model, "last 1", 4, upcycle=False).eval()
    with torch.no_grad(), record_choices(model) as choices:
        model(torch.randn(2, 3, size, size))
    found = [tuple(ids.shape[:3]) for ids in choices.values()]
    assert found == ([shape] if shape else [])


def test_names_of_both_classifiers():
    name = "deit_tiny_distilled_patch16_224"
    model = timm_model(name=name, args="depth=1", img_size=32, num_classes=3)
    heads = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
    assert model.classifier_names() == heads


def test_arguments_are_those_of_timms_scripts():
    found = parse_arguments("patch_size=4 class_token=False pool=avg sizes=(1,2)")
    assert found == {"patch_size": 4, "class_token": False, "pool": "avg", "sizes": (1, 2)}
    with pytest.raises(UserError, match="'depth' is not of the form NAME=VALUE"):
        parse_arguments("patch_size=4 depth")


@pytest.mark.parametrize(
    ("opts", "parts"),
    [
        (["MODEL.NAME", ""], ["MODEL.NAME is ''", "MODEL.TYPE timm needs"]),
        (["MODEL.NAME", "vit_tiny_pach16_224"], ["no such model", f"did you mean {NAME}?"]),
        (["MODEL.NAME", f"{NAME}.augreg_in"], ["no weights of the tag", "did you mean"]),
        (["MODEL.NAME", "swinv2_moe"], ["a model of this project"]),
        (["MODEL.TYPE", "swinv2_moe"], ["MODEL.NAME is 'vit_tiny", "needs MODEL.TYPE timm"]),
        (["MODEL.TYPE", "tim"], ["MODEL.TYPE", "'tim'", "did you mean timm?"]),
        (["MODEL.TYPE", "vit_moe"], ["'vit_moe', which has left", "MODEL.TYPE timm", NAME]),
        (["MODEL.VIT.DEPTH", "2"], ["MODEL.VIT is", "has left", "MODEL.ARGS"]),
        (["DATA.CHANNELS", "2"], ["DATA.CHANNELS is 2", "1, 3"]),
    ],
)
def test_bad_configurations_are_named_in_one_line(opts, parts):
    with pytest.raises(UserError) as raised:
        configure(*opts)
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("opts", "parts"),
    [
        (["MODEL.ARGS", "depth=a"], [f"MODEL.NAME {NAME}", "cannot build it with", "depth=a"]),
        (["MODEL.ARGS", "dept=2"], [f"MODEL.NAME {NAME}", "unexpected keyword argument 'dept'"]),
        (["MODEL.ARGS", "depth"], ["MODEL.ARGS", "'depth' is not of the form NAME=VALUE"]),
        (["MODEL.MOE.BLOCKS", "[[2]]"], ["block 2 of stage 0", "2 blocks"]),
        (["MODEL.MOE.BLOCKS", "[[], [1]]"], ["2 stages, the model has 1"]),
        (
            ["MODEL.NAME", "test_resnet", "MODEL.ARGS", ""],
            ["MODEL: ResNet has no block with an MLP"],
        ),
        (
            ["MODEL.NAME", "convnextv2_atto", "MODEL.ARGS", "", "MODEL.MOE.BLOCKS", "[[]]"],
            ["stages.3.blocks.0.mlp", "GlobalResponseNormMlp", "experts cannot replace it"],
        ),
    ],
)
def test_models_that_cannot_be_built_are_named_in_one_line(opts, parts):
    with pytest.raises(UserError) as raised:
        build_model(model_config(configure(*opts)), num_classes=2)
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
