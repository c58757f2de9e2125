"""A training without --cfg: what a folder of pictures holds, and the settings that follow from it.

`choose` looks at the folder, chooses pretrained weights and applies RULES in their order. A key
that the user sets keeps its value, and the rules after it use that value. The batch size is found
by trying (`swinv2_moe.train.trial`), since it depends on the machine. This module does not import
torch, unless the architecture of weights has to be asked of timm.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from yacs.config import CfgNode

from swinv2_moe.config import as_opts, config_from_text, flatten, load_config
from swinv2_moe.config.load import values_of
from swinv2_moe.config.tree import data_config
from swinv2_moe.data.images import read_header
from swinv2_moe.data.sources import ImageFiles, Sources, load_sources
from swinv2_moe.data.sources.folder import VALIDATION_FOLDERS
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import MAX_YAML_CHARS, parse_json, read_bounded, read_json
from swinv2_moe.models.bundled import NAMES, PREFIX, bundled_file
from swinv2_moe.models.section import TRUNKS, tiles

_ONLINE = "timm:swinv2_tiny_window8_256.ms_in1k"
FROM_SCRATCH = "imagenette_96"  # the configuration of a model without pretrained weights
_SMALL = 64  # pixels; models for such images are cheap enough for larger ones
_SAMPLE = 100  # pictures whose headers are read
_LEAST_PER_CLASS = 2  # training pictures
_MAX_META = 1 << 28  # bytes of a checkpoint's meta.json
# Keys of the weights' configuration that the machine, the data or the user decide.
_NOT_TAKEN = {"MODEL.PRETRAINED", "MODEL.NUM_CLASSES", "MODEL.CLASS_MAP", "MODEL.UPCYCLE"}
_NOT_TAKEN |= {"MODEL.UPCYCLE_NOISE", "MODEL.MOE.EXPERT_PARALLEL_SIZE", "MODEL.MOE.STRATEGY"}
_NOT_TAKEN |= {"MODEL.MOE.KERNELS", "MODEL.MOE.FREEZE"}
_IMAGES = ("DATA.IMG_SIZE", "DATA.CHANNELS")


class Pictures(NamedTuple):
    """What a folder holds."""

    path: str
    num_train: int
    num_val: int
    class_names: list[str]
    width: int  # medians of a sample, pixels
    height: int
    val_split: float  # DATA.VAL_SPLIT

    def __str__(self) -> str:
        where = "in a folder of their own"
        if self.val_split:
            where = f"held out, {self.val_split:.0%} of each class by file name"
        return (
            f"{self.path}: {len(self.class_names)} classes, {self.num_train:,} pictures to train on"
            f" and {self.num_val:,} to validate ({where}), most of about {self.width} x"
            f" {self.height} pixels"
        )


class Weights(NamedTuple):
    """What training starts from."""

    name: str  # MODEL.PRETRAINED; empty: random weights
    keys: dict[str, object]  # the model, and the size of its images
    line: str  # which were chosen, and why
    class_names: Sequence[str] = ()  # as far as they are known


class Choice(NamedTuple):
    """The configuration of a run, and what is left to try.

    Attributes:
        lines: what was found and chosen, for the terminal.
        largest_batch: the largest batch to try, in pictures over all ranks; 0: DATA.BATCH_SIZE is
            given.
    """

    config: CfgNode
    lines: list[str]
    largest_batch: int


@dataclass(frozen=True)
class Situation:
    """What rules decide by: the pictures, the weights, and the values of keys so far."""

    pictures: Pictures
    weights: Weights
    values: Mapping[str, object]

    def number(self, key: str) -> float:
        value = self.values[key]
        assert isinstance(value, int | float), key
        return value


class Rule(NamedTuple):
    """How the value of a key is chosen.

    Attributes:
        policy: the rule in words, for the documentation.
        choose: the value, and the reason in a few words; None leaves the key as it is.
    """

    key: str
    policy: str
    choose: Callable[[Situation], tuple[object, str] | None]


def choose(data: str, opts: Sequence[str] = (), output: str | None = None) -> Choice:
    """The configuration of a training on a folder of pictures.

    Args:
        data: the folder: `train/` and `val/` with a folder for each class, `train/` alone, or
            folders of classes.
        opts: KEY VALUE pairs, which override what is chosen.
        output: the run directory; None: as `output_for`.

    Raises:
        UserError: the folder cannot be trained on, weights that do not exist, or as `load_config`.
    """
    given = values_of(opts)
    if given.get("DATA.PATH", data) != data:
        raise UserError(
            f"DATA.PATH is {given['DATA.PATH']!r} and --data {data!r}: give one of them"
        )
    if given.get("MODEL.UPCYCLE") == "run":
        raise UserError(
            "MODEL.UPCYCLE is 'run': it continues a dense run with the same settings, which --cfg"
            " must name"
        )
    pictures = look(data, given)
    weights = choose_weights(given)
    chosen, lines = apply_rules(pictures, weights, given)
    file = None
    if not weights.name:
        file = FROM_SCRATCH
    taken = weights.keys | chosen | {"DATA.DATASET": "folder", "MODEL.PRETRAINED": weights.name}
    config = load_config(file, as_opts(taken) + list(opts), data, output or output_for(data))
    largest = 0
    if not {"DATA.BATCH_SIZE", "DATA.GLOBAL_BATCH_SIZE"} & set(given):
        largest = largest_batch(pictures.num_train)
    return Choice(config, [str(pictures), weights.line, *lines], largest)


def apply_rules(
    pictures: Pictures, weights: Weights, given: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """The values that RULES choose for keys that are not given, and a line for each reason."""
    chosen: dict[str, object] = {}
    shown: dict[str, list[str]] = {}  # keys and values by reason
    values = weights.keys | dict(given)
    for rule in RULES:
        answer = rule.choose(Situation(pictures, weights, values))
        if rule.key in given:
            answer = (given[rule.key], "given")
        if answer is None:
            continue
        value, reason = answer
        values[rule.key] = value
        if rule.key not in given:
            chosen[rule.key] = value
        shown.setdefault(reason, []).append(f"{rule.key} {value}".rstrip())
    return chosen, [f"  {', '.join(keys)}: {reason}" for reason, keys in shown.items()]


def output_for(data: str) -> str:
    """The run directory for the folder `data`, if none is named."""
    return os.path.join("output", os.path.basename(os.path.abspath(data)))


# The folder


def look(data: str, given: Mapping[str, object]) -> Pictures:
    """What the folder `data` holds. The headers of a sample of the pictures are read.

    Raises:
        UserError: it is no data set of at least two classes, or pictures cannot be read.
    """
    if given.get("DATA.DATASET", "folder") != "folder":
        raise UserError(
            f"DATA.DATASET is {given['DATA.DATASET']!r}: only a folder of pictures is trained on"
            " without --cfg"
        )
    path = os.path.expanduser(data)
    split = given.get("DATA.VAL_SPLIT", _val_split(path))
    settings = {"DATA.DATASET": "folder", "DATA.VAL_SPLIT": split}
    config = load_config(FROM_SCRATCH, as_opts(settings), data=path)
    sources = load_sources(data_config(config))
    num_train, names = len(sources.train), sources.class_names
    if len(names) < 2:
        raise UserError(
            f"--data {data}: has pictures of one class ({names[0]}), a classifier"
            " needs at least two: a folder for each class"
        )
    if num_train < _LEAST_PER_CLASS * len(names):
        raise UserError(
            f"--data {data}: has {num_train} pictures to train {len(names)} classes on, at least"
            f" {_LEAST_PER_CLASS} a class are needed (10 or more are recommended)"
        )
    bad_share = given.get("DATA.MAX_BAD_SHARE", config.DATA.MAX_BAD_SHARE)
    assert isinstance(bad_share, float)
    width, height = _sizes(data, sources, bad_share)
    return Pictures(data, num_train, len(sources.val), names, width, height, config.DATA.VAL_SPLIT)


def _val_split(path: str) -> float:
    """The share that is held out for validation: none where there is a folder for it."""
    has_folder = any(os.path.isdir(os.path.join(path, name)) for name in VALIDATION_FOLDERS)
    return 0.0 if has_folder else 0.2


def _sizes(data: str, sources: Sources, bad_share: float) -> tuple[int, int]:
    """Median width and height of a sample of the training pictures, in pixels.

    Raises:
        UserError: more than `bad_share` of the sample cannot be read.
    """
    source = sources.train
    assert isinstance(source, ImageFiles)
    count = min(_SAMPLE, len(source))
    widths, heights, unreadable = [], [], []
    for i in range(count):
        path = source.path(i * len(source) // count)
        try:
            width, height, _ = read_header(path)
        except ValueError as error:
            unreadable.append(f"{path} ({error})")
            continue
        widths.append(width)
        heights.append(height)
    if len(unreadable) > bad_share * count or not widths:
        raise UserError(
            f"--data {data}: {len(unreadable)} of {count} pictures that were looked at cannot be"
            f" read, the first: {one_line(unreadable[0])}; remove them, or raise DATA.MAX_BAD_SHARE"
        )
    return median_low(widths), median_low(heights)


# The weights


def choose_weights(given: Mapping[str, object]) -> Weights:
    """The weights that MODEL.PRETRAINED names; otherwise those of the package, if its file is
    there.

    Raises:
        UserError: the named weights do not exist, or their architecture is not known.
    """
    name = given.get("MODEL.PRETRAINED")
    if name is None and given.get("MODEL.TYPE") == "timm" and given.get("MODEL.NAME"):
        name = f"timm:{given['MODEL.NAME']}"
    if name is None:
        name = f"{PREFIX}{NAMES[0]}"
        try:
            bundled_file(name)
        except UserError as error:
            line = f"weights: random, so accuracy will be far lower ({error}"
            return Weights("", {}, f"{line}, online for example MODEL.PRETRAINED {_ONLINE})")
    if not name:
        return Weights("", {}, "weights: random, as MODEL.PRETRAINED says")
    assert isinstance(name, str)
    upcycle = str(given.get("MODEL.UPCYCLE", ""))
    as_timms = given.get("MODEL.TYPE") == "timm"
    if name.startswith("timm:"):
        return _weights_of_timm(name, name, upcycle, as_timms)
    architecture = _dense_model(name)
    if architecture:
        return _weights_of_timm(name, f"timm:{architecture}", upcycle, as_timms)
    trained, class_names = trained_config(name)
    values = flatten(trained)
    model = _model_keys(trained.MODEL.TYPE)
    keys = {key: values[key] for key in values if key.startswith(model) or key in _IMAGES}
    keys = {key: value for key, value in keys.items() if key not in _NOT_TAKEN}
    experts = "dense"
    if trained.MODEL.MOE.NUM_EXPERTS:
        experts = f"{trained.MODEL.MOE.NUM_EXPERTS} experts"
        if upcycle:
            raise UserError(
                f"MODEL.UPCYCLE is {upcycle!r}: it makes experts of dense weights, and"
                f" MODEL.PRETRAINED {name} has {experts}"
            )
    size = trained.DATA.IMG_SIZE
    title = trained.MODEL.NAME or trained.MODEL.TYPE
    line = f"weights: {name} ({title}, {experts}, trained at {size} px)"
    return Weights(name, keys, line, class_names)


def _model_keys(model_type: str) -> tuple[str, ...]:
    """The beginnings of the keys that describe a model of this type."""
    groups = filter(None, (TRUNKS[model_type].group, "MOE"))
    return ("MODEL.TYPE", "MODEL.NAME", "MODEL.ARGS", *(f"MODEL.{group}." for group in groups))


def trained_config(name: str) -> tuple[CfgNode, list[str]]:
    """The configuration that weights were trained with, and the names of their classes, empty if
    they are not known: of a run, of a checkpoint, or of a file of `convert-checkpoint export
    single`.

    Raises:
        UserError: there is no configuration.
    """
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    if name.startswith(PREFIX):
        path = bundled_file(name)
    where = f"MODEL.PRETRAINED {name}"
    if not path.exists() and not name.startswith("hf-hub:"):
        raise UserError(f"{where}: no such file or directory")
    try:
        text, class_names = _recorded(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{where}: cannot be read ({one_line(str(error))})") from error
    if text is None:
        named = _architecture(name)
        if named:
            raise UserError(
                f"{where}: is a {one_line(named)}; without --cfg only a dense model of timm can"
                " be used"
            )
        raise UserError(
            f"{where}: does not say what its model is; name a configuration by --cfg, or put"
            " timm's config.json beside it"
        )
    return config_from_text(text, where), class_names


def _recorded(path: Path) -> tuple[str | None, list[str]]:
    """The configuration, as YAML, and the names of the classes, as far as they are recorded."""
    content: dict[str, object] = {}
    if path.is_file() and path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            content |= file.metadata() or {}
        content["class_names"] = parse_json(str(content.get("class_names", "[]")))
    has_yaml = (path / "config.yaml").is_file()
    for meta in (path / "checkpoints" / "latest" / "meta.json", path / "meta.json"):
        if not meta.is_file():
            continue
        try:
            read = read_json(meta, _MAX_META)
        except (OSError, ValueError):
            if not has_yaml:
                raise
            continue  # a damaged checkpoint of a run, which may have others
        if isinstance(read, dict):
            content = read
    if has_yaml:
        content["config"] = read_bounded(path / "config.yaml", MAX_YAML_CHARS).decode()
    text, names = content.get("config"), content.get("class_names")
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        names = []
    return text if isinstance(text, str) else None, names


def _dense_model(name: str) -> str | None:
    """The dense model that a config.json of timm names, in a folder or beside a file."""
    found = _architecture(name)
    return found if "moe" not in found else None


def _architecture(name: str) -> str:
    """The architecture that a config.json of timm names; "" without one."""
    path = Path(os.path.expanduser(name.removeprefix("local-dir:")))
    folder = path
    if path.is_file():
        folder = path.parent
    if not (folder / "config.json").is_file():
        return ""
    from swinv2_moe.models.hub import read_timm_config  # imports torch

    found = read_timm_config(folder / "config.json").get("architecture")
    return found if isinstance(found, str) else ""


def _weights_of_timm(name: str, model: str, upcycle: str, as_timms: bool) -> Weights:
    """The weights `name` of a dense model of timm, `timm:MODEL`, or its copies in the experts of
    the last two blocks; of a SwinV2 in every other block of the last two stages."""
    from swinv2_moe.models.hub import timm_keys  # imports torch

    keys = timm_keys(model, as_timms)
    line = f"weights: {name} (dense, trained at {keys['DATA.IMG_SIZE']} px)"
    if upcycle and "MODEL.NAME" in keys:
        keys |= {"MODEL.MOE.NUM_EXPERTS": 8, "MODEL.MOE.TOP_K": 2}
        keys |= {"MODEL.MOE.NORMALIZE_GATES": True, "MODEL.MOE.CAPACITY_FACTOR": 0.0}
        line = f"weights: {name}, each FFN copied to 8 experts in the last two blocks"
    elif upcycle:
        depths = keys["MODEL.SWINV2.DEPTHS"]
        assert isinstance(depths, list)
        blocks = [list(range(1, depth, 2)) for depth in depths]
        keys["MODEL.MOE.BLOCKS"] = [[] for _ in blocks[:-2]] + blocks[-2:]
        keys["MODEL.MOE.NUM_EXPERTS"] = 8
        keys["MODEL.MOE.EVAL_CAPACITY_FACTOR"] = 0.0
        line = f"weights: {name}, each FFN copied to 8 experts in every other block"
    return Weights(name, keys, line)


# The rules


def largest_batch(num_train: int) -> int:
    """The most pictures of a step: a power of two, at least 20 steps an epoch, from 8 to 128."""
    wanted = min(max(8, num_train // 20), 128, num_train)
    return 1 << (wanted.bit_length() - 1)


def _image_size(situation: Situation) -> tuple[object, str] | None:
    pictures, values = situation.pictures, situation.values
    if "DATA.IMG_SIZE" not in situation.weights.keys:
        return None  # from random weights: the configuration's
    size, side = int(situation.number("DATA.IMG_SIZE")), min(pictures.width, pictures.height)
    if side <= size // 2 and _can_tile(size // 2, values, _window(situation, size)):
        return size // 2, f"half the weights' {size}, since the pictures are smaller"
    is_small = size <= _SMALL and side >= 2 * size
    if is_small and _can_tile(2 * size, values, _window(situation, size)):
        return 2 * size, f"twice the weights' {size}, since the pictures are larger"
    return size, "as the weights"


def _window(situation: Situation, size: int) -> int:
    """The window that covers as much of an image of `size` px as that of the weights does."""
    trained = situation.weights.keys["DATA.IMG_SIZE"]
    window = situation.weights.keys.get("MODEL.SWINV2.WINDOW_SIZE", 0)
    assert isinstance(trained, int)
    assert isinstance(window, int)
    return window * size // trained


def _can_tile(size: int, values: Mapping[str, object], window: int) -> bool:
    patch, depths = values.get("MODEL.SWINV2.PATCH_SIZE"), values.get("MODEL.SWINV2.DEPTHS")
    if depths is None:
        return False
    return tiles(size, CfgNode({"PATCH_SIZE": patch, "DEPTHS": depths, "WINDOW_SIZE": window}))


def _window_size(situation: Situation) -> tuple[object, str] | None:
    """The smallest windows that tile an image larger than those of the weights, up to windows that
    are as much larger as the image; None where the weights' own tile it, or none does."""
    keys = situation.weights.keys
    if "MODEL.SWINV2.WINDOW_SIZE" not in keys:
        return None
    size, trained = int(situation.number("DATA.IMG_SIZE")), keys["DATA.IMG_SIZE"]
    assert isinstance(trained, int)
    if size <= trained:
        return None
    smallest = keys["MODEL.SWINV2.WINDOW_SIZE"]
    assert isinstance(smallest, int)
    for window in range(smallest, _window(situation, size) + 1):
        if _can_tile(size, situation.values, window):
            if window == smallest:
                return None
            return window, "the smallest that tile the image, which those of the weights do not"
    return None


def _class_map(situation: Situation) -> tuple[object, str] | None:
    from swinv2_moe.data.classes import NO_CLASS, known_classes  # imports timm

    names = situation.pictures.class_names
    if not situation.weights.name:
        return None
    rows = known_classes(situation.weights.class_names, names)
    known = len(names) - rows.count(NO_CLASS)
    if not known:
        return "new", "the weights know none of the classes"
    reason = f"the weights know {known} of the {len(names)} classes by name, whose rows are kept"
    return "", reason


def _epochs(situation: Situation) -> tuple[object, str]:
    pictures = 30_000
    if not situation.weights.name:
        pictures = 60_000
    epochs = min(max(10, round(pictures / situation.pictures.num_train)), 60)
    return epochs, f"{pictures:,} pictures in all, in 10 to 60 passes"


def _warmup(situation: Situation) -> tuple[object, str]:
    epochs = int(situation.number("TRAIN.EPOCHS"))
    return min(max(1, epochs // 10), epochs // 2), "a tenth of the epochs"


def _share_of_rate(divisor: float) -> Callable[[Situation], tuple[object, str]]:
    """The learning rate before the warm-up, or at the end."""
    return lambda situation: (situation.number("TRAIN.BASE_LR") / divisor, "shares of that rate")


def _always(value: object, reason: str) -> Callable[[Situation], tuple[object, str]]:
    return lambda situation: (value, reason)


def _if_pretrained(value: object, reason: str) -> Callable[[Situation], tuple[object, str] | None]:
    return lambda situation: (value, reason) if situation.weights.name else None


def _mixing(alpha: float) -> Callable[[Situation], tuple[object, str]]:
    """Mixup or cutmix of this strength, where the pictures of a batch can be mixed in pairs."""

    def choose_alpha(situation: Situation) -> tuple[object, str]:
        values = situation.values
        batch = values.get("DATA.BATCH_SIZE", 2)
        assert isinstance(batch, int)
        if not situation.weights.name:
            return 0.0, _SHORT
        if values.get("TRAIN.DISTILL.TEACHER"):
            return 0.0, "the teacher's outputs are those of single pictures"
        if batch % 2 or values.get("DATA.GLOBAL_BATCH_SIZE"):
            return 0.0, "the batch of a rank is odd, or may be"
        return alpha, "mixed pictures keep the model from learning the pictures by heart"

    return choose_alpha


def _val_split_rule(situation: Situation) -> tuple[object, str] | None:
    split = situation.pictures.val_split
    return (split, "there is no val/") if split else None


_SHORT = "the schedule is short"
_RATE = "5e-4 for 32 pictures, and AdamW's rate grows with the root of the batch"

RULES = (
    Rule("DATA.VAL_SPLIT", "0.2 where there is no folder for validation", _val_split_rule),
    Rule(
        "DATA.IMG_SIZE",
        "that of the weights; half of it if the pictures' short side is at most that half; twice"
        " as much if the weights are for at most 64 px and the short side is at least twice that",
        _image_size,
    ),
    Rule(
        "MODEL.SWINV2.WINDOW_SIZE",
        "that of the weights; if such windows do not tile a larger `DATA.IMG_SIZE`, the smallest"
        " larger ones that do",
        _window_size,
    ),
    Rule(
        "MODEL.CLASS_MAP",
        "`new` with pretrained weights that know none of the classes by name; otherwise empty, and"
        " the known classes take over their rows of the classifier",
        _class_map,
    ),
    Rule(
        "TRAIN.EPOCHS",
        "30,000 divided by the number of training images (60,000 from random weights), from 10 to"
        " 60",
        _epochs,
    ),
    Rule("TRAIN.WARMUP_EPOCHS", "a tenth of the epochs, at least 1, at most half", _warmup),
    Rule(
        "TRAIN.LR_SCALING",
        "`sqrt`: the rate grows with the root of the batch, as AdamW's should",
        _always("sqrt", _RATE),
    ),
    Rule("TRAIN.BASE_LR", "2e-3 at a batch of 512, so 5e-4 at 32", _always(2e-3, _RATE)),
    Rule("TRAIN.WARMUP_LR", "a thousandth of `TRAIN.BASE_LR`", _share_of_rate(1000)),
    Rule("TRAIN.MIN_LR", "a hundredth of `TRAIN.BASE_LR`", _share_of_rate(100)),
    Rule(
        "TRAIN.LAYER_DECAY",
        "0.8 with pretrained weights: lower layers change less",
        _if_pretrained(0.8, "lower layers, which are general, change less"),
    ),
    Rule("TRAIN.WEIGHT_DECAY", "0.05", _always(0.05, "usual for fine-tuning")),
    Rule("MODEL.DROP_PATH_RATE", "0.05", _always(0.05, _SHORT)),
    Rule("AUG.SCALE", "crops of 35 to 100% of the area", _always([0.35, 1.0], _SHORT)),
    Rule("AUG.AUTO_AUGMENT", "off", _always("none", _SHORT)),
    Rule("AUG.REPROB", "0", _always(0.0, _SHORT)),
    Rule(
        "AUG.MIXUP",
        "0.2 with pretrained weights; 0 with a teacher, where the batch of a rank is odd, or where"
        " `DATA.GLOBAL_BATCH_SIZE` is set",
        _mixing(0.2),
    ),
    Rule("AUG.CUTMIX", "0.5 with pretrained weights; 0 in the same cases", _mixing(0.5)),
    Rule("AMP_ENABLE", "`auto`", _always("auto", "mixed precision where it is faster")),
)
