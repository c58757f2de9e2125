"""The combinations of a throughput measurement, and their configurations. Imports no torch."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from yacs.config import CfgNode

from swinv2_moe.config import as_opts, load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.measure.configurations import REPEATABLE, check_opts
from swinv2_moe.measure.throughput_options import Options

# settings of a speed measurement: no images and no weights are loaded
_SPEED_ALONE = REPEATABLE | {
    "DATA.DATASET": "digits",
    "DATA.GLOBAL_BATCH_SIZE": 0,
    "MODEL.UPCYCLE": False,
    "MODEL.UPCYCLE_CONTINUE": False,
}
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


def combinations(file: str | Path, opts: Sequence[str], options: Options) -> Plan:
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
            f"{file}: MODEL.MOE.NUM_EXPERTS is 0, a model with experts is to be measured beside its"
            " dense one"
        )
    all_combinations = []
    choices = (
        options.mode,
        options.batch_sizes,
        options.dtypes,
        options.capacity_factors or (None,),
        options.compile,
    )
    for mode, batch, dtype, factor, compile in itertools.product(*map(dict.fromkeys, choices)):
        if factor is None:
            training = mode == "training"
            factor = moe.layer.capacity_factor if training else moe.eval_capacity_factor
        amp_dtype = "bfloat16"
        if dtype == "float16":
            amp_dtype = "float16"
        keys = {
            "DATA.BATCH_SIZE": batch,
            "COMPILE": compile == "on",
            "AMP_ENABLE": dtype != "float32",
            "AMP_DTYPE": amp_dtype,
            _CAPACITY_FACTOR[mode]: factor,
        }
        config = load(keys)
        check_opts(opts, config, _DECIDED_BY)
        combination = Combination(mode, batch, dtype, factor, compile)
        all_combinations.append((combination, config, load(keys | _DENSE)))
    return all_combinations
