"""What tests of channels and their collectives share."""

import torch.distributed as dist

from moe_core.parallel import Ranks


def world() -> Ranks:
    """The ranks of the default process group, as messages name them."""
    process_group = dist.group.WORLD
    return Ranks(process_group, f"rank {process_group.rank()} of {process_group.size()}")
