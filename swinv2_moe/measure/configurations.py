"""The configurations of speed measurements, their options, and checks of them. Imports no torch."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from yacs.config import CfgNode

from swinv2_moe.config import (
    as_opts,
    flatten,
    load_config,
    model_config,
)
from swinv2_moe.config.load import values_of
from swinv2_moe.errors import UserError
from swinv2_moe.measure.spread import check_rounds

# matrix products in units of a forward pass; the backward pass has two for each of them
PASSES = {"inference": 1, "training": 3}
DTYPES = ("float32", "bfloat16", "float16")
SWITCH = ("off", "on")

# Settings that make a training step repeatable: one batch, and a learning rate of 0.
_REPEATABLE = {
    "AUG.MIXUP": 0,
    "AUG.CUTMIX": 0,
    "TRAIN.ACCUMULATION_STEPS": 1,
    "TRAIN.EMA_DECAY": 0,
    "TRAIN.BASE_LR": 0,
    "TRAIN.WARMUP_LR": 0,
    "TRAIN.MIN_LR": 0,
}
# A model for which neither weights nor images are loaded.
NOTHING_LOADED = {
    "DATA.DATASET": "digits",
    "DATA.VAL_SPLIT": 0.0,
    "MODEL.CLASS_MAP": "",
    "MODEL.UPCYCLE": "",
}
_SPEED_ALONE = _REPEATABLE | NOTHING_LOADED | {"DATA.GLOBAL_BATCH_SIZE": 0}
_DENSE = {"MODEL.MOE.NUM_EXPERTS": 0, "MODEL.MOE.FREEZE": False}
_CAPACITY_FACTOR = {
    "inference": "MODEL.MOE.EVAL_CAPACITY_FACTOR",
    "training": "MODEL.MOE.CAPACITY_FACTOR",
}
_DECIDED_BY = {
    "DATA.DATASET": "the images are noise",
    "COMPILE": "--compile decides",
    **dict.fromkeys(("DATA.BATCH_SIZE", "DATA.GLOBAL_BATCH_SIZE"), "--batch-sizes decides"),
    **dict.fromkeys(("AMP_ENABLE", "AMP_DTYPE"), "--dtypes decides"),
    **dict.fromkeys(_CAPACITY_FACTOR.values(), "--capacity-factors decides"),
}


@dataclass(frozen=True)
class SpeedOptions:
    """Options of a measurement: all combinations of the first five fields are measured. Without
    capacity factors, the configured one is used.

    Raises:
        UserError: a field has an invalid value.
    """

    mode: tuple[str, ...] = ("inference",)
    batch_sizes: tuple[int, ...] = (1, 8)  # images of a rank
    dtypes: tuple[str, ...] = ("float32",)
    capacity_factors: tuple[float, ...] = ()
    compile: tuple[str, ...] = ("off",)
    rounds: int = 10
    warmup: int = 2
    graph: bool | None = None  # replay CUDA graphs of passes and steps; None: where they can be

    def __post_init__(self) -> None:
        for option, values, allowed in (
            ("mode", self.mode, PASSES),
            ("dtypes", self.dtypes, DTYPES),
            ("compile", self.compile, SWITCH),
        ):
            for value in values:
                if value not in allowed:
                    raise UserError(f"--{option} is {value!r}, allowed: {', '.join(allowed)}")
        if min(self.batch_sizes) < 1:
            raise UserError(f"--batch-sizes is {min(self.batch_sizes)}, it must be at least 1")
        check_rounds(self.rounds, self.warmup)


class Combination(NamedTuple):
    mode: str
    batch_size: int  # images of a rank
    dtype: str
    capacity_factor: float
    compile: str

    def __str__(self) -> str:
        compiled = ""
        if self.compile == "on":
            compiled = ", compiled"
        return (
            f"{self.mode}, batch {self.batch_size}, {self.dtype}, f ="
            f" {self.capacity_factor:g}{compiled}"
        )


# each combination with the configurations of the two models
Plan = list[tuple[Combination, CfgNode, CfgNode]]


def combinations(file: str | Path, opts: Sequence[str], options: SpeedOptions) -> Plan:
    """Every combination, with the configurations of the model with experts and of the dense one.

    Raises:
        UserError: as `load_config`; also for a configuration without experts, and for `opts` that
            have no effect on the measurement.
    """

    def load(keys: dict[str, object]) -> CfgNode:
        return load_config(file, [*opts, *as_opts(_SPEED_ALONE | keys)])

    moe = model_config(load({})).experts
    if moe.layer is None:
        raise UserError(
            f"{file}: MODEL.MOE.NUM_EXPERTS is 0, it must be above 0: the model with experts is"
            " compared with its dense one"
        )
    all_combinations = []
    choices = (
        options.mode,
        options.batch_sizes,
        options.dtypes,
        options.capacity_factors or (None,),
        options.compile,
    )
    combined: itertools.product[Any] = itertools.product(*map(dict.fromkeys, choices))
    for mode, batch, dtype, factor, compile in combined:
        if factor is None:
            training = mode == "training"
            factor = moe.layer.capacity_factor if training else moe.eval_capacity_factor
        amp_dtype = "bfloat16"
        if dtype == "float16":
            amp_dtype = "float16"
        keys: dict[str, object] = {
            "DATA.BATCH_SIZE": batch,
            "COMPILE": compile == "on",
            "AMP_ENABLE": dtype != "float32",
            "AMP_DTYPE": amp_dtype,
            _CAPACITY_FACTOR[mode]: factor,
        }
        config = load(keys)
        check_opts(opts, config, _SPEED_ALONE | keys, _DECIDED_BY)
        combination = Combination(mode, batch, dtype, factor, compile)
        all_combinations.append((combination, config, load(keys | _DENSE)))
    return all_combinations


def check_opts(
    opts: Sequence[str], config: CfgNode, decided: Collection[str], why: dict[str, str]
) -> None:
    """Check that the measured configuration has the values of --opts.

    Args:
        config: the configuration that is measured.
        decided: the keys that the measurement has set in it.
        why: the reason, for keys whose value is fixed.

    Raises:
        UserError: a key of `opts` has another value in `config`; a value of the wrong type.
    """
    measured = flatten(config)
    for key, value in values_of(opts).items():
        if key in decided and value != measured[key]:
            reason = why.get(key, f"what is measured has {measured[key]!r}")
            raise UserError(f"--opts {key} is {value!r}, but {reason}")
