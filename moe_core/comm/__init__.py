"""One-sided communication between processes, and collectives that use its signals.

1. `Channel`: put, signal and wait with one other rank of a `ChannelGroup`.
2. `Collectives`: all-to-all, all-gather and reduce-scatter.

They are for CPU tensors of processes of one machine. Between GPUs torch's symmetric memory has such
primitives.
"""

from moe_core.comm.channel import Channel, ChannelGroup
from moe_core.comm.collectives import Collectives

__all__ = ["Channel", "ChannelGroup", "Collectives"]
