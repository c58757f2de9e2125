"""Names for timm.create_model.

Arguments of SwinTransformerV2MoE, such as `num_experts`, override those of a variant. `swinv2_moe`
and `swin_moe` are models of any size, `timm_moe` is a model of timm with experts: the files of
`export hub` use these three. `swinv2_moe_bundled_tiny` is the model of this package, with weights.
"""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.swin_transformer_v2 import checkpoint_filter_fn

from swinv2_moe.errors import UserError
from swinv2_moe.files import parse_json
from swinv2_moe.models.bundled import bundled_file
from swinv2_moe.models.protocol import MoEModel
from swinv2_moe.models.swin_moe import SwinTransformerMoE
from swinv2_moe.models.swinv2_moe import SwinTransformerV2MoE
from swinv2_moe.models.timm_model import timm_model
from swinv2_moe.models.timm_names import timm_description
from swinv2_moe.models.weight_files import read_metadata, read_weights

_LEFT = "eval_batch_prioritized"  # an argument in files of earlier versions
# The published placement of experts (arXiv 2206.03382, section 5), and that of smaller models.
_PUBLISHED_BLOCKS = ((), (), (1, 3, 5, 7, 9, 11, 13, 15, 17), (1,))
_SMALL = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24), "window_size": 12}
_SMALL |= {"moe_blocks": _PUBLISHED_BLOCKS}
_BASE = _SMALL | {"embed_dim": 128, "num_heads": (4, 8, 16, 32)}
_TINY = _SMALL | {"depths": (2, 2, 6, 2), "window_size": 8, "moe_blocks": ((), (), (1, 3, 5), (1,))}
_NANO = {"patch_size": 2, "embed_dim": 32, "depths": (1, 2, 2), "num_heads": (2, 4, 8)}
_NANO |= {"window_size": 4, "moe_blocks": ((), (1,), (1,))}  # of the quickstart
_V2, _RELEASED = SwinTransformerV2MoE, SwinTransformerMoE
# By name: class, arguments, side of an image, classes. The first two are of any size; without
# arguments, the small one.
_VARIANTS: dict[str, tuple[type, dict[str, Any], int, int]] = {
    "swinv2_moe": (_V2, _SMALL, 192, 1000),
    "swin_moe": (_RELEASED, _SMALL, 192, 1000),
    "swinv2_moe_nano_window4_16": (_V2, _NANO, 16, 10),
    "swinv2_moe_tiny_window8_256": (_V2, _TINY, 256, 1000),
    "swinv2_moe_small_window12_192": (_V2, _SMALL, 192, 21841),
    "swinv2_moe_base_window12_192": (_V2, _BASE, 192, 21841),
    "swin_moe_small_window12_192": (_RELEASED, _SMALL, 192, 21841),
    "swin_moe_base_window12_192": (_RELEASED, _BASE, 192, 21841),
}


def _cfg(size: int, classes: int) -> dict:
    """timm's pretrained configuration, of images of `size` px. `_create` adds `pool_size`."""
    return {
        "url": "",
        "num_classes": classes,
        "input_size": (3, size, size),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head.fc",
    }


_cfgs: Any = {f"{name}.untrained": _cfg(*sizes) for name, (_, _, *sizes) in _VARIANTS.items()}
_cfgs["timm_moe.untrained"] = {"url": "", "fixed_input_size": True}  # most are
_cfgs["swinv2_moe_bundled_tiny.in_package"] = _cfg(64, 1000)
default_cfgs = generate_default_cfgs(_cfgs)


def _create(cls: type, variant: str, pretrained: bool, variant_args: dict, kwargs: dict):
    args = {"num_experts": 8} | variant_args | kwargs
    args.pop(_LEFT, None)
    stages = tuple(range(len(args["depths"])))
    model: Any = build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"flatten_sequential": True, "out_indices": args.pop("out_indices", stages)},
        **args,
    )
    is_whole = isinstance(model, cls)  # not with `features_only`
    if is_whole:
        stride = model.feature_info[-1]["reduction"]
        sides = model.pretrained_cfg["input_size"][1:]
        model.pretrained_cfg["pool_size"] = tuple(-(-side // stride) for side in sides)
    return model


def _register(name: str, cls: type, arguments: dict[str, Any]) -> None:
    def create(pretrained: bool = False, **kwargs):
        return _create(cls, name, pretrained, arguments, kwargs)

    create.__name__ = name
    register_model(create)


for _name, (_class, _arguments, *_) in _VARIANTS.items():
    _register(_name, _class, _arguments)


@register_model
def timm_moe(pretrained: bool = False, **kwargs) -> MoEModel:
    """The model `name` of timm, by default with 8 experts in the last two blocks; other arguments
    are those of `timm_model`. Its weights are those of a file or directory with experts.

    Raises:
        UserError: no name, or as `timm_model`.
    """
    if not kwargs.get("name"):
        raise UserError("timm_moe needs the name of a model of timm: name='vit_small_patch16_224'")
    no_weights = {"url": "", "hf_hub_id": None, "file": None, "tag": ""}
    kwargs.pop(_LEFT, None)
    described = timm_description(kwargs["name"]) | no_weights | {"architecture": "timm_moe"}
    given = kwargs.pop("pretrained_cfg", None)
    if given is not None and not isinstance(given, str):
        described |= given if isinstance(given, dict) else given.to_dict()
    try:
        return build_model_with_cfg(
            timm_model,
            "timm_moe",
            pretrained,
            pretrained_cfg=described,
            pretrained_filter_fn=lambda state, model: model.convert_dense(state, "the weights"),
            feature_cfg={"feature_cls": "getter", "out_indices": kwargs.pop("out_indices", (-1,))},
            **{"num_experts": 8} | kwargs,
        )
    except UserError as error:
        if isinstance(error.__cause__, TypeError):
            raise error.__cause__ from None  # as timm's names do for unknown arguments
        raise


@register_model
def swinv2_moe_bundled_tiny(pretrained: bool = False, **kwargs) -> SwinTransformerV2MoE:
    """The model of this package, `bundled:tiny`. Its file says its size and its preprocessing.

    Raises:
        UserError: the file is not in this installation, or is damaged.
    """
    file = bundled_file("tiny")
    metadata = read_metadata(file)
    try:
        args = parse_json(metadata["model_args"])
        described = parse_json(metadata["data_config"])
    except (KeyError, ValueError) as error:
        raise UserError(f"{file}: its metadata cannot be used ({error})") from error
    for name, value in described.items():
        if isinstance(value, list):  # JSON has no tuples
            described[name] = tuple(value)
    known = default_cfgs["swinv2_moe_bundled_tiny"].default.to_dict()
    described["num_classes"] = args["num_classes"]
    if pretrained:  # not timm's reading of the file: its weights may be int8
        described["state_dict"] = read_weights(file)
    args["pretrained_cfg"] = known | described
    kwargs.pop("pretrained_cfg", None)
    model = _create(SwinTransformerV2MoE, "swinv2_moe_bundled_tiny", pretrained, args, kwargs)
    model.pretrained_cfg["state_dict"] = None
    return model
