"""One-sided communication between processes, and collectives that use it.

1. `Channel`: put, signal and wait with one other rank of a `ChannelGroup`.
2. `Plan`: the steps of each rank in a collective. `check` rejects plans that are not safe, and
   `PlanRunner` runs them.
3. `Collectives`: all-to-all, all-gather and reduce-scatter as plans.

They are for CPU tensors of processes of one machine. Between GPUs torch's symmetric memory has such
primitives.

The layers are those of MSCCL++ (arXiv 2504.09014).
"""

from moe_core.comm.channel import Channel, ChannelGroup
from moe_core.comm.check import PlanError, check
from moe_core.comm.collectives import Collectives
from moe_core.comm.plan import Input, Output, Plan, Program, Slot
from moe_core.comm.runner import PlanRunner

__all__ = [
    "Channel",
    "ChannelGroup",
    "Collectives",
    "Input",
    "Output",
    "Plan",
    "PlanError",
    "PlanRunner",
    "Program",
    "Slot",
    "check",
]
