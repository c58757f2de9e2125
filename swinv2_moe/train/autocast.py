"""Mixed precision of forward passes."""

from functools import partial

import torch
from yacs.config import CfgNode

from swinv2_moe.train.distributed import World


def build_autocast(config: CfgNode, world: World) -> partial:
    """A factory of autocast contexts for the device, as AMP_ENABLE and AMP_DTYPE say."""
    dtype = getattr(torch, config.AMP_DTYPE)
    return partial(torch.autocast, world.device.type, dtype=dtype, enabled=config.AMP_ENABLE)
