"""The dtype that a device computes in."""

from functools import partial

import torch

from moe_core import cpu_computes_in
from swinv2_moe.ranks.world import World


def build_autocast(amp_enable: bool | str, amp_dtype: str, world: World) -> partial:
    """A factory of autocast contexts for the device, as AMP_ENABLE and AMP_DTYPE say."""
    dtype, enabled = getattr(torch, amp_dtype), bool(amp_enable)
    return partial(torch.autocast, world.device.type, dtype=dtype, enabled=enabled)


def usable_amp(amp_enable: bool | str, amp_dtype: str, world: World) -> tuple[bool, list[str]]:
    """Whether mixed precision is used. It is off if a rank's CPU has no instructions for its dtype:
    a step would take up to 50 times as long as in fp32. All ranks do the same.

    AMP_ENABLE True is switched off, too: a run may be trained on a GPU and evaluated on a CPU.

    Returns:
        This, and a line for the log if it was switched off: a warning for True, a note for auto.
    """
    if not amp_enable or world.device.type != "cpu":
        return bool(amp_enable), []
    if all(world.gather(cpu_computes_in(amp_dtype))):
        return True, []
    note = f"AMP_ENABLE is {amp_enable}: {off_because_slow(amp_dtype)}"
    if amp_enable != "auto":
        note = f"warning: {note}"
    return False, [note]


def off_because_slow(dtype: str) -> str:
    """The reason for switching mixed precision off, for a message."""
    return (
        f"off, because this CPU has no instructions for {dtype}, and computes in it up to 50 times"
        " as slowly as in float32"
    )
