"""The configurations of measurements, and checks of them. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from yacs.config import CfgNode

from swinv2_moe.config import as_opts, default_config, flatten, load_config, merge_opts
from swinv2_moe.errors import UserError

# Settings that make a training step repeatable: one batch, and a learning rate of 0.
REPEATABLE = {
    "AUG.MIXUP": 0,
    "AUG.CUTMIX": 0,
    "TRAIN.ACCUMULATION_STEPS": 1,
    "TRAIN.EMA_DECAY": 0,
    "TRAIN.BASE_LR": 0,
    "TRAIN.WARMUP_LR": 0,
    "TRAIN.MIN_LR": 0,
}


def check_opts(opts: Sequence[str], config: CfgNode, why: dict[str, str]) -> None:
    """Check that the measured configuration has the values of --opts.

    Args:
        config: the configuration that is measured.
        why: the reason, for keys whose value is fixed.

    Raises:
        UserError: a key of `opts` has another value in `config`; an unknown key, a value of the
            wrong type.
    """
    requested_config = default_config()
    merge_opts(requested_config, opts)
    requested = flatten(requested_config)
    measured = flatten(config)
    for key in opts[::2]:
        if requested[key] != measured[key]:
            reason = why.get(key, f"what is measured has {measured[key]!r}")
            raise UserError(f"--opts {key} is {requested[key]!r}, but {reason}")


def repeatable_step(
    file: str | Path, opts: Sequence[str], data: str | None, batch_size: int | None
) -> CfgNode:
    """The checked configuration of a repeatable step, whose phases can be told apart. This process
    reads the data.

    Raises:
        UserError: as `load_config`; also for COMPILE and TRAIN.SHARD_TRUNK, whose operators cannot
            be divided into phases, and for `opts` that have no effect on the measurement.
    """
    keys = {"DATA.NUM_WORKERS": 0} | REPEATABLE
    if batch_size is not None:
        if batch_size < 1:
            raise UserError(f"--batch-size is {batch_size}, it must be at least 1")
        keys |= {"DATA.BATCH_SIZE": batch_size, "DATA.GLOBAL_BATCH_SIZE": 0}
    config = load_config(file, [*opts, *as_opts(keys)], data=data)
    check_opts(
        opts,
        config,
        dict.fromkeys(("DATA.BATCH_SIZE", "DATA.GLOBAL_BATCH_SIZE"), "--batch-size decides"),
    )
    values = flatten(config)
    for name in ("COMPILE", "TRAIN.SHARD_TRUNK"):
        if values[name]:
            raise UserError(
                f"{name} is True: the phases of such a step cannot be told apart; set it to false"
            )
    return config
