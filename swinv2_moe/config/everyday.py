"""Short options for the keys that are set most often: `--epochs 5` is TRAIN.EPOCHS 5."""

from collections.abc import Mapping
from typing import NamedTuple

from swinv2_moe.config.load import as_opts, coerced, values_of
from swinv2_moe.config.tree import default_config, flatten
from swinv2_moe.errors import UserError


class Everyday(NamedTuple):
    """The key of a short option, and the option's help."""

    key: str
    metavar: str
    help: str


EVERYDAY = {
    "epochs": Everyday("TRAIN.EPOCHS", "N", "passes over the training pictures"),
    "size": Everyday("DATA.IMG_SIZE", "PIXELS", "side of the pictures that the model sees"),
    "batch": Everyday("DATA.BATCH_SIZE", "N", "pictures of a step, in each process"),
    "lr": Everyday("TRAIN.BASE_LR", "RATE", "the highest learning rate, for any batch"),
    "weights": Everyday(
        "MODEL.PRETRAINED",
        "NAME",
        "what training starts from: bundled:tiny (the package's), timm:NAME, hf-hub:OWNER/NAME,"
        " efficientnet_lite2 (the teacher extra's), a run, a file; none: random weights. Default"
        " for FOLDER: the best that this machine has or the hub gives within 5 s",
    ),
    "experts": Everyday(
        "MODEL.MOE.NUM_EXPERTS",
        "N",
        "experts in each layer that has experts, made of dense weights where those have none; 0:"
        " none",
    ),
    "minutes": Everyday(
        "TRAIN.MINUTES",
        "N",
        "the most that the whole may take; 0: any time. Default for FOLDER: 10 on a CPU, 3 for"
        " fewer than 200 pictures",
    ),
    "device": Everyday("DEVICE", "auto|cpu|cuda", "where the model runs"),
}


def everyday_opts(given: Mapping[str, object], opts: list[str]) -> list[str]:
    """`opts` (KEY VALUE ...) and the keys of the short options that are given.

    Args:
        given: names of EVERYDAY with their values; None: not given.

    Raises:
        UserError: a value of the wrong type, or a key that is also in `opts`.
    """
    defaults, others = flatten(default_config()), values_of(opts)
    keys: dict[str, object] = {}
    for name, value in given.items():
        if value is None:
            continue
        key = EVERYDAY[name].key
        if key in others:
            raise UserError(f"--{name} is {value} and {key} is {others[key]}: give one of them")
        keys[key] = coerced(f"--{name}", value, defaults[key])
        if name == "weights" and value == "none":
            keys[key] = ""
        if name == "lr":
            keys["TRAIN.LR_SCALING"] = "none"
    return as_opts(keys) + opts


def everyday_name(key: str) -> str | None:
    """The short option of a key, "--epochs" of TRAIN.EPOCHS; None: it has none."""
    for name, option in EVERYDAY.items():
        if option.key == key:
            return f"--{name}"
    return None
