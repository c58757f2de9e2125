"""Mixed precision of forward passes."""

from functools import partial

import torch

from swinv2_moe.config import RunConfig, TrainConfig
from swinv2_moe.train.distributed import World


def build_autocast(config: RunConfig | TrainConfig, world: World) -> partial:
    """A factory of autocast contexts for the device, as AMP_ENABLE and AMP_DTYPE say."""
    dtype = getattr(torch, config.amp_dtype)
    return partial(torch.autocast, world.device.type, dtype=dtype, enabled=config.amp_enable)
