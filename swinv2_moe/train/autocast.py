"""Mixed precision of forward passes."""

from dataclasses import replace
from functools import partial

import torch

from moe_core import cpu_computes_in
from swinv2_moe.config import AllSections, RunConfig, TrainConfig
from swinv2_moe.train.distributed import World


def build_autocast(config: RunConfig | TrainConfig, world: World) -> partial:
    """A factory of autocast contexts for the device, as AMP_ENABLE and AMP_DTYPE say."""
    dtype = getattr(torch, config.amp_dtype)
    return partial(torch.autocast, world.device.type, dtype=dtype, enabled=config.amp_enable)


def without_slow_amp(config: AllSections, world: World) -> tuple[AllSections, list[str]]:
    """Switch mixed precision off on CPUs without instructions for its dtype, where a step takes up
    to 50 times as long as in fp32. All ranks do the same. The recorded YAML keeps AMP_ENABLE.

    Returns:
        The sections, and a warning for the log if mixed precision was switched off.
    """
    run = config.run
    if not run.amp_enable or world.device.type != "cpu":
        return config, []
    if all(world.gather(cpu_computes_in(run.amp_dtype))):
        return config, []
    config = replace(
        config,
        run=replace(run, amp_enable=False),
        train=replace(config.train, amp_enable=False),
    )
    return config, [f"warning: AMP_ENABLE is True: {off_because_slow(run.amp_dtype)}"]


def off_because_slow(dtype: str) -> str:
    """The reason for switching mixed precision off, for a message."""
    return (
        f"off, because this CPU has no instructions for {dtype}, and computes in it up to 50 times"
        " as slowly as in float32"
    )
