"""Configuration files and KEY VALUE pairs, merged strictly over the defaults.

`load_config(file, opts)` is the main function. For invalid input it raises an error of one line,
with the key, its value and the allowed values. A YAML file may be based on other files: `BASE:
[recipe.yaml]` (paths relative to the file).
"""

import ast
import difflib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from yacs.config import CfgNode

from swinv2_moe.config.checks import check_config, check_settings, order_words
from swinv2_moe.config.defaults import default_config, flatten
from swinv2_moe.config.sections import CropConfig
from swinv2_moe.config_files import find_config
from swinv2_moe.dataset_registry import datasets
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import MAX_YAML_CHARS, parse_yaml, read_bounded

_log = logging.getLogger(__name__)
_GIVEN = "__given__"
# Words of other programs, or parts of several keys.
_OTHER_WORDS = {
    "LR": "TRAIN.BASE_LR",
    "LEARNING_RATE": "TRAIN.BASE_LR",
    "WD": "TRAIN.WEIGHT_DECAY",
    "BATCH": "DATA.BATCH_SIZE",
    "WORKERS": "DATA.NUM_WORKERS",
    "RESOLUTION": "DATA.IMG_SIZE",
    "EXPERTS": "MODEL.MOE.NUM_EXPERTS",
    "CAPACITY": "MODEL.MOE.CAPACITY_FACTOR",
    "AMP": "AMP_ENABLE",
    "WEIGHTS": "MODEL.PRETRAINED",
    "CHECKPOINT": "MODEL.PRETRAINED",
    "OUTPUT_DIR": "OUTPUT",
}
_MAX_FILES = 32  # limit for the files that BASE names, in one file and in total


class Retired(NamedTuple):
    """A key of earlier versions, which files and checkpoints may still have."""

    default: object  # other values are converted to its type
    # what holds now, for "KEY (value) is no key any more: ..."; or an example of `moved_to`
    became: str
    # With another value, trained weights computed something else: such values are refused.
    shapes_weights: bool = False
    moved_to: str = ""  # the key that has its value now


_STRATEGY_KEYS = {  # default, and how MODEL.MOE.STRATEGY says another value
    "MODEL.MOE.RANKS_PER_NODE": Retired(0, "'auto n8'", moved_to="MODEL.MOE.STRATEGY"),
    "MODEL.MOE.R": Retired(1, "'r0 d1 linear'", moved_to="MODEL.MOE.STRATEGY"),
    "MODEL.MOE.PIPELINE_DEGREE": Retired(1, "'r1 d4 linear'", moved_to="MODEL.MOE.STRATEGY"),
    "MODEL.MOE.ALL_TO_ALL": Retired("linear", "'r1 d1 2dh'", moved_to="MODEL.MOE.STRATEGY"),
    "MODEL.MOE.EXCHANGE": Retired(
        "counted", "'r1 d1 linear static'", moved_to="MODEL.MOE.STRATEGY"
    ),
}
RETIRED = {
    "TELEMETRY_SECONDS": Retired(5.0, "the machine is read every 5 seconds"),
    "DATA.PIN_MEMORY": Retired(True, "batches for a GPU are always pinned"),
    "DATA.MAX_PIXELS": Retired(120_000_000, "images beyond 120 million pixels are unreadable"),
    "DATA.CHECK_FILES": Retired(False, "`train --check-files` reads every image first"),
    "MODEL.DROP_RATE": Retired(0.0, "there is no dropout before the classifier"),
    "MODEL.ATTN_DROP_RATE": Retired(0.0, "there is no dropout of attention weights"),
    "MODEL.SWINV2.QKV_BIAS": Retired(True, "it is always True", shapes_weights=True),
    "MODEL.VIT.QKV_BIAS": Retired(True, "it is always True", shapes_weights=True),
    "MODEL.VIT.MLP_RATIO": Retired(4.0, "it is always 4", shapes_weights=True),
    **_STRATEGY_KEYS,
    "MODEL.MOE.CAPACITY_SCHEDULE": Retired(
        "", "the factor is MODEL.MOE.CAPACITY_FACTOR throughout, or follows CAPACITY_AUTO"
    ),
    "MODEL.MOE.CAPACITY_DROP_SHARE": Retired(0.01, "it is always 0.01"),
    "MODEL.MOE.BALANCE_RATE": Retired(1e-3, "it is always 0.001"),
    "MODEL.MOE.SLOTS_PER_EXPERT": Retired(
        0, "the slots together are as many as the tokens of an image", shapes_weights=True
    ),
    "MODEL.MOE.INPUT_JITTER": Retired(0.0, "the router sees the tokens as they are"),
    "MODEL.MOE.INPUT_DROPOUT": Retired(0.0, "the router sees the tokens as they are"),
    "MODEL.MOE.RANDOM_CHOICE_SCHEDULE": Retired("", "the router chooses from the first step on"),
    "MODEL.MOE.ROUND_TO": Retired(0, "numbers of rows are not rounded"),
    "MODEL.NEW_HEAD": Retired(False, "'new'", moved_to="MODEL.CLASS_MAP"),
    "MODEL.UPCYCLE_CONTINUE": Retired(False, "'run'", moved_to="MODEL.UPCYCLE"),
    "TEST.CROP": Retired(True, "0, which resizes both sides", moved_to="TEST.CROP_RATIO"),
    "TRAIN.EXPERT_WEIGHT_DECAY": Retired(-1.0, "experts have TRAIN.WEIGHT_DECAY"),
    "TRAIN.OPTIMIZER.BETAS": Retired([0.9, 0.999], "they are always 0.9 and 0.999"),
    "TRAIN.OPTIMIZER.MOMENTUM": Retired(0.9, "it is always 0.9"),
    "AUG.RATIO": Retired([0.75, 4 / 3], "crops have a width of 3/4 to 4/3 of their height"),
    "AUG.REMODE": Retired("pixel", "erased regions are filled with random pixels"),
    "AUG.RECOUNT": Retired(1, "one region is erased"),
    "AUG.MIXUP_PROB": Retired(
        1.0, "every batch is mixed; AUG.MIXUP 0 and AUG.CUTMIX 0 switch it off"
    ),
    "AUG.MIXUP_SWITCH_PROB": Retired(0.5, "mixup and cutmix are equally likely, if both are on"),
    "AUG.MIXUP_MODE": Retired("batch", "one ratio is drawn for a batch"),
}
# Keys that have retired ones' values, with the values beside which the latter may stand.
_OLD_VALUES: dict[str, Collection] = {
    "MODEL.MOE.STRATEGY": ("off", "fixed", "auto"),
    "MODEL.CLASS_MAP": ("",),
    "MODEL.UPCYCLE": (True, False),
}
# New values of such keys that do not contradict a retired one.
_SAME: dict[str, Collection] = {
    "MODEL.NEW_HEAD": ("new",),
    "MODEL.UPCYCLE_CONTINUE": ("weights", "run"),
    "TEST.CROP": (0,),
}
_LOWEST = {"MODEL.MOE.RANKS_PER_NODE": 0, "MODEL.MOE.R": 0, "MODEL.MOE.PIPELINE_DEGREE": 1}
_ONCE_BOOL = "MODEL.UPCYCLE"
# Values of keys that stay. Trained weights depend on them.
_RETIRED_VALUES = {("MODEL.MOE.NORM", "pre"): "pre-norm blocks are those of MODEL.TYPE swin_moe"}
_LAST_COMMIT = "d7f9e26"  # the last one that has the keys of RETIRED


def load_config(
    file: str | Path | None = None,
    opts: Sequence[str] = (),
    data: str | None = None,
    output: str | None = None,
) -> CfgNode:
    """Merge the defaults, `file` (its BASE files first), `data`, `output` and `opts` (KEY VALUE
    ...), in this order. The result is checked and frozen. A `~` in OUTPUT and MODEL.PRETRAINED is
    the home directory.

    Args:
        file: a path, or the name of a configuration of this project, such as "imagenette_96".
        data: DATA.PATH. If the configured dataset needs no files, such as digits, it is replaced by
            a folder of images.
        output: OUTPUT, the run directory.
        opts: KEY VALUE pairs. If TRAIN.EPOCHS is among them, a longer warm-up of the file is
            shortened.

    Raises:
        UserError: a file that cannot be read, an unknown key, a wrong type, a value out of range,
            or values that contradict each other.
    """
    values: dict[str, object] = {}
    if file is not None:
        values = _Files().values(find_config(file))
        if not values:
            raise UserError(f"config {file}: has no keys; `swinv2-moe configs` lists examples")
    from_opts = _from_opts(opts)
    given = translate(_merged(values, from_opts))
    config = default_config()
    _lay_over(config, given)
    if data is not None and "DATA.PATH" not in from_opts:
        config.DATA.PATH = data
    if data is not None and "DATA.DATASET" not in from_opts:
        dataset = datasets().get(config.DATA.DATASET)
        if dataset and not dataset.needs_files:
            config.DATA.DATASET = "folder"
    if output and "OUTPUT" not in from_opts:
        config.OUTPUT = output
    _shorten_warmup(config, opts)
    config.OUTPUT = os.path.expanduser(config.OUTPUT)
    config.MODEL.PRETRAINED = os.path.expanduser(config.MODEL.PRETRAINED)
    check_config(config)
    check_settings(config)
    order_words(config)
    config.__dict__[_GIVEN] = frozenset(given)  # as yacs keeps whether a node is frozen
    config.freeze()
    return config


def given_keys(config: CfgNode) -> frozenset[str] | None:
    """The keys that a file or `opts` of `load_config` has set; None if that is not known."""
    return config.__dict__.get(_GIVEN)


def _shorten_warmup(config: CfgNode, opts: Sequence[str]) -> None:
    """If the warm-up of a file is not shorter than the TRAIN.EPOCHS of `opts`, shorten it to half
    of these epochs, and log that."""
    train = config.TRAIN
    if "TRAIN.EPOCHS" not in opts[::2] or "TRAIN.WARMUP_EPOCHS" in opts[::2]:
        return
    configured = train.WARMUP_EPOCHS
    if 0 < train.EPOCHS <= configured:
        train.WARMUP_EPOCHS = train.EPOCHS // 2
        _warn_once(
            f"TRAIN.WARMUP_EPOCHS is {train.WARMUP_EPOCHS}, not {configured}, because TRAIN.EPOCHS"
            f" is {train.EPOCHS}"
        )


@cache
def _warn_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s", line)


def _merged(values: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`values` with those of `over`, without the retired keys of `values` whose place a value of
    `over` takes that earlier versions did not have."""
    kept: dict[str, object] = {}
    for key, value in values.items():
        heir = key in RETIRED and RETIRED[key].moved_to
        if not heir or heir not in over or _is_old(heir, over[heir]):
            kept[key] = value
    return kept | dict(over)


def _is_old(key: str, value: object) -> bool:
    """Whether earlier versions had this value of a key that has retired keys' values now."""
    if key == "TEST.CROP_RATIO":
        return value != 0
    return value in _OLD_VALUES[key]


def translate(
    values: Mapping[str, object], told: Collection[str] | None = None
) -> dict[str, object]:
    """`values` without retired keys and values. What became of each is logged.

    Args:
        told: keys that somebody wrote (None: all). Others were saved by a run, which saves every
            key: nobody needs to be told of a default, nor of a value that another key has now.

    Raises:
        UserError: a retired key with a value that trained weights depend on, or that nothing has
            now, or beside the key that has its value now; or a retired value.
    """
    for key, value in values.items():
        if isinstance(value, str) and (key, value) in _RETIRED_VALUES:
            raise UserError(
                f"{key} is {value!r}, which is no value any more: {_RETIRED_VALUES[key, value]};"
                f" commit {_LAST_COMMIT} is the last that can use this value"
            )
    new = {key: value for key, value in values.items() if key not in RETIRED}
    old = {key: value for key, value in values.items() if key in RETIRED}
    moved = _moved(old, new)
    for key, value in old.items():
        retired = RETIRED[key]
        is_default = value == retired.default
        if told is not None and key not in told and (is_default or retired.moved_to):
            continue
        line = f"{key} ({_shown(value)}) is no key any more: {retired.became}"
        if retired.moved_to:
            line = f"{key} ({_shown(value)}) is a part of {retired.moved_to} now"
            if retired.moved_to in moved:
                line += f": {_shown(moved[retired.moved_to])}"
            else:
                line += f", for example {retired.became}"
                if not is_default:
                    raise UserError(line)
        if retired.shapes_weights and not is_default:
            raise UserError(f"{line}; commit {_LAST_COMMIT} is the last that can use this value")
        _warn_once(line)
    for key in new.keys() & moved.keys():
        if (told is None or key in told) and new[key] != moved[key]:
            _warn_once(f"{key} is {_shown(moved[key])} now, not {_shown(new[key])}")
    return new | moved


def _moved(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    """The keys and values that have those of the retired keys `old` now; `new`: the other keys."""
    for key, value in old.items():
        heir = RETIRED[key].moved_to
        if value == RETIRED[key].default or heir not in _OLD_VALUES:
            continue
        if heir not in new or _is_old(heir, new[heir]) or new[heir] in _SAME.get(key, ()):
            continue
        raise UserError(
            f"{key} is {_shown(value)}, but {heir} is {_shown(new[heir])}, which has its value"
            f" now: leave the former out, and write what is meant in {heir}, for example"
            f" {RETIRED[key].became}"
        )
    moved = _moved_strategy(old, new)
    if old.get("AUG.MIXUP_PROB") == 0:
        moved |= {"AUG.MIXUP": 0.0, "AUG.CUTMIX": 0.0}
    if old.get("MODEL.NEW_HEAD"):
        moved["MODEL.CLASS_MAP"] = "new"
    elif "MODEL.NEW_HEAD" in old and new.get("MODEL.CLASS_MAP") == "new":
        moved["MODEL.CLASS_MAP"] = ""
    if old.get("MODEL.UPCYCLE_CONTINUE"):
        moved["MODEL.UPCYCLE"] = "run"
    elif "MODEL.UPCYCLE_CONTINUE" in old and new.get("MODEL.UPCYCLE") == "run":
        moved["MODEL.UPCYCLE"] = "weights"
    elif isinstance(new.get("MODEL.UPCYCLE"), bool):
        moved["MODEL.UPCYCLE"] = "weights" if new["MODEL.UPCYCLE"] else ""
    if old.get("TEST.CROP") is False:
        moved["TEST.CROP_RATIO"] = 0.0
    elif old.get("TEST.CROP") and not new.get("TEST.CROP_RATIO"):
        moved["TEST.CROP_RATIO"] = CropConfig.crop_ratio
    return moved


def _moved_strategy(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    """MODEL.MOE.STRATEGY from its value of earlier versions and the five keys that it replaces."""
    ranks, *keys = _STRATEGY_KEYS
    values = {key: old.get(key, RETIRED[key].default) for key in _STRATEGY_KEYS}
    for key, lowest in _LOWEST.items():
        value = values[key]
        if isinstance(value, int) and value < lowest:
            raise UserError(f"{key} is {value}, it must be at least {lowest}")
    kind = new.get("MODEL.MOE.STRATEGY")
    if kind == "fixed":
        r, degree, all_to_all, exchange = (values[key] for key in keys)
        text = f"r{r} d{degree} {all_to_all} {exchange}".removesuffix(" counted")
    elif kind == "off" or (kind is None and values[ranks]):
        text = "r1 d1 linear"
    elif kind == "auto":
        text = "auto"
    else:
        return {}
    if values[ranks]:
        text += f" n{values[ranks]}"
    return {"MODEL.MOE.STRATEGY": text}


def config_from_text(text: str, source: str, opts: Sequence[str] = ()) -> CfgNode:
    """The checked configuration from the YAML text of a checkpoint or single file, overridden by
    `opts` (KEY VALUE ...).

    Raises:
        UserError: the text is not a configuration of this program; for `opts` as `load_config`.
    """
    config = default_config()
    try:
        content = parse_yaml(text) or {}
        if not isinstance(content, dict):
            raise ValueError(f"expected KEY: VALUE lines, found {type(content).__name__}")
        values = _checked(content, default_config())
        _lay_over(config, translate(values, told=()))
        check_config(config)
    except (ValueError, UserError) as error:
        raise UserError(
            f"{source}: its configuration cannot be used ({one_line(str(error))})"
        ) from error
    from_opts = _from_opts(opts)
    if from_opts:
        config = default_config()
        _lay_over(config, translate(_merged(values, from_opts), told=from_opts))
        check_config(config)
    order_words(config)
    config.freeze()
    return config


def as_opts(values: Mapping[str, object]) -> list[str]:
    """Convert `{"SEED": 1}` to KEY VALUE pairs, as in `opts` of `load_config`."""
    opts = []
    for key, value in values.items():
        opts += [key, str(value)]
    return opts


def merge_opts(config: CfgNode, opts: Sequence[str]) -> None:
    """Override keys of a configuration by `opts` (KEY VALUE ...), in place. The combination of
    values is not checked, and nobody is told of retired keys that have another name now.

    Raises:
        UserError: an unknown key or a value of the wrong type.
    """
    _lay_over(config, translate(_from_opts(opts), told=()))


def _from_opts(opts: Sequence[str]) -> dict[str, object]:
    """The values of KEY VALUE pairs, in the types of the keys."""
    if len(opts) % 2:
        raise UserError(f"--opts takes pairs of KEY VALUE; {opts[-1]!r} has no partner")
    values: dict[str, object] = {}
    for name, text in zip(opts[::2], opts[1::2], strict=True):
        keys = name.split(".")
        content: dict = {keys.pop(): text}
        while keys:
            content = {keys.pop(): content}
        values |= _checked(content, default_config(), source="--opts ")
    return values


def resolve_batch_size(config: CfgNode, world_size: int) -> CfgNode:
    """The configuration with DATA.BATCH_SIZE computed from DATA.GLOBAL_BATCH_SIZE and the number of
    ranks; unchanged if DATA.GLOBAL_BATCH_SIZE is 0.

    Raises:
        UserError: the global batch is not divisible by the number of ranks times the accumulation
            steps.
    """
    global_size = config.DATA.GLOBAL_BATCH_SIZE
    accumulation = config.TRAIN.ACCUMULATION_STEPS
    if not global_size:
        return config
    if global_size % (world_size * accumulation):
        raise UserError(
            f"DATA.GLOBAL_BATCH_SIZE is {global_size}, it must be divisible by the number of ranks"
            f" ({world_size}) times TRAIN.ACCUMULATION_STEPS ({accumulation})"
        )
    config = config.clone()
    config.defrost()
    config.DATA.BATCH_SIZE = global_size // (world_size * accumulation)
    check_config(config)
    config.freeze()
    return config


class _Files:
    """Reads configuration files with their BASE files. Each file is read once."""

    def __init__(self):
        self._values: dict[str, dict[str, object]] = {}  # by path
        # The file that is being read, preceded by the files that name it in BASE.
        self._open: list[str] = []

    def values(self, file: Path) -> dict[str, object]:
        """The values of the file's BASE files, in order, then of the file itself:
        `{"TRAIN.BASE_LR": 1e-3, ...}`."""
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
        values: dict[str, object] = {}
        self._open.append(path)
        for base in bases:
            values = _merged(values, self.values(file.parent / base))
        self._open.pop()
        own = _checked(content, default_config(), source=f"config {file}: ")
        self._values[path] = _merged(values, own)
        return self._values[path]


def _read(file: Path) -> dict:
    if file.suffix == ".py":
        raise UserError(
            f"config {file}: configures a detector, which `swinv2-moe detect train` trains"
        )
    try:
        content = parse_yaml(read_bounded(file, MAX_YAML_CHARS).decode()) or {}
    except OSError as error:
        raise UserError(f"config {file}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # also raised for text that is not UTF-8
        raise UserError(f"config {file}: not valid YAML ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"config {file}: expected KEY: VALUE lines, found {type(content).__name__}")
    return content


def _check_bases(file: Path, bases: object) -> None:
    if not isinstance(bases, list) or not all(map(_can_be_path, bases)):
        raise UserError(f"config {file}: BASE is {short(bases)}, it must be a list of files")
    if len(bases) > _MAX_FILES:
        raise UserError(
            f"config {file}: BASE has {len(bases):,} entries, at most {_MAX_FILES} are allowed"
        )


def _can_be_path(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _checked(
    content: dict, group: CfgNode, prefix: str = "", source: str = ""
) -> dict[str, object]:
    """Flatten nested `content` to `{"TRAIN.BASE_LR": 1e-3, ...}`, with each value in the type of
    its default.

    Args:
        group: the defaults of the keys of `content`.
        prefix: the name of the group with a dot at its end.
        source: the beginning of messages.
    """
    values = {}
    for key, value in content.items():
        if not isinstance(key, str):
            key = short(key)
        name = prefix + key
        if name in RETIRED:
            values[name] = _coerce(name, value, RETIRED[name].default, source)
            continue
        if key not in group:
            name, value = _innermost(name, value)
            raise UserError(
                f"{source}unknown key {one_line(name[:200])} (value"
                f" {_shown(value)}){nearest_key(name)}"
            )
        if name == _ONCE_BOOL and str(value).lower() in ("true", "false"):
            values[name] = str(value).lower() == "true"
        elif not isinstance(group[key], CfgNode):
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
        group = config
        for group_name in groups:
            group = group[group_name]
        group[key] = value


def _coerce(name: str, value: object, default: object, source: str) -> object:
    """Convert the value to the type of the default.

    '1e-3' and 1 become a float if the default is one. Tuples become lists. Nothing else is
    converted.
    """
    if isinstance(value, str) and not isinstance(default, str):
        value = _parse_value(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{source}{name} is {_shown(value)}, it must fit into 64 bits")
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, list) and isinstance(value, (list, tuple)):
        element = 0  # lists that are empty by default hold block numbers
        if default:
            element = default[0]
        return [_coerce(f"{name}[{i}]", item, element, source) for i, item in enumerate(value)]
    if type(value) is not type(default):
        raise UserError(
            f"{source}{name} is {_shown(value)} ({type(value).__name__}), it must be of type"
            f" {type(default).__name__} like its default {default!r}"
        )
    return value


def _parse_value(text: str) -> object:
    """The Python literal in `text`, or `text`."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    # RecursionError and MemoryError: the text nests too deeply.
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _shown(value: object) -> str:
    return short(value, 200)


def _innermost(name: str, value: object) -> tuple[str, object]:
    """The full name and the value of the first key in a group."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name, value


def nearest_key(name: str) -> str:
    """The end of a message about an unknown key: what became of it, or the nearest group or key.

    Letter case is ignored. A full name has precedence, then a usual word of other programs, then
    the last part of a name, first in the same group.
    """
    group, _, last = name[:200].upper().rpartition(".")
    keys = sorted(flatten(default_config()), key=lambda key: not key.startswith(f"{group}."))
    names = set()
    by_last_part: dict[str, str] = {}
    by_word: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        names |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        by_last_part.setdefault(parts[-1], key)
        for word in parts[-1].split("_"):
            by_word.setdefault(word, key)
    full_name = f"{group}.{last}".lstrip(".")
    if full_name in names:
        return f"; did you mean {full_name}?"
    known = _OTHER_WORDS.get(last, by_last_part.get(last))
    for key, retired in RETIRED.items():
        if full_name == key or (not known and key.endswith(f".{last}")):
            if retired.moved_to:
                return f"; {key} is a part of {retired.moved_to} now"
            return f"; {key} is no key any more: {retired.became}"
    if known:
        return f"; did you mean {known}?"
    nearest = difflib.get_close_matches(full_name, sorted(names), n=1, cutoff=0.6)
    if nearest:
        return f"; did you mean {nearest[0]}?"
    nearest = difflib.get_close_matches(last, by_last_part, n=1, cutoff=0.7)
    if nearest:
        return f"; did you mean {by_last_part[nearest[0]]}?"
    if last in by_word:
        return f"; did you mean {by_word[last]}?"
    return "; `swinv2-moe config` lists every key"
