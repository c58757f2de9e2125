"""Configuration: yacs defaults under the names Swin users know, merged strictly.

`load_config(file, opts)` is the one entry. Whatever cannot work stops there, in one line that names
the key, its value and what is allowed. A YAML file may name others to start from: `BASE:
[recipe.yaml]` (paths relative to the file).
"""

import ast
import copy
import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from yacs.config import CfgNode

from swinv2_moe.config_checks import check_config, flatten
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import MAX_YAML_CHARS, parse_yaml, read_bounded
from swinv2_moe.model_types import model_types

_MAX_FILES = 32  # that BASE may name, one by one and together

_C = CfgNode()
_C.OUTPUT = "output"  # run directory; tools/train.py --output overrides it
_C.SEED = 0
_C.PRINT_FREQ = 10  # optimiser steps between two logged steps
_C.SAVE_FREQ = 1  # epochs between two checkpoints; the best and the last epoch are always saved
_C.EVENT_LOG = False  # OUTPUT/events.log, in the MLPerf log format (needs the mlperf extra)
_C.DEVICE = "auto"
_C.TIMEOUT = 600  # seconds after which a rank gives up on ranks that do not answer
_C.AMP_ENABLE = False
_C.AMP_DTYPE = "bfloat16"
# torch.compile of the model; over several ranks its experts stay uncompiled, and it is untried
_C.COMPILE = False

_C.CHECKPOINT = CfgNode()
# optimiser steps between two checkpoints inside an epoch; 0: after epochs only
_C.CHECKPOINT.STEPS = 0
_C.CHECKPOINT.KEEP_LAST = 2  # besides the best
# of each layer in one save, in turn (not in the best and the last epoch's); 0: all
_C.CHECKPOINT.EXPERTS = 0
# memory per rank for saving while training goes on; beyond it, training waits
_C.CHECKPOINT.STAGING_MB = 4096

_C.DATA = CfgNode()
_C.DATA.DATASET = "digits"
# folder: holds train/ and val/ with a folder per class; list: what listed paths are relative to
_C.DATA.PATH = ""
#                    shards: what data/make_shards.py made
_C.DATA.TRAIN_LIST = ""  # list: one "path label" a line, or Swin's JSON map
_C.DATA.VAL_LIST = ""
# shards: places from which they are read in turn; ranks that divide it read each their own
_C.DATA.SHARD_STREAMS = 64
_C.DATA.BATCH_SIZE = 128  # images per rank per forward pass
# images per step over all ranks, however many they are; 0: as BATCH_SIZE says
_C.DATA.GLOBAL_BATCH_SIZE = 0
_C.DATA.IMG_SIZE = 192
_C.DATA.INTERPOLATION = "bicubic"
_C.DATA.MEAN = [0.485, 0.456, 0.406]  # ImageNet's, as timm and torchvision use them
_C.DATA.STD = [0.229, 0.224, 0.225]
_C.DATA.NUM_WORKERS = 2
_C.DATA.PIN_MEMORY = True
# of an image, more than any but a few cameras take; larger ones count as unreadable
_C.DATA.MAX_PIXELS = 120_000_000
# the run stops once more than this share of the images could not be read
_C.DATA.MAX_BAD_SHARE = 0.01

_C.MODEL = CfgNode()
# swinv2_moe: res-post-norm, cosine attention; swin_moe: the released pre-norm form; or another file
# models/*_moe.py. Each reads a group of keys that its file declares: MODEL.SWINV2, ...
_C.MODEL.TYPE = "swinv2_moe"
_C.MODEL.NUM_CLASSES = 0  # 0: as many as the data has
_C.MODEL.DROP_RATE = 0.0
_C.MODEL.ATTN_DROP_RATE = 0.0
_C.MODEL.DROP_PATH_RATE = 0.1
_C.MODEL.LABEL_SMOOTHING = 0.1
# a checkpoint directory of this project, or a dense SwinV2 .safetensors/.pth
_C.MODEL.PRETRAINED = ""
_C.MODEL.UPCYCLE = False  # PRETRAINED is dense: copy each dense FFN into every expert of its block
_C.MODEL.UPCYCLE_NOISE = 0.0  # std of noise on those copies, in units of the dense weights' own
_C.MODEL.NEW_HEAD = False  # PRETRAINED has other classes: leave its head out
# or take rows of its head: a file with the old class's number for each class, from 0
_C.MODEL.CLASS_MAP = ""

_C.MODEL.MOE = CfgNode()
_C.MODEL.MOE.NUM_EXPERTS = 0  # over all ranks; 0: the dense model
# ranks that share the experts; groups of so many are replicas; 0: all ranks
_C.MODEL.MOE.EXPERT_PARALLEL_SIZE = 0
# of those ranks. off: the plainest; fixed: the four keys below; auto: found in training
_C.MODEL.MOE.STRATEGY = "off"
# 0: weights travel; 1: tokens do; E < ranks: any divisor of ranks / E (moe_core ParallelStrategy)
_C.MODEL.MOE.R = 1
_C.MODEL.MOE.PIPELINE_DEGREE = 1  # chunks that travel while others are worked on
_C.MODEL.MOE.ALL_TO_ALL = "linear"  # or 2dh: inside the nodes, then between them; or registered
_C.MODEL.MOE.RANKS_PER_NODE = 0  # for 2dh; 0: as torchrun says
_C.MODEL.MOE.KERNELS = "auto"  # auto: triton on a GPU, else torch; or one of the two
# per stage, the blocks (from 0) whose FFN is a mixture of experts
_C.MODEL.MOE.BLOCKS = [[], [], [], []]
_C.MODEL.MOE.TOP_K = 1
# > 0: limit; 0: dropless; < 0: dropless up to the limit of its absolute value
_C.MODEL.MOE.CAPACITY_FACTOR = 1.25
_C.MODEL.MOE.EVAL_CAPACITY_FACTOR = 1.25
# in training each expert's rows are a multiple of it, as GPU kernels like (128); 0: off
_C.MODEL.MOE.ROUND_TO = 0
_C.MODEL.MOE.ROUTER = "linear"
_C.MODEL.MOE.GATE_NOISE = 1.0
_C.MODEL.MOE.NORMALIZE_GATES = False
_C.MODEL.MOE.BATCH_PRIORITIZED = True
_C.MODEL.MOE.AUX_LOSS = "load_importance"
_C.MODEL.MOE.AUX_LOSS_WEIGHT = 0.01
# the auxiliary loss looks at the batch of all ranks, not at each rank's own
_C.MODEL.MOE.GLOBAL_BALANCE = False
# routers and experts stay as PRETRAINED has them and route as in evaluation
_C.MODEL.MOE.FREEZE = False
_C.MODEL.MOE.INPUT_JITTER = 0.0
_C.MODEL.MOE.INPUT_DROPOUT = 0.0
_C.MODEL.MOE.HIDDEN_DROPOUT = 0.0  # after the experts' activation
_C.MODEL.MOE.OUTPUT_BIAS = True  # the second bias of each expert
_C.MODEL.MOE.INIT_STD = 0.02

_C.TRAIN = CfgNode()
_C.TRAIN.EPOCHS = 90
_C.TRAIN.WARMUP_EPOCHS = 10
# for 512 images a step; scaled linearly with the global batch, like the two below
_C.TRAIN.BASE_LR = 1.25e-4
_C.TRAIN.WARMUP_LR = 1.25e-7
_C.TRAIN.MIN_LR = 1.25e-6
_C.TRAIN.WEIGHT_DECAY = 0.1
_C.TRAIN.LAYER_DECAY = 1.0
_C.TRAIN.CLIP_GRAD = 3.0  # global norm over all ranks; 0: off
_C.TRAIN.ACCUMULATION_STEPS = 1
_C.TRAIN.USE_CHECKPOINT = False  # recompute activations in the backward pass
# FSDP2 shards the shared parameters, their gradients and moments over the ranks
_C.TRAIN.SHARD_TRUNK = False
_C.TRAIN.EMA_DECAY = 0.0  # 0: no averaged copy of the weights
_C.TRAIN.MAX_STEPS = 0  # for trials: stop here, in mid-epoch; 0: no limit
# the validation accuracy, in percent, whose first time is reported; 0: none
_C.TRAIN.TARGET_TOP1 = 0.0
# steps in a row with a loss or gradient not finite that are skipped; one more stops
_C.TRAIN.SKIP_NON_FINITE = 0
_C.TRAIN.OPTIMIZER = CfgNode()
_C.TRAIN.OPTIMIZER.NAME = "adamw"
_C.TRAIN.OPTIMIZER.EPS = 1e-8
_C.TRAIN.OPTIMIZER.BETAS = [0.9, 0.999]
_C.TRAIN.OPTIMIZER.MOMENTUM = 0.9

_C.AUG = CfgNode()
_C.AUG.SCALE = [0.08, 1.0]  # random resized crop: share of the area
_C.AUG.RATIO = [0.75, 1.3333333333333333]
_C.AUG.HFLIP = 0.5
_C.AUG.COLOR_JITTER = 0.4
_C.AUG.AUTO_AUGMENT = "rand-m9-mstd0.5-inc1"
_C.AUG.REPROB = 0.25
_C.AUG.REMODE = "pixel"
_C.AUG.RECOUNT = 1
_C.AUG.MIXUP = 0.8
_C.AUG.CUTMIX = 1.0
_C.AUG.MIXUP_PROB = 1.0
_C.AUG.MIXUP_SWITCH_PROB = 0.5
_C.AUG.MIXUP_MODE = "batch"

_C.TEST = CfgNode()
# resize the short side to IMG_SIZE / CROP_RATIO, then centre crop; else resize both sides
_C.TEST.CROP = True
_C.TEST.CROP_RATIO = 0.875


def default_config() -> CfgNode:
    """A mutable copy of every key with its default: those above and those of every model type."""
    defaults = _C.clone()
    for model_type in model_types().values():
        section = model_type.section
        defaults.MODEL[section.name] = CfgNode(copy.deepcopy(dict(section.defaults)))
    return defaults


def load_config(
    file: str | Path | None = None,
    opts: Sequence[str] = (),
    data: str | None = None,
    output: str | None = None,
) -> CfgNode:
    """Defaults, then `file` (its BASE files first), `data`, `output` and `opts` (KEY VALUE ...);
    checked and frozen.

    Args:
        data: DATA.PATH; a configuration of digits then reads a folder of images instead.
        output: OUTPUT, the run directory.

    Raises:
        UserError: a file that cannot be read, an unknown key, a wrong type, a value out of range, a
            contradiction.
    """
    config = default_config()
    if file is not None:
        _lay_over(config, _Files().values(Path(file)))
    if data is not None:
        config.DATA.PATH = data
        config.DATA.DATASET = "folder" if config.DATA.DATASET == "digits" else config.DATA.DATASET
    config.OUTPUT = output or config.OUTPUT
    merge_opts(config, opts)
    check_config(config)
    config.freeze()
    return config


def config_from_text(text: str, source: str, opts: Sequence[str] = ()) -> CfgNode:
    """The checked configuration that a checkpoint or single file holds as YAML, then `opts` (KEY
    VALUE ...).

    Raises:
        UserError: it is not one that this program knows; of `opts` what `load_config` raises.
    """
    config = default_config()
    try:
        content = parse_yaml(text) or {}
        if not isinstance(content, dict):
            raise ValueError(f"expected KEY: VALUE lines, found {type(content).__name__}")
        _lay_over(config, _checked(content))
        check_config(config)
    except (ValueError, UserError) as error:
        raise UserError(
            f"{source}: its configuration cannot be used ({one_line(str(error))})"
        ) from error
    merge_opts(config, opts)
    check_config(config)
    config.freeze()
    return config


def merge_opts(config: CfgNode, opts: Sequence[str]) -> None:
    """Lay `opts` (KEY VALUE ...) over a configuration, in place; values are not checked against
    each other.

    Raises:
        UserError: an unknown key or a value of the wrong type.
    """
    if len(opts) % 2:
        raise UserError(f"--opts takes pairs of KEY VALUE; {opts[-1]!r} has no partner")
    for name, text in zip(opts[::2], opts[1::2], strict=True):
        *groups, key = name.split(".")
        content: dict = {key: text}
        for group in reversed(groups):
            content = {group: content}
        _lay_over(config, _checked(content, source="--opts "))


def resolve_batch_size(config: CfgNode, world_size: int) -> CfgNode:
    """The configuration with DATA.BATCH_SIZE as DATA.GLOBAL_BATCH_SIZE, if given, makes it on so
    many ranks.

    Raises:
        UserError: it does not divide over them.
    """
    whole, accumulation = config.DATA.GLOBAL_BATCH_SIZE, config.TRAIN.ACCUMULATION_STEPS
    if not whole:
        return config
    if whole % (world_size * accumulation):
        raise UserError(
            f"DATA.GLOBAL_BATCH_SIZE is {whole}, it must be divisible by the number of ranks"
            f" ({world_size}) times"
            f" TRAIN.ACCUMULATION_STEPS ({accumulation})"
        )
    config = config.clone()
    config.defrost()
    config.DATA.BATCH_SIZE = whole // (world_size * accumulation)
    check_config(config)
    config.freeze()
    return config


class _Files:
    """Configuration files and what they set; each is read once, however many others name it in
    BASE."""

    def __init__(self):
        self._values: dict[str, dict[str, object]] = {}  # by path
        self._open: list[str] = []  # the file that is read, and those that it is a BASE of

    def values(self, file: Path) -> dict[str, object]:
        """`{"TRAIN.BASE_LR": 1e-3, ...}`: what the file's BASE files set, one after the other, then
        what it sets."""
        path = os.path.realpath(file)
        if path in self._open:
            raise UserError(f"config {file}: BASE names itself in a circle")
        if path in self._values:
            return self._values[path]
        if len(self._values) + len(self._open) > _MAX_FILES:
            raise UserError(f"config {file}: BASE names more than {_MAX_FILES} files in all")
        content = _read(file)
        bases = content.pop("BASE", [])
        _check_bases(file, bases)
        values = {}
        self._open.append(path)
        for base in bases:
            values |= self.values(file.parent / base)
        self._open.pop()
        self._values[path] = values | _checked(content, source=f"config {file}: ")
        return self._values[path]


def _read(file: Path) -> dict:
    try:
        content = parse_yaml(read_bounded(file, MAX_YAML_CHARS).decode()) or {}
    except OSError as error:
        raise UserError(f"config {file}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # also what is not UTF-8
        raise UserError(f"config {file}: not valid YAML ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"config {file}: expected KEY: VALUE lines, found {type(content).__name__}")
    return content


def _check_bases(file: Path, bases: object) -> None:
    if not (
        isinstance(bases, list)
        and all(isinstance(base, str) and "\0" not in base for base in bases)
    ):
        raise UserError(f"config {file}: BASE is {short(bases)}, it must be a list of files")
    if len(bases) > _MAX_FILES:
        raise UserError(
            f"config {file}: BASE has {len(bases):,} entries, at most {_MAX_FILES} are allowed"
        )


def _checked(
    content: dict, group: CfgNode | None = None, prefix: str = "", source: str = ""
) -> dict[str, object]:
    """`{"TRAIN.BASE_LR": 1e-3, ...}` of nested `content`, each value in the type of its default.

    Args:
        group: the defaults, None: all; `prefix` is its name with a dot.
        source: what messages begin with.
    """
    group = default_config() if group is None else group
    values = {}
    for key, value in content.items():
        name = prefix + (key if isinstance(key, str) else short(key))
        if key not in group:
            raise UserError(
                f"{source}unknown key {one_line(name[:200])} (value"
                f" {_shown(value)}){_nearest(name)}"
            )
        if not isinstance(group[key], CfgNode):
            values[name] = _coerce(name, value, group[key], source)
        elif isinstance(value, dict):
            values |= _checked(value, group[key], f"{name}.", source)
        else:
            keys = ", ".join(group[key])
            raise UserError(
                f"{source}{name} is a group of keys ({keys}), not a value ({_shown(value)})"
            )
    return values


def _lay_over(config: CfgNode, values: dict[str, object]) -> None:
    for name, value in values.items():
        *groups, key = name.split(".")
        _lookup(config, groups)[key] = value


def _coerce(name: str, value: object, default: object, source: str) -> object:
    """The value in the default's type: '1e-3' and 1 become floats, tuples become lists; nothing
    else is converted."""
    if isinstance(value, str) and not isinstance(default, str):
        value = _parse_value(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{source}{name} is {_shown(value)}, it must fit into 64 bits")
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, list) and isinstance(value, (list, tuple)):
        like = default[0] if default else 0  # lists that are empty by default hold block numbers
        return [_coerce(f"{name}[{i}]", v, like, source) for i, v in enumerate(value)]
    if type(value) is not type(default):
        raise UserError(
            f"{source}{name} is {_shown(value)} ({type(value).__name__}), it must be of type"
            f" {type(default).__name__}"
            f" like its default {default!r}"
        )
    return value


def _parse_value(text: str) -> object:
    """The Python literal in `text`, or `text`."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    # the last two where it nests too deeply
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _shown(value: object) -> str:
    return short(value, 200)


def _lookup(config: CfgNode, keys: Sequence[str]) -> object:
    for key in keys:
        config = config[key]
    return config


def _nearest(name: str) -> str:
    name = name[:200]
    known = list(flatten(default_config()))
    leaf = {key.rsplit(".", 1)[-1]: key for key in known}
    groups = {key.rsplit(".", n)[0] for key in known for n in range(1, key.count(".") + 1)}
    close = difflib.get_close_matches(name, [*groups, *known], n=1, cutoff=0.6)
    close = close or [
        leaf[key]
        for key in difflib.get_close_matches(name.rsplit(".", 1)[-1], leaf, n=1, cutoff=0.7)
    ]
    return (
        f"; did you mean {close[0]}?"
        if close
        else "; `python -m swinv2_moe.config` lists every key"
    )


if __name__ == "__main__":
    for key, value in flatten(default_config()).items():
        print(f"{key}: {value!r}")
