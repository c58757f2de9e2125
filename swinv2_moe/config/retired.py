"""Keys that earlier versions had: what became of each, and how old files still load."""

import logging
import os
from collections.abc import Collection, Mapping
from functools import cache
from typing import NamedTuple

from swinv2_moe.data.section import CropConfig
from swinv2_moe.errors import UserError, short
from swinv2_moe.models.section import TRUNKS

_log = logging.getLogger(__name__)


class Retired(NamedTuple):
    """A key of earlier versions, which files and checkpoints may still have."""

    default: object  # other values are converted to its type
    # what holds now, for "KEY (value) is no key any more: ..."; or an example of `moved_to`
    became: str
    # With another value, trained weights computed something else: such values are refused.
    shapes_weights: bool = False
    moved_to: str = ""  # the key that replaced it


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
    "MODEL.SWINV2.IN_CHANS": Retired(3, "3", moved_to="DATA.CHANNELS"),
    "MODEL.VIT.IN_CHANS": Retired(3, "3", moved_to="DATA.CHANNELS"),
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
    "MODEL.MOE.NORM": Retired(
        "post",
        "the norm follows the experts and their gate value; that of MODEL.TYPE swin_moe precedes"
        " them",
        shapes_weights=True,
    ),
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
    "DATA.CHANNELS": (),
}
# New values of such keys that do not contradict a retired one.
_SAME: dict[str, Collection] = {
    "MODEL.NEW_HEAD": ("new",),
    "MODEL.UPCYCLE_CONTINUE": ("weights", "run"),
    "TEST.CROP": (0,),
    "MODEL.SWINV2.IN_CHANS": (1,),
    "MODEL.VIT.IN_CHANS": (1,),
}
_LOWEST = {"MODEL.MOE.RANKS_PER_NODE": 0, "MODEL.MOE.R": 0, "MODEL.MOE.PIPELINE_DEGREE": 1}
ONCE_BOOL = "MODEL.UPCYCLE"
_LAST_COMMIT = "d7f9e26"  # the last one that has the keys of RETIRED


@cache
def warn_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        _log.warning("%s", line)


def merged(values: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`values`, overridden by `over`.

    A retired key of `values` is left out if `over` sets the key that replaced it to a value that
    earlier versions did not have.
    """
    kept: dict[str, object] = {}
    known = retired_keys()
    for key, value in values.items():
        heir = key in known and known[key].moved_to
        if not heir or heir not in over or _is_old(heir, over[heir]):
            kept[key] = value
    return kept | dict(over)


def _is_old(key: str, value: object) -> bool:
    """Whether earlier versions allowed this value of `key`, which has replaced retired keys."""
    if key == "TEST.CROP_RATIO":
        return value != 0
    return value in _OLD_VALUES[key]


def retired_keys() -> dict[str, Retired]:
    """RETIRED, and IN_CHANS of each registered model type, which every type had."""
    channels = RETIRED["MODEL.VIT.IN_CHANS"]
    return RETIRED | {f"MODEL.{trunk.group}.IN_CHANS": channels for trunk in TRUNKS.values()}


def translate(
    values: Mapping[str, object], told: Collection[str] | None = None
) -> dict[str, object]:
    """`values` without retired keys. What became of each is logged.

    Args:
        told: the keys that the user wrote; None: all. Other keys were saved by a run. They are
            not logged if they have their default, or have moved to another key.

    Raises:
        UserError: a retired key whose value changed the weights or has no equivalent, or that
            contradicts the key that replaced it.
    """
    known = retired_keys()
    new = {key: value for key, value in values.items() if key not in known}
    old = {key: value for key, value in values.items() if key in known}
    moved = _moved(old, new)
    for key, value in old.items():
        retired = known[key]
        is_default = value == retired.default
        if told is not None and key not in told and (is_default or retired.moved_to):
            continue
        line = f"{key} ({shown(value)}) is no key any more: {retired.became}"
        if retired.moved_to:
            line = f"{key} ({shown(value)}) is a part of {retired.moved_to} now"
            if retired.moved_to in moved:
                line += f": {shown(moved[retired.moved_to])}"
            else:
                line += f", for example {retired.became}"
                # a value in the group of another model type has no effect
                if not is_default and retired.moved_to != "DATA.CHANNELS":
                    raise UserError(line)
        if retired.shapes_weights and not is_default:
            raise UserError(f"{line}; commit {_LAST_COMMIT} is the last that can use this value")
        warn_once(line)
    for key in new.keys() & moved.keys():
        if (told is None or key in told) and new[key] != moved[key]:
            warn_once(f"{key} is {shown(moved[key])} now, not {shown(new[key])}")
    return new | moved


def _moved(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    """The values of the retired keys `old` by the keys that replaced them; `new`: other keys."""
    known = retired_keys()
    for key, value in old.items():
        heir = known[key].moved_to
        if value == known[key].default or heir not in _OLD_VALUES:
            continue
        if heir not in new or _is_old(heir, new[heir]) or new[heir] in _SAME.get(key, ()):
            continue
        raise UserError(
            f"{key} is {shown(value)}, but {heir} is {shown(new[heir])}, which replaces"
            f" it: leave {key} out, and set {heir}, for example"
            f" {known[key].became}"
        )
    moved = _moved_strategy(old, new) | _moved_channels(old, new)
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


def _moved_channels(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    """DATA.CHANNELS from IN_CHANS of MODEL.TYPE's group; of any group if the type is not known."""
    keys = [key for key in old if key.endswith(".IN_CHANS")]
    trunk = TRUNKS.get(str(new.get("MODEL.TYPE", "")))
    if trunk is not None:
        keys = [f"MODEL.{trunk.group}.IN_CHANS"]
    for key in keys:
        if old.get(key, 3) != 3:
            return {"DATA.CHANNELS": old[key]}
    return {}


def _moved_strategy(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    """MODEL.MOE.STRATEGY from its value in earlier versions and the five keys that it replaced."""
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


def shown(value: object) -> str:
    return short(value, 200)
