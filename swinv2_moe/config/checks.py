"""Checks of the values of a configuration, each key alone and several keys together."""

import difflib
import math
from collections.abc import Collection

from yacs.config import CfgNode

from moe_core import GATED_ACTIVATIONS
from moe_core.options import Option
from swinv2_moe.config.tree import flatten, key_options, layer_config, train_config
from swinv2_moe.data.section import DATASETS
from swinv2_moe.errors import UserError
from swinv2_moe.models.section import TRUNKS, ExpertsConfig

_SPLIT_DATASETS = ("folder", "imagenet")  # datasets that DATA.VAL_SPLIT can split


def choices() -> dict[str, Collection]:
    """The allowed values of each key that has a fixed list of them."""
    return {key: option.allowed() for key, option in key_options().items() if option.choices}


def check_config(config: CfgNode) -> None:
    """Raise UserError for a value out of range or values that contradict each other."""
    flat = flatten(config)
    if flat["MODEL.TYPE"] == "vit_moe":
        raise UserError(
            "MODEL.TYPE is 'vit_moe', which has left: MODEL.TYPE timm MODEL.NAME"
            " vit_tiny_patch16_224 builds it, with its sizes in MODEL.ARGS, such as"
            " 'patch_size=4 embed_dim=64 depth=4 num_heads=4 global_pool=avg'"
        )
    _check_choice("MODEL.TYPE", flat["MODEL.TYPE"], TRUNKS)
    trunk = TRUNKS[config.MODEL.TYPE]
    others = [other.group for other in TRUNKS.values() if other is not trunk]
    unused = tuple(f"MODEL.{group}." for group in others if group)
    used = {key: one for key, one in key_options().items() if not key.startswith(unused)}
    for name, option in used.items():
        if option.choices:
            _check_choice(name, flat[name], option.allowed())
    for name, option in used.items():
        if isinstance(flat[name], (int, float)):
            _check_range(name, flat[name], option)
    for name in ("MODEL.NAME", "MODEL.ARGS"):
        if flat[name] and flat["MODEL.TYPE"] != "timm":
            raise UserError(
                f"{name} is {flat[name]!r}: it needs MODEL.TYPE timm, which is"
                f" {flat['MODEL.TYPE']!r}"
            )
    trunk.check(config)
    _check_strategy(config.MODEL.MOE.STRATEGY)
    _check_experts(config)
    _check_schedule(config)
    _check_dataset(config)
    _check_lengths(config)
    _check_augmentation(config)
    _check_pretrained(config)


def check_settings(config: CfgNode) -> None:
    """Raise UserError for keys that would have no effect, or would end the run later.

    Checkpoints with such keys exist, so their configuration is not checked for them.
    """
    _check_distillation(config)
    _check_graph(config)
    class_map = config.MODEL.CLASS_MAP
    if class_map and not config.MODEL.PRETRAINED:
        raise UserError(
            f"MODEL.CLASS_MAP is {class_map!r}: it needs trained weights (MODEL.PRETRAINED)"
        )


def _check_distillation(config: CfgNode) -> None:
    teacher = config.TRAIN.DISTILL.TEACHER
    if not teacher:
        return
    for key in ("MIXUP", "CUTMIX"):
        if config.AUG[key]:
            raise UserError(
                f"AUG.{key} is {config.AUG[key]}: the outputs of TRAIN.DISTILL.TEACHER are computed"
                " once for each picture, which cannot be mixed; set AUG.MIXUP 0 AUG.CUTMIX 0"
            )


def _check_graph(config: CfgNode) -> None:
    """Check that a step can be captured: what it decides on the host stays as it is."""
    obstacle = train_config(config).obstacle_to_graph()
    if config.TRAIN.GRAPH is True and obstacle:
        raise UserError(f"TRAIN.GRAPH is True, but {obstacle}")


def _check_choice(name: str, value: object, allowed: Collection) -> None:
    if value in allowed:
        return
    texts = [str(choice) or "''" for choice in allowed]
    nearest = difflib.get_close_matches(str(value), texts, n=1)
    hint = ""
    if nearest:
        hint = f"; did you mean {nearest[0]}?"
    raise UserError(f"{name} is {value!r}, allowed: {', '.join(texts)}{hint}")


def _check_range(name: str, value: float, option: Option) -> None:
    if not math.isfinite(value):
        raise UserError(f"{name} is {value}, it must be finite")
    if not option.least <= value <= option.most:
        raise UserError(f"{name} is {value}, it must be {option.limits()}")


def _check_experts(config: CfgNode) -> None:
    moe = config.MODEL.MOE
    if not moe.NUM_EXPERTS:
        return
    if not any(moe.BLOCKS) and config.MODEL.TYPE != "timm":
        raise UserError(
            f"MODEL.MOE.NUM_EXPERTS is {moe.NUM_EXPERTS} but MODEL.MOE.BLOCKS names no block to put"
            " them in"
        )
    if moe.TOP_K > moe.NUM_EXPERTS:
        raise UserError(
            f"MODEL.MOE.TOP_K is {moe.TOP_K}, it must be at most MODEL.MOE.NUM_EXPERTS"
            f" ({moe.NUM_EXPERTS})"
        )
    if moe.AUX_LOSS == "load_importance_tutel" and moe.GATE_NOISE == 0:
        raise UserError(
            "MODEL.MOE.AUX_LOSS is 'load_importance_tutel', it needs MODEL.MOE.GATE_NOISE (0.0)"
            " above 0"
        )
    if moe.ACTIVATION in GATED_ACTIVATIONS and not moe.GATED:
        raise UserError(
            f"MODEL.MOE.ACTIVATION is {moe.ACTIVATION!r}, it needs MODEL.MOE.GATED (False) to be"
            " True"
        )
    try:
        layer_config({name.lower(): value for name, value in moe.items()})
    except ValueError as error:
        raise UserError(f"MODEL.MOE: {error}") from error


def _check_strategy(text: str) -> None:
    if text in ("auto", ExpertsConfig.strategy):
        return
    from moe_core.parallel import parse_strategy  # imports torch

    try:
        parse_strategy(text)
    except ValueError as error:
        raise UserError(f"MODEL.MOE.STRATEGY is {text!r}: {error}") from error


def order_words(config: CfgNode) -> None:
    """Write a checked MODEL.MOE.STRATEGY in one order of words: equal strategies, equal texts."""
    moe = config.MODEL.MOE
    if moe.STRATEGY in ("auto", ExpertsConfig.strategy):
        return
    from moe_core.parallel import parse_strategy  # imports torch

    strategy, ranks = parse_strategy(moe.STRATEGY)
    moe.STRATEGY = str(strategy).replace("=", "", 2)  # "r=1 d=2 2dh"
    if ranks:
        moe.STRATEGY += f" n{ranks}"


def _check_schedule(config: CfgNode) -> None:
    train = config.TRAIN
    if train.WARMUP_EPOCHS and train.WARMUP_EPOCHS >= train.EPOCHS:
        raise UserError(
            f"TRAIN.WARMUP_EPOCHS is {train.WARMUP_EPOCHS}, it must be below TRAIN.EPOCHS"
            f" ({train.EPOCHS})"
        )
    if train.MIN_LR > train.BASE_LR:
        raise UserError(
            f"TRAIN.MIN_LR is {train.MIN_LR}, it must not exceed TRAIN.BASE_LR ({train.BASE_LR})"
        )
    if train.SHARD_TRUNK and config.COMPILE:
        raise UserError(
            "TRAIN.SHARD_TRUNK is True: it does not work with COMPILE (True), switch one of them"
            " off"
        )


def _check_dataset(config: CfgNode) -> None:
    data = config.DATA
    dataset = DATASETS[data.DATASET]
    if dataset.needs_lists and not (data.TRAIN_LIST and data.VAL_LIST):
        raise UserError(
            f"DATA.DATASET is {data.DATASET!r}: DATA.TRAIN_LIST and DATA.VAL_LIST must name its two"
            " list files"
        )
    if dataset.needs_path and not data.PATH:
        raise UserError(
            f"DATA.DATASET is {data.DATASET!r}: DATA.PATH (or --data) must name its directory"
        )
    if data.VAL_SPLIT and data.DATASET not in _SPLIT_DATASETS:
        raise UserError(
            f"DATA.VAL_SPLIT is {data.VAL_SPLIT}: it splits the datasets"
            f" {' and '.join(_SPLIT_DATASETS)}, DATA.DATASET is {data.DATASET!r}"
        )


def _check_lengths(config: CfgNode) -> None:
    channels = config.DATA.CHANNELS
    for name, value, length in (
        ("DATA.MEAN", config.DATA.MEAN, channels),
        ("DATA.STD", config.DATA.STD, channels),
        ("AUG.SCALE", config.AUG.SCALE, 2),
    ):
        if len(value) != length:
            raise UserError(f"{name} is {value}, it must have {length} entries")
    if 0 < config.TEST.CROP_RATIO < 0.1:
        raise UserError(
            f"TEST.CROP_RATIO is {config.TEST.CROP_RATIO}, it must be 0 or between 0.1 and 1"
        )
    for key, values in (("MEAN", config.DATA.MEAN), ("STD", config.DATA.STD)):
        if not all(map(math.isfinite, values)):
            raise UserError(f"DATA.{key} is {values}, its entries must be finite")
    if min(config.DATA.STD) < 1e-6:
        raise UserError(f"DATA.STD is {config.DATA.STD}, its entries must be at least 1e-6")


def _check_augmentation(config: CfgNode) -> None:
    aug = config.AUG
    low, high = aug.SCALE
    if not 0 < low <= high:
        raise UserError(
            f"AUG.SCALE is {aug.SCALE}, it must be two positive numbers, the smaller one first"
        )
    if low * config.DATA.IMG_SIZE**2 < 1:
        raise UserError(
            f"AUG.SCALE is {aug.SCALE}: a crop of {low:g} of an image has less than 1 of its"
            f" {config.DATA.IMG_SIZE} x {config.DATA.IMG_SIZE} pixels (DATA.IMG_SIZE); the default"
            " begins with 0.08"
        )
    if aug.SCALE[1] > 1:
        raise UserError(f"AUG.SCALE is {aug.SCALE}, it must not exceed 1")
    if (aug.MIXUP or aug.CUTMIX) and config.DATA.BATCH_SIZE % 2:
        raise UserError(
            f"DATA.BATCH_SIZE is {config.DATA.BATCH_SIZE}, AUG.MIXUP and AUG.CUTMIX need an even"
            " one"
        )


def _check_pretrained(config: CfgNode) -> None:
    model = config.MODEL
    has_experts_and_weights = model.PRETRAINED and model.MOE.NUM_EXPERTS
    if model.UPCYCLE and not has_experts_and_weights:
        raise UserError(
            f"MODEL.UPCYCLE is {model.UPCYCLE!r}: it needs dense weights (MODEL.PRETRAINED) and"
            " MODEL.MOE.NUM_EXPERTS"
        )
    if model.UPCYCLE and model.MOE.GATED:
        raise UserError(
            f"MODEL.UPCYCLE is {model.UPCYCLE!r}: a dense FFN has no third weight, which"
            " MODEL.MOE.GATED (True) needs"
        )
    if model.UPCYCLE == "run" and model.CLASS_MAP:
        raise UserError(
            f"MODEL.CLASS_MAP is {model.CLASS_MAP!r}: with MODEL.UPCYCLE 'run' it must be ''"
        )
    if model.MOE.FREEZE and not has_experts_and_weights:
        raise UserError(
            "MODEL.MOE.FREEZE is True: it needs MODEL.MOE.NUM_EXPERTS and trained ones"
            " (MODEL.PRETRAINED)"
        )
