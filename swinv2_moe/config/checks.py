"""What values a configuration may have, alone and together."""

import difflib
import math
from collections.abc import Collection

from yacs.config import CfgNode

from moe_core import ACTIVATIONS, ALL_TO_ALLS, KERNELS, LOSSES, ROUTERS
from swinv2_moe.config.defaults import flatten
from swinv2_moe.errors import UserError
from swinv2_moe.model_types import model_section, model_type, model_types

# A registry holds what has been registered by the time of the check.
CHOICES: dict[str, Collection] = {
    "DEVICE": ("auto", "cpu", "cuda"),
    "AMP_DTYPE": ("bfloat16", "float16"),
    "DATA.DATASET": ("digits", "folder", "list", "shards", "cifar10", "cifar100", "imagenet"),
    "DATA.INTERPOLATION": ("nearest", "bilinear", "bicubic", "random"),
    "MODEL.MOE.KERNELS": KERNELS,
    "MODEL.MOE.STRATEGY": ("off", "fixed", "auto"),
    "MODEL.MOE.ALL_TO_ALL": ALL_TO_ALLS,
    "MODEL.MOE.ROUTER": ROUTERS,
    "MODEL.MOE.AUX_LOSS": LOSSES,
    "MODEL.MOE.ACTIVATION": ACTIVATIONS,
    "TRAIN.OPTIMIZER.NAME": ("adamw", "sgd"),
    "AUG.REMODE": ("const", "rand", "pixel"),
    "AUG.MIXUP_MODE": ("batch", "pair", "elem"),
}
_INFINITY = float("inf")
_RANGES = {  # inclusive
    "SEED": (0, 2**31),
    "PRINT_FREQ": (1, _INFINITY),
    "SAVE_FREQ": (1, _INFINITY),
    "TIMEOUT": (1, 10**6),
    "CHECKPOINT.STEPS": (0, _INFINITY),
    "CHECKPOINT.KEEP_LAST": (1, _INFINITY),
    "CHECKPOINT.EXPERTS": (0, _INFINITY),
    "CHECKPOINT.STAGING_MB": (0, _INFINITY),
    "DATA.SHARD_STREAMS": (1, _INFINITY),
    "DATA.BATCH_SIZE": (1, _INFINITY),
    "DATA.GLOBAL_BATCH_SIZE": (0, _INFINITY),
    "DATA.IMG_SIZE": (1, 2**16),
    "DATA.NUM_WORKERS": (0, _INFINITY),
    "DATA.MAX_PIXELS": (1, 178_956_970),  # Pillow opens none with more
    "DATA.MAX_BAD_SHARE": (0, 1),
    "MODEL.NUM_CLASSES": (0, _INFINITY),
    "MODEL.DROP_RATE": (0, 0.999),
    "MODEL.ATTN_DROP_RATE": (0, 0.999),
    "MODEL.DROP_PATH_RATE": (0, 0.999),
    "MODEL.LABEL_SMOOTHING": (0, 0.999),
    "MODEL.UPCYCLE_NOISE": (0, _INFINITY),
    "MODEL.MOE.NUM_EXPERTS": (0, _INFINITY),
    "MODEL.MOE.EXPERT_PARALLEL_SIZE": (0, _INFINITY),
    "MODEL.MOE.R": (0, _INFINITY),
    "MODEL.MOE.PIPELINE_DEGREE": (1, _INFINITY),
    "MODEL.MOE.RANKS_PER_NODE": (0, _INFINITY),
    "MODEL.MOE.TOP_K": (1, _INFINITY),
    "MODEL.MOE.CAPACITY_FACTOR": (-_INFINITY, _INFINITY),
    "MODEL.MOE.EVAL_CAPACITY_FACTOR": (-_INFINITY, _INFINITY),
    "MODEL.MOE.ROUND_TO": (0, _INFINITY),
    "MODEL.MOE.GATE_NOISE": (0, _INFINITY),
    "MODEL.MOE.AUX_LOSS_WEIGHT": (0, _INFINITY),
    "MODEL.MOE.INPUT_JITTER": (0, 0.999),
    "MODEL.MOE.INPUT_DROPOUT": (0, 0.999),
    "MODEL.MOE.HIDDEN_DROPOUT": (0, 0.999),
    "MODEL.MOE.INIT_STD": (1e-9, _INFINITY),
    "TRAIN.EPOCHS": (1, _INFINITY),
    "TRAIN.WARMUP_EPOCHS": (0, _INFINITY),
    "TRAIN.BASE_LR": (0, _INFINITY),
    "TRAIN.WARMUP_LR": (0, _INFINITY),
    "TRAIN.MIN_LR": (0, _INFINITY),
    "TRAIN.WEIGHT_DECAY": (0, _INFINITY),
    "TRAIN.LAYER_DECAY": (1e-3, 1),
    "TRAIN.CLIP_GRAD": (0, _INFINITY),
    "TRAIN.ACCUMULATION_STEPS": (1, _INFINITY),
    "TRAIN.EMA_DECAY": (0, 0.999999),
    "TRAIN.MAX_STEPS": (0, _INFINITY),
    "TRAIN.TARGET_TOP1": (0, 100),
    "TRAIN.SKIP_NON_FINITE": (0, _INFINITY),
    "TRAIN.OPTIMIZER.EPS": (0, _INFINITY),
    "TRAIN.OPTIMIZER.MOMENTUM": (0, 0.9999),
    "AUG.HFLIP": (0, 1),
    "AUG.COLOR_JITTER": (0, 1),
    "AUG.REPROB": (0, 1),
    "AUG.RECOUNT": (1, _INFINITY),
    "AUG.MIXUP": (0, _INFINITY),
    "AUG.CUTMIX": (0, _INFINITY),
    "AUG.MIXUP_PROB": (0, 1),
    "AUG.MIXUP_SWITCH_PROB": (0, 1),
    "TEST.CROP_RATIO": (0.1, 1),
}


def check_config(config: CfgNode) -> None:
    """Raise UserError for a value out of range or values that contradict each other."""
    flat = flatten(config)
    _check_choice("MODEL.TYPE", config.MODEL.TYPE, tuple(model_types()))
    section = model_type(config).section
    choices = CHOICES | {f"MODEL.{section.name}.IN_CHANS": (1, 3)}
    for name, allowed in choices.items():
        _check_choice(name, flat[name], allowed)
    trunk = {f"MODEL.{section.name}.{key}": limits for key, limits in section.ranges.items()}
    for name, limits in (_RANGES | trunk).items():
        _check_range(name, flat[name], *limits)
    _check_model(config)
    _check_recipe(config)


def _check_choice(name: str, value: object, allowed: Collection) -> None:
    if value in allowed:
        return
    close = difflib.get_close_matches(str(value), map(str, allowed), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"{name} is {value!r}, allowed: {', '.join(map(str, allowed))}{hint}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if low <= value <= high and math.isfinite(value):
        return
    limit = f"at least {low}" if high == _INFINITY else f"between {low} and {high}"
    limit = limit if math.isfinite(value) else "finite"
    raise UserError(f"{name} is {value}, it must be {limit}")


def _check_model(config: CfgNode) -> None:
    model_type(config).section.check(config)
    moe = config.MODEL.MOE
    if moe.NUM_EXPERTS and not any(moe.BLOCKS):
        raise UserError(
            f"MODEL.MOE.NUM_EXPERTS is {moe.NUM_EXPERTS} but MODEL.MOE.BLOCKS names no block to put"
            " them in"
        )
    if moe.NUM_EXPERTS and moe.TOP_K > moe.NUM_EXPERTS:
        raise UserError(
            f"MODEL.MOE.TOP_K is {moe.TOP_K}, it must be at most MODEL.MOE.NUM_EXPERTS"
            f" ({moe.NUM_EXPERTS})"
        )
    if moe.NUM_EXPERTS and moe.AUX_LOSS == "load_importance_tutel" and moe.GATE_NOISE == 0:
        raise UserError(
            "MODEL.MOE.AUX_LOSS is 'load_importance_tutel', it needs MODEL.MOE.GATE_NOISE (0.0)"
            " above 0"
        )


def _check_recipe(config: CfgNode) -> None:
    train, data, aug = config.TRAIN, config.DATA, config.AUG
    if train.WARMUP_EPOCHS >= train.EPOCHS and train.WARMUP_EPOCHS:
        raise UserError(
            f"TRAIN.WARMUP_EPOCHS is {train.WARMUP_EPOCHS}, it must be below TRAIN.EPOCHS"
            f" ({train.EPOCHS})"
        )
    if train.MIN_LR > train.BASE_LR:
        raise UserError(
            f"TRAIN.MIN_LR is {train.MIN_LR}, it must not exceed TRAIN.BASE_LR ({train.BASE_LR})"
        )
    if data.DATASET == "list" and not (data.TRAIN_LIST and data.VAL_LIST):
        raise UserError(
            "DATA.DATASET is 'list': DATA.TRAIN_LIST and DATA.VAL_LIST must name its two list files"
        )
    if data.DATASET not in ("digits", "list") and not data.PATH:
        raise UserError(
            f"DATA.DATASET is {data.DATASET!r}: DATA.PATH (or --data) must name its directory"
        )
    for name, value, length in (
        ("DATA.MEAN", data.MEAN, model_section(config).IN_CHANS),
        ("DATA.STD", data.STD, model_section(config).IN_CHANS),
        ("AUG.SCALE", aug.SCALE, 2),
        ("AUG.RATIO", aug.RATIO, 2),
        ("TRAIN.OPTIMIZER.BETAS", train.OPTIMIZER.BETAS, 2),
    ):
        if len(value) != length:
            raise UserError(f"{name} is {value}, it must have {length} entries")
    for name, pair in (("AUG.SCALE", aug.SCALE), ("AUG.RATIO", aug.RATIO)):
        if not 0 < pair[0] <= pair[1]:
            raise UserError(
                f"{name} is {pair}, it must be two positive numbers, the smaller one first"
            )
    if aug.SCALE[1] > 1:
        raise UserError(f"AUG.SCALE is {aug.SCALE}, it must not exceed 1")
    if not all(0 <= beta < 1 for beta in train.OPTIMIZER.BETAS):
        raise UserError(
            f"TRAIN.OPTIMIZER.BETAS is {train.OPTIMIZER.BETAS}, its entries must be from 0 to below"
            " 1"
        )
    if config.MODEL.UPCYCLE and not (config.MODEL.PRETRAINED and config.MODEL.MOE.NUM_EXPERTS):
        raise UserError(
            "MODEL.UPCYCLE is True: it needs dense weights (MODEL.PRETRAINED) and"
            " MODEL.MOE.NUM_EXPERTS"
        )
    if config.MODEL.MOE.FREEZE and not (config.MODEL.PRETRAINED and config.MODEL.MOE.NUM_EXPERTS):
        raise UserError(
            "MODEL.MOE.FREEZE is True: it needs MODEL.MOE.NUM_EXPERTS and trained ones"
            " (MODEL.PRETRAINED)"
        )
    if config.MODEL.NEW_HEAD and config.MODEL.CLASS_MAP:
        raise UserError(
            f"MODEL.NEW_HEAD is True: MODEL.CLASS_MAP ({config.MODEL.CLASS_MAP}) needs the old head"
        )
    if train.SHARD_TRUNK and config.COMPILE:
        raise UserError(
            "TRAIN.SHARD_TRUNK is True: it does not work with COMPILE (True), switch one of them"
            " off"
        )
    if min(data.STD) <= 0:
        raise UserError(f"DATA.STD is {data.STD}, its entries must be above 0")
    if (aug.MIXUP or aug.CUTMIX) and data.BATCH_SIZE % 2:
        raise UserError(
            f"DATA.BATCH_SIZE is {data.BATCH_SIZE}, AUG.MIXUP and AUG.CUTMIX need an even one"
        )
