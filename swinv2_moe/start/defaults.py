"""A training without --cfg: what a folder of pictures holds, and the settings that follow from it.

`choose` looks at the folder, chooses pretrained weights and applies RULES in their order. A key
that the user sets keeps its value, and the rules after it use that value. The batch size is found
by trying (`swinv2_moe.start.trial`), since it depends on the machine. This module does not import
torch, unless the architecture of weights has to be asked of timm.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from yacs.config import CfgNode

from swinv2_moe.config import as_opts, flatten, load_config
from swinv2_moe.config.load import values_of as values_of_opts
from swinv2_moe.errors import UserError
from swinv2_moe.models.bundled import PACKAGED, PREFIX, bundled_file, packaged_file
from swinv2_moe.models.section import TRUNKS, tiles
from swinv2_moe.start.facts import FROM_SCRATCH, Pictures, look
from swinv2_moe.start.weights import best_weights, described, minutes_for, trained_config

_ONLINE = "timm:swinv2_tiny_window8_256.ms_in1k"
_FEW_PER_CLASS = 50  # training pictures
_CHOOSING = ("expert_choice", "soft")  # routers whose experts choose: their capacity is a choice
_SMALL = 64  # pixels; models for such images are cheap enough for larger ones
# Keys of the weights' configuration that the machine, the data or the user decide.
_NOT_TAKEN = {"MODEL.PRETRAINED", "MODEL.NUM_CLASSES", "MODEL.CLASS_MAP", "MODEL.UPCYCLE"}
_NOT_TAKEN |= {"MODEL.MOE.EXPERT_PARALLEL_SIZE", "MODEL.MOE.STRATEGY", "MODEL.MOE.KERNELS"}
_NOT_TAKEN |= {"MODEL.MOE.FREEZE"}
_IMAGES = ("DATA.IMG_SIZE", "DATA.CHANNELS")


class Decision(NamedTuple):
    """Values of keys, and the reason in a few words."""

    values: Mapping[str, object]
    reason: str

    def __str__(self) -> str:
        keys = ", ".join(f"{key} {value}".rstrip() for key, value in self.values.items())
        return f"  {keys}: {self.reason}"


class Weights(NamedTuple):
    """What training starts from."""

    name: str  # MODEL.PRETRAINED; empty: random weights
    keys: dict[str, object]  # the model, and the size of its images
    line: str  # which were chosen, and why
    class_names: Sequence[str] = ()  # as far as they are known
    takes_any_size: bool = False  # as convolutions do


class Choice(NamedTuple):
    """The configuration of a run, and what is left to try.

    Attributes:
        lines: what was found and chosen, for the terminal.
        largest_batch: the largest batch to try, in pictures over all ranks; 0: DATA.BATCH_SIZE is
            given.
        sizes: keys and values of the sizes of image to try, the smallest first.
        trained: side of the images that the weights were trained on; 0: random weights, or the
            pictures have at most half of it, so that it adds nothing.
        given: keys that the user has set.
    """

    config: CfgNode
    lines: list[str]
    largest_batch: int
    sizes: list[dict[str, object]]
    trained: int
    given: frozenset[str]


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
        policy: the rule in words, which the documentation links to.
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
    given = values_of_opts(opts)
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
    weights = choose_weights(given, pictures.num_train)
    decisions = apply_rules(pictures, weights, given)
    file = None
    if not weights.name:
        file = FROM_SCRATCH
    taken = weights.keys | {"DATA.DATASET": "folder", "MODEL.PRETRAINED": weights.name}
    taken |= values_of(decisions)
    if file and given.get("MODEL.TYPE") == "timm":
        taken["MODEL.MOE.BLOCKS"] = []  # the file's are those of a model of three stages
    config = load_config(file, as_opts(taken) + list(opts), data, output or output_for(data))
    largest = 0
    if not {"DATA.BATCH_SIZE", "DATA.GLOBAL_BATCH_SIZE"} & set(given):
        largest = largest_batch(pictures.num_train)
    sizes = sizes_to_try(weights, given)
    shown = [str(pictures), weights.line, *map(str, decisions)]
    trained = weights.keys.get("DATA.IMG_SIZE")
    side = min(pictures.width, pictures.height)
    size = trained if isinstance(trained, int) and side > trained // 2 else 0
    return Choice(config, shown, largest, sizes, size, frozenset(given))


def apply_rules(
    pictures: Pictures, weights: Weights, given: Mapping[str, object]
) -> list[Decision]:
    """The values that RULES choose, and those that are given in their place, by reason."""
    by_reason: dict[str, dict[str, object]] = {}
    values = weights.keys | dict(given)
    for rule in RULES:
        answer = rule.choose(Situation(pictures, weights, values))
        if rule.key in given:
            answer = (given[rule.key], "given")
        if answer is None:
            continue
        values[rule.key], reason = answer
        by_reason.setdefault(reason, {})[rule.key] = values[rule.key]
    return [Decision(keys, reason) for reason, keys in by_reason.items()]


def values_of(decisions: Iterable[Decision]) -> dict[str, object]:
    return {key: value for one in decisions for key, value in one.values.items()}


def output_for(data: str) -> str:
    """The run directory for the folder `data`, if none is named."""
    return os.path.join("output", os.path.basename(os.path.abspath(data)))


# The weights


def choose_weights(given: Mapping[str, object], num_train: int) -> Weights:
    """The weights that MODEL.PRETRAINED names; otherwise the best there are (`best_weights`), with
    the reason.

    Raises:
        UserError: the named weights do not exist, or their architecture is not known.
    """
    name = given.get("MODEL.PRETRAINED")
    if name is None and given.get("MODEL.TYPE") == "timm" and given.get("MODEL.NAME"):
        name = f"timm:{given['MODEL.NAME']}"
    if name is None:
        name, why = best_weights(num_train, given)
        if name.startswith(PREFIX):
            try:
                bundled_file(name)
            except UserError as error:
                line = f"weights: random, so accuracy will be far lower ({error}"
                return Weights("", {}, f"{line}, online for example MODEL.PRETRAINED {_ONLINE})")
        weights = _named(name, given)
        return weights._replace(line=f"{weights.line}; {why}" if why else weights.line)
    if not name:
        return Weights("", {}, "weights: random, as MODEL.PRETRAINED says")
    assert isinstance(name, str)
    return _named(name, given)


def _named(name: str, given: Mapping[str, object]) -> Weights:
    """The weights of a value of MODEL.PRETRAINED."""
    upcycle = str(given.get("MODEL.UPCYCLE", ""))
    as_timms = given.get("MODEL.TYPE") == "timm"
    num_experts = given.get("MODEL.MOE.NUM_EXPERTS")
    copies = upcycle or ("weights" if num_experts else "")  # of dense weights
    if name.startswith("timm:"):
        return _weights_of_timm(name, name, copies, as_timms)
    if name == PACKAGED:
        packaged_file("MODEL.PRETRAINED")  # before imports that take seconds
        from swinv2_moe.data.classes import imagenet_names  # imports timm

        weights = _weights_of_timm(name, f"timm:tf_{PACKAGED}", copies, as_timms)
        return weights._replace(class_names=imagenet_names(1000))
    architecture, class_names = described(name)
    if architecture and "moe" not in architecture:
        weights = _weights_of_timm(name, f"timm:{architecture}", copies, as_timms)
        return weights._replace(class_names=class_names)
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
    if num_experts not in (None, trained.MODEL.MOE.NUM_EXPERTS):
        raise UserError(
            f"MODEL.MOE.NUM_EXPERTS is {num_experts}: MODEL.PRETRAINED {name} is {experts}; dense"
            " weights of timm take any number"
        )
    size = trained.DATA.IMG_SIZE
    trunk = trained.MODEL.NAME or trained.MODEL.TYPE
    line = f"weights: {name} ({trunk}, {experts}, trained at {size} px)"
    return Weights(name, keys, line, class_names)


def _model_keys(model_type: str) -> tuple[str, ...]:
    """The beginnings of the keys that describe a model of this type."""
    groups = filter(None, (TRUNKS[model_type].group, "MOE"))
    return ("MODEL.TYPE", "MODEL.NAME", "MODEL.ARGS", *(f"MODEL.{group}." for group in groups))


def _weights_of_timm(name: str, model: str, upcycle: str, as_timms: bool) -> Weights:
    """The weights `name` of a dense model of timm, `timm:MODEL`, or its copies in the experts of
    the last two blocks; of a SwinV2 in every other block of the last two stages."""
    from swinv2_moe.models.hub import timm_keys  # imports torch
    from swinv2_moe.models.timm_names import timm_description

    keys = timm_keys(model, as_timms)
    line = f"weights: {name} (dense, trained at {keys['DATA.IMG_SIZE']} px)"
    if upcycle:
        keys["MODEL.UPCYCLE"] = upcycle
    if upcycle and "MODEL.NAME" in keys:
        keys |= {"MODEL.MOE.NUM_EXPERTS": 8, "MODEL.MOE.TOP_K": 2}
        keys |= {"MODEL.MOE.NORMALIZE_GATES": True, "MODEL.MOE.CAPACITY_FACTOR": 0.0}
        line = f"weights: {name}, each FFN copied to experts in the last two blocks"
    elif upcycle:
        depths = keys["MODEL.SWINV2.DEPTHS"]
        assert isinstance(depths, list)
        blocks = [list(range(1, depth, 2)) for depth in depths]
        keys["MODEL.MOE.BLOCKS"] = [[] for _ in blocks[:-2]] + blocks[-2:]
        keys["MODEL.MOE.NUM_EXPERTS"] = 8
        keys["MODEL.MOE.EVAL_CAPACITY_FACTOR"] = 0.0
        line = f"weights: {name}, each FFN copied to experts in every other block"
    is_fixed = "MODEL.NAME" not in keys
    if not is_fixed:
        is_fixed = bool(timm_description(str(keys["MODEL.NAME"])).get("fixed_input_size"))
    return Weights(name, keys, line, takes_any_size=not is_fixed)


# The rules


def sizes_to_try(weights: Weights, given: Mapping[str, object]) -> list[dict[str, object]]:
    """The sizes of image that the frozen network is tried at, with the keys that belong to each.

    Of small pictures, too: a network sees more in 32 px that are enlarged to 64.
    """
    trained = weights.keys.get("DATA.IMG_SIZE")
    if not isinstance(trained, int) or "DATA.IMG_SIZE" in given or not _is_probed(weights, given):
        return []
    if weights.takes_any_size:
        return [{"DATA.IMG_SIZE": size} for size in (trained * 5 // 8 // 32 * 32, trained) if size]
    sizes = [trained // 2, trained]
    if trained <= _SMALL:
        sizes = [trained, trained * 3 // 2, trained * 2]
    pictures = Pictures("", 0, 0, [], 0, 0, 0.0)
    found = []
    for size in sizes:
        keys: dict[str, object] = {"DATA.IMG_SIZE": size}
        situation = Situation(pictures, weights, weights.keys | dict(given) | keys)
        window = _window_size(situation)
        if window and "MODEL.SWINV2.WINDOW_SIZE" not in given:
            keys["MODEL.SWINV2.WINDOW_SIZE"] = window[0]
        values = dict(situation.values) | keys
        chosen = values.get("MODEL.SWINV2.WINDOW_SIZE", 0)
        assert isinstance(chosen, int)
        if _can_tile(size, values, min(chosen, _window(situation, size) or chosen)):
            found.append(keys)
    return found


def _is_probed(weights: Weights, given: Mapping[str, object]) -> bool:
    """Whether training starts from a classifier on the frozen network."""
    return bool(weights.name) and not given.get("TRAIN.DISTILL.TEACHER")


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
    pictures, most = 20_000, 20
    if not _probes(situation):
        pictures, most = 60_000, 60
    epochs = min(max(10, round(pictures / situation.pictures.num_train)), most)
    return epochs, f"{pictures:,} pictures in all, in 10 to {most} passes"


def _probes(situation: Situation) -> bool:
    return _is_probed(situation.weights, situation.values)


def _base_lr(situation: Situation) -> tuple[object, str]:
    if _probes(situation):
        return 1.5e-3, _RATE
    return 2e-3, _RATE


def _rounds(share: float) -> Callable[[Situation], tuple[object, str] | None]:
    """Epochs between validations, or until training ends without a better one."""

    def choose_rounds(situation: Situation) -> tuple[object, str] | None:
        if not _probes(situation):
            return None
        return max(1, round(situation.number("TRAIN.EPOCHS") * share)), _FEW_LOOKS

    return choose_rounds


def _on_all(situation: Situation) -> tuple[object, str] | None:
    if not _probes(situation) or not situation.pictures.val_split:
        return None
    return True, "the held-out pictures are trained on at the end; --keep-held-out prevents it"


def _minutes(situation: Situation) -> tuple[object, str] | None:
    if "TRAIN.EPOCHS" in situation.values:
        return None
    return minutes_for(situation.pictures.num_train), "on a CPU; --minutes sets another limit"


def _warmup(situation: Situation) -> tuple[object, str]:
    epochs = int(situation.number("TRAIN.EPOCHS"))
    return min(max(1, epochs // 10), epochs // 2), "a tenth of the epochs"


def _share_of_rate(divisor: float) -> Callable[[Situation], tuple[object, str]]:
    """The learning rate before the warm-up, or at the end."""
    return lambda situation: (situation.number("TRAIN.BASE_LR") / divisor, "shares of that rate")


def _always(
    value: object, reason: str, where: Callable[[Situation], bool] = lambda situation: True
) -> Callable[[Situation], tuple[object, str] | None]:
    """This value, or none where the condition does not hold."""
    return lambda situation: (value, reason) if where(situation) else None


def _is_pretrained(situation: Situation) -> bool:
    return bool(situation.weights.name)


def _mixing(alpha: float) -> Callable[[Situation], tuple[object, str]]:
    """Mixup or cutmix of this strength, where the pictures of a batch can be mixed in pairs."""

    def choose_alpha(situation: Situation) -> tuple[object, str]:
        values = situation.values
        batch = values.get("DATA.BATCH_SIZE", 2)
        assert isinstance(batch, int)
        if not situation.weights.name:
            return 0.0, _SHORT
        if _has_few(situation):
            return 0.0, _FEW
        if values.get("TRAIN.DISTILL.TEACHER"):
            return 0.0, "the teacher's outputs are those of single pictures"
        if batch % 2 or values.get("DATA.GLOBAL_BATCH_SIZE"):
            return 0.0, "the batch of a rank is odd, or may be"
        return alpha, "mixed pictures keep the model from learning the pictures by heart"

    return choose_alpha


def _has_few(situation: Situation) -> bool:
    """Whether there are few training pictures of each class."""
    pictures = situation.pictures
    return pictures.num_train < _FEW_PER_CLASS * len(pictures.class_names)


def _crops(situation: Situation) -> tuple[object, str]:
    if _probes(situation) and _has_few(situation):
        return [0.7, 1.0], _FEW
    return [0.35, 1.0], _SHORT


def _capacity(situation: Situation) -> tuple[object, str] | None:
    """No limit of capacity for the weights' experts: a batch of 8 would drop a tenth of its
    tokens."""
    values = situation.values
    limited = values.get("MODEL.MOE.CAPACITY_FACTOR", 0)
    if values.get("MODEL.MOE.NUM_EXPERTS") and situation.weights.name and limited != 0:
        if values.get("MODEL.MOE.ROUTER") in _CHOOSING:
            return None
        return 0.0, "no token is dropped: in small batches many would be"
    return None


def _val_split_rule(situation: Situation) -> tuple[object, str] | None:
    split = situation.pictures.val_split
    return (split, "there is no val/") if split else None


_SHORT = "the schedule is short"
_FEW = "there are fewer than 50 pictures a class"
_FEW_LOOKS = "the best of few looks is hardly better than it seems"
_RATE = "AdamW's rate grows with the root of the batch; this one is for 512 pictures"

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
        "TRAIN.MINUTES",
        "10 on a CPU, 3 with fewer than 200 training images, unless the epochs are given",
        _minutes,
    ),
    Rule(
        "TRAIN.EPOCHS",
        "20,000 divided by the number of training images, from 10 to 20; without a fitted"
        " classifier 60,000, from 10 to 60. Fewer if they would take longer than `TRAIN.MINUTES`",
        _epochs,
    ),
    Rule(
        "TRAIN.PROBE",
        "with pretrained weights and without a teacher: training starts from a classifier that is"
        " fitted to the features of the frozen network",
        _always(
            True, "a classifier on the frozen network is the start, and the first result", _probes
        ),
    ),
    Rule(
        "TRAIN.BEST_BY",
        "`calibrated` in that case: of few pictures, the loss tells more than the accuracy",
        _always("calibrated", "of few pictures the loss tells more than the accuracy", _probes),
    ),
    Rule(
        "TRAIN.ON_ALL",
        "with `DATA.VAL_SPLIT`, in that case: the best model's training again, on all pictures",
        _on_all,
    ),
    Rule("VAL_FREQ", "a fifth of the epochs in that case", _rounds(0.2)),
    Rule("TRAIN.PATIENCE", "three fifths of the epochs in that case", _rounds(0.6)),
    Rule("TRAIN.WARMUP_EPOCHS", "a tenth of the epochs, at least 1, at most half", _warmup),
    Rule(
        "TRAIN.LR_SCALING",
        "`sqrt`: the rate grows with the root of the batch, as AdamW's should",
        _always("sqrt", _RATE),
    ),
    Rule(
        "TRAIN.BASE_LR",
        "2e-3 at a batch of 512, so 5e-4 at 32; from a fitted classifier 1.5e-3",
        _base_lr,
    ),
    Rule("TRAIN.WARMUP_LR", "a thousandth of `TRAIN.BASE_LR`", _share_of_rate(1000)),
    Rule("TRAIN.MIN_LR", "a hundredth of `TRAIN.BASE_LR`", _share_of_rate(100)),
    Rule(
        "TRAIN.LAYER_DECAY",
        "0.8 with pretrained weights: lower layers change less",
        _always(0.8, "lower layers, which are general, change less", _is_pretrained),
    ),
    Rule("TRAIN.WEIGHT_DECAY", "0.05", _always(0.05, "usual for fine-tuning")),
    Rule("MODEL.DROP_PATH_RATE", "0.05", _always(0.05, _SHORT)),
    Rule(
        "AUG.SCALE",
        "crops of 35 to 100% of the area; from a fitted classifier and with fewer than 50 pictures"
        " a class 70 to 100%",
        _crops,
    ),
    Rule(
        "MODEL.MOE.CAPACITY_FACTOR",
        "0, so that no token is dropped, where pretrained weights have experts",
        _capacity,
    ),
    Rule("AUG.AUTO_AUGMENT", "off", _always("none", _SHORT)),
    Rule("AUG.REPROB", "0", _always(0.0, _SHORT)),
    Rule(
        "AUG.MIXUP",
        "0.2 with pretrained weights; 0 with fewer than 50 pictures a class, with a teacher, where"
        " the batch of a rank is odd, or where `DATA.GLOBAL_BATCH_SIZE` is set",
        _mixing(0.2),
    ),
    Rule("AUG.CUTMIX", "0.5 with pretrained weights; 0 in the same cases", _mixing(0.5)),
    Rule("AMP_ENABLE", "`auto`", _always("auto", "mixed precision where it is faster")),
)
