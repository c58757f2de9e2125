"""One-sided communication between the processes of one machine, and collectives written with it.

1. `Channel`: put, signal, wait and flush to one other rank of a `ChannelGroup`.
2. `Plan`: which rank puts what where, and who waits for whom. `check` refuses what is not safe,
   `PlanRunner` runs it.
3. `Collectives`: all-to-all, all-gather, reduce-scatter and all-reduce as plans.

Between GPUs: `cuda.CudaMemoryGroup`, `cuda_collectives.CudaAllToAll` and `switch.SwitchChannel`.

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
