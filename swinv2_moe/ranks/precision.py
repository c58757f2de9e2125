"""The dtype that a device computes in."""

from dataclasses import replace
from functools import partial

import torch

from moe_core import cpu_computes_in
from swinv2_moe.config import AllSections
from swinv2_moe.ranks.world import World


def build_autocast(amp_enable: bool | str, amp_dtype: str, world: World) -> partial:
    """A factory of autocast contexts for the device, as AMP_ENABLE and AMP_DTYPE say."""
    dtype, enabled = getattr(torch, amp_dtype), bool(amp_enable)
    return partial(torch.autocast, world.device.type, dtype=dtype, enabled=enabled)


def without_slow_amp(config: AllSections, world: World) -> tuple[AllSections, list[str]]:
    """Switch mixed precision off if a rank's CPU has no instructions for its dtype: a step would
    take up to 50 times as long as in fp32. All ranks do the same. The recorded YAML keeps
    AMP_ENABLE.

    AMP_ENABLE True is switched off, too: a run may be trained on a GPU and evaluated on a CPU.

    Returns:
        The sections, and a line for the log if mixed precision was switched off: a warning for
        True, a note for auto.
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
    note = f"AMP_ENABLE is {run.amp_enable}: {off_because_slow(run.amp_dtype)}"
    if run.amp_enable != "auto":
        note = f"warning: {note}"
    return config, [note]


def off_because_slow(dtype: str) -> str:
    """The reason for switching mixed precision off, for a message."""
    return (
        f"off, because this CPU has no instructions for {dtype}, and computes in it up to 50 times"
        " as slowly as in float32"
    )
