"""Configuration files and KEY VALUE pairs, merged strictly over the defaults.

`load_config(file, opts)` is the main function. For invalid input it raises an error of one line,
with the key, its value and the allowed values. A YAML file may be based on other files: `BASE:
[recipe.yaml]` (paths relative to the file).
"""

import ast
import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from yacs.config import CfgNode

from swinv2_moe.config.checks import check_config, check_settings, choices, order_words
from swinv2_moe.config.tree import default_config, flatten
from swinv2_moe.data.section import DATASETS
from swinv2_moe.errors import UserError, one_line, short
from swinv2_moe.files import MAX_YAML_CHARS, parse_yaml, read_bounded
from swinv2_moe.models.section import TRUNKS

_log = logging.getLogger(__name__)

# The configuration files of this project. In a clone this is a link to configs/, in an installed
# package a folder.
DIRECTORY = Path(__file__).parents[1] / "configs"
_SUFFIXES = (".yaml", ".py")  # .py: mmdetection's
_NAMES = f"names are those of the files in {DIRECTORY}"
# Words of other programs, or parts of several keys.
_OTHER_WORDS = {
    "LR": "TRAIN.BASE_LR",
    "LEARNING_RATE": "TRAIN.BASE_LR",
    "WD": "TRAIN.WEIGHT_DECAY",
    "BATCH": "DATA.BATCH_SIZE",
    "SIZE": "DATA.IMG_SIZE",
    "IMAGE_SIZE": "DATA.IMG_SIZE",
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
# Keys and values that left, and why. Earlier runs have recorded them; there they do not count.
_LEFT = {
    "TRAIN.NOISE_SCALE_FREQ": "since nobody acted on the gradient's noise scale",
    "EVENT_LOG": "since TRACKER mlperf writes the log of events",
    "CHECKPOINT.EXPERTS": "since a save of all experts makes training wait for a sixth of a step",
    "CHECKPOINT.STAGING_MB": "since saving takes up to 4 GiB of a rank's host memory",
    "DATA.STAGE": "since `swinv2-moe stage SHARDS LOCAL` copies the shards before training",
    "TEST.SHUFFLE": "since images are validated in a random order where evaluation has a capacity",
    "MODEL.SWINV2.MLP_RATIO": "since it is 4, as published; MODEL.MOE.HIDDEN_RATIO is the experts'",
    "DATA.SHARD_STREAMS": "since 64 runs of images are read in turn",
    "MODEL.UPCYCLE_NOISE": "since experts with noise became no better than copies",
    "MODEL.MOE.TOP_K_SCHEDULE": "since no run was better for another top-k after some epochs",
    "MODEL.MOE.CAPACITY_AUTO": "since it took as long as a CAPACITY_FACTOR of 1.25 or 2.0",
    "MODEL.MOE.EVAL_BATCH_PRIORITIZED": "since evaluation drops no token by default, and where it"
    " does, on and off were equal",
    "MODEL.VIT": "since MODEL.TYPE timm builds any ViT, with its sizes in MODEL.ARGS",
    "MODEL.MOE.INT8_INFERENCE": "since no run used it; `export --dtype int8` stays",
    "MODEL.MOE.KERNELS 'grouped'": "since Triton was faster in every class of layers",
    "MODEL.MOE.KERNELS 'avx512_vnni'": "since 'avx512' is the same without experts in int8",
    "MODEL.MOE.KERNELS 'neon_dotprod'": "since 'neon' is the same without experts in int8",
}
# Of those, the ones that changed the training of a run, with the value that did not.
_WITHOUT_EFFECT = {"MODEL.MOE.TOP_K_SCHEDULE": "", "MODEL.MOE.CAPACITY_AUTO": False}


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
            raise UserError(f"config {file}: has no keys; {DIRECTORY} has examples")
    from_opts = values_of(opts)
    given = values | from_opts
    config = default_config()
    _lay_over(config, given)
    if config.MODEL.TYPE in TRUNKS:
        implied = TRUNKS[config.MODEL.TYPE].implied(config)
        _lay_over(config, {key: value for key, value in implied.items() if key not in given})
    if data is not None and "DATA.PATH" not in from_opts:
        config.DATA.PATH = data
    if data is not None and "DATA.DATASET" not in from_opts:
        dataset = DATASETS.get(config.DATA.DATASET)
        if dataset and not dataset.needs_files:
            config.DATA.DATASET = "folder"
    if output and "OUTPUT" not in from_opts:
        config.OUTPUT = output
    _lay_over(config, _shorter_warmup(config.TRAIN, from_opts))
    config.OUTPUT = os.path.expanduser(config.OUTPUT)
    config.MODEL.PRETRAINED = os.path.expanduser(config.MODEL.PRETRAINED)
    check_config(config)
    check_settings(config)
    order_words(config)
    config.remember(given)
    config.freeze()
    return config


def _shorter_warmup(train: CfgNode, from_opts: dict[str, object]) -> dict[str, object]:
    """Half of the TRAIN.EPOCHS of `opts`, where a file's warm-up is not shorter. Logs that."""
    epochs, configured = train.EPOCHS, train.WARMUP_EPOCHS
    if "TRAIN.EPOCHS" not in from_opts or "TRAIN.WARMUP_EPOCHS" in from_opts:
        return {}
    if not 0 < epochs <= configured:
        return {}
    warn_once(
        f"TRAIN.WARMUP_EPOCHS is {epochs // 2}, not {configured}, because TRAIN.EPOCHS is {epochs}"
    )
    return {"TRAIN.WARMUP_EPOCHS": epochs // 2}


@cache
def warn_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s", line)


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
        _lay_over(config, values)
        check_config(config)
    except (ValueError, UserError) as error:
        raise UserError(
            f"{source}: its configuration cannot be used ({one_line(str(error))})"
        ) from error
    from_opts = values_of(opts)
    if from_opts:
        _lay_over(config, from_opts)
        check_config(config)
    order_words(config)
    config.freeze()
    return config


def left_keys(text: str) -> dict[str, object]:
    """The keys in the YAML text of a checkpoint that changed its training and have left."""
    moe = ((parse_yaml(text) or {}).get("MODEL") or {}).get("MOE") or {}
    recorded = {f"MODEL.MOE.{key}": value for key, value in moe.items()}
    return {
        name: recorded[name]
        for name, without in _WITHOUT_EFFECT.items()
        if recorded.get(name, without) != without
    }


def find_config(name: str | Path) -> Path:
    """Find a configuration file by its path, or by the name of a configuration of this project.

    A name is the path below configs/, with or without `configs/` and suffix. The last part of the
    path suffices if it is unique.

    Raises:
        UserError: `name` is empty or a directory, or it has no suffix, and there is no
            configuration with this name, or more than one.
    """
    path = Path(name)
    if not str(name) or path.is_dir():
        kind = "is a directory"
        if not str(name):
            kind = "is empty"
        raise UserError(f"--cfg {str(name)!r}: {kind}; {_NAMES}")
    if path.exists():
        return path
    below = path
    if path.parts[:1] == (DIRECTORY.name,):
        below = path.relative_to(DIRECTORY.name)
    for suffix in ("",) + _SUFFIXES:
        candidate = DIRECTORY / f"{below}{suffix}"
        if not path.is_absolute() and candidate.is_file():
            return candidate
    if path.suffix or path.is_absolute():
        return path  # the caller that reads the file reports errors
    names = config_names()
    same = [full for full in names if Path(full).name == str(name)]
    if len(same) == 1:
        return names[same[0]]
    if same:
        raise UserError(f"--cfg {name}: there are several: {', '.join(same)}")
    hint = _NAMES
    nearest = difflib.get_close_matches(str(name), names, n=1)
    if nearest:
        hint = f"did you mean {nearest[0]!r}?"
    raise UserError(f"--cfg {name}: neither a file nor the name of a configuration; {hint}")


def config_names() -> dict[str, Path]:
    """The files below configs/ by name, sorted."""
    files = {}
    for suffix in _SUFFIXES:
        for path in DIRECTORY.rglob(f"*{suffix}"):
            files[str(path.relative_to(DIRECTORY).with_suffix(""))] = path
    return dict(sorted(files.items()))


def as_opts(values: Mapping[str, object]) -> list[str]:
    """Convert `{"SEED": 1}` to KEY VALUE pairs, as in `opts` of `load_config`."""
    opts = []
    for key, value in values.items():
        opts += [key, str(value)]
    return opts


def merge_opts(config: CfgNode, opts: Sequence[str]) -> None:
    """Override keys of a configuration by `opts` (KEY VALUE ...), in place. The combination of
    values is not checked.

    Raises:
        UserError: an unknown key or a value of the wrong type.
    """
    _lay_over(config, values_of(opts))


def values_of(opts: Sequence[str]) -> dict[str, object]:
    """The values of `opts` (KEY VALUE ...) by key, in the types of the keys. Raises UserError as
    `merge_opts`."""
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
    return changed(config, {"DATA.BATCH_SIZE": global_size // (world_size * accumulation)})


def changed(config: CfgNode, values: Mapping[str, object]) -> CfgNode:
    """A checked copy of a configuration with other values of some keys.

    Raises:
        UserError: the values contradict others.
    """
    config = config.clone()
    config.defrost()
    _lay_over(config, values)
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
        if file.name == "config.yaml" and (file.parent / "checkpoints").is_dir():
            content = _without_left(content)  # a run has recorded it
        bases = content.pop("BASE", [])
        _check_bases(file, bases)
        values: dict[str, object] = {}
        self._open.append(path)
        for base in bases:
            values |= self.values(file.parent / base)
        self._open.pop()
        own = _checked(content, default_config(), source=f"config {file}: ")
        self._values[path] = values | own
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
        source: the beginning of messages; "" for what a run has recorded.
    """
    values = {}
    for key, value in content.items():
        if not isinstance(key, str):
            key = short(key)
        name = prefix + key
        given = short(value, 200)
        reason = _why_left(name, value)
        if reason and not source:
            continue
        if reason:
            kind = "key" if name in _LEFT else "value"
            raise UserError(f"{source}{name} is {given}: this {kind} has left, {reason}")
        if key not in group:
            name, value = _innermost(name, value)
            raise UserError(
                f"{source}unknown key {one_line(name[:200])} (value"
                f" {short(value, 200)}){nearest_key(name)}"
            )
        if not isinstance(group[key], CfgNode):
            values[name] = coerced(name, value, group[key], source)
        elif isinstance(value, dict):
            values |= _checked(value, group[key], f"{name}.", source)
        else:
            keys = ", ".join(group[key])
            raise UserError(
                f"{source}{name} is a group of keys ({keys}), not a value ({short(value, 200)})"
            )
    return values


def _why_left(name: str, value: object) -> str | None:
    return _LEFT.get(name) or _LEFT.get(f"{name} {short(value, 200)}")


def _without_left(content: dict, prefix: str = "") -> dict:
    """`content` without the keys and values of `_LEFT`."""
    kept = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if _why_left(name, value):
            continue
        if isinstance(value, dict):
            value = _without_left(value, f"{name}.")
        kept[key] = value
    return kept


def _lay_over(config: CfgNode, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        *groups, key = name.split(".")
        group = config
        for group_name in groups:
            group = group[group_name]
        group[key] = value


def coerced(name: str, value: object, default: object, source: str = "") -> object:
    """Convert the value to the type of the default.

    '1e-3' and 1 become a float if the default is one. Tuples become lists. Nothing else is
    converted. A word for a key with a list of allowed values stays a word, whatever the default,
    and True and False stay as they are where they are allowed.
    """
    allows_bool = any(choice is True for choice in choices().get(name, ()))
    if isinstance(value, str) and (allows_bool or not isinstance(default, str)):
        value = _parse_value(value)
        if isinstance(value, str) and name in choices():
            return value  # checked with the other values
    if allows_bool and isinstance(value, bool):
        return value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{source}{name} is {short(value, 200)}, it must fit into 64 bits")
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, list) and isinstance(value, (list, tuple)):
        element = 0  # lists that are empty by default hold block numbers
        if default:
            element = default[0]
        return [coerced(f"{name}[{i}]", item, element, source) for i, item in enumerate(value)]
    if type(value) is not type(default):
        raise UserError(
            f"{source}{name} is {short(value, 200)} ({type(value).__name__}), it must be of type"
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


def _innermost(name: str, value: object) -> tuple[str, object]:
    """The full name and the value of the first key in a group."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name, value


def nearest_key(name: str) -> str:
    """The end of a message about an unknown key: the group or key that `similar_key` finds."""
    nearest = similar_key(name)
    if nearest:
        return f"; did you mean {nearest}?"
    return "; `swinv2-moe config` lists every key"


def similar_key(name: str) -> str | None:
    """The nearest group or key.

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
        return full_name
    known = _OTHER_WORDS.get(last, by_last_part.get(last))
    if known:
        return known
    nearest = difflib.get_close_matches(full_name, sorted(names), n=1, cutoff=0.6)
    if nearest:
        return nearest[0]
    nearest = difflib.get_close_matches(last, by_last_part, n=1, cutoff=0.7)
    if nearest:
        return by_last_part[nearest[0]]
    if last in by_word:
        return by_word[last]
    return None
