"""The operations of an MoE layer. Each folder has a specification, fast implementations and the op.

An implementation is called a form. `backend.chosen` chooses their language once for each pass.
"""

from moe_core.ops.backend import Kernels, check_kernels, chosen
from moe_core.ops.buffers import empty, release_buffers
from moe_core.ops.combine.op import combine, dispatch
from moe_core.ops.ffn.inputs import ExpertWeights
from moe_core.ops.ffn.linear import expert_linear
from moe_core.ops.ffn.op import (
    casts_weights,
    expert_ffn,
    moe_ffn,
    pack_weights,
    prefers_unpacked,
    product_dtype,
)
from moe_core.ops.native.instruction_sets import cpu_computes_in
from moe_core.ops.plan.op import DispatchPlan, inverse_plan, make_plan
from moe_core.ops.route.inputs import RouteSettings
from moe_core.ops.route.op import LinearLogits, loss_of_sums, route
from moe_core.ops.soft.op import soft_combine, soft_dispatch

__all__ = [
    "DispatchPlan",
    "ExpertWeights",
    "Kernels",
    "LinearLogits",
    "RouteSettings",
    "casts_weights",
    "check_kernels",
    "chosen",
    "combine",
    "cpu_computes_in",
    "dispatch",
    "empty",
    "expert_ffn",
    "expert_linear",
    "inverse_plan",
    "loss_of_sums",
    "make_plan",
    "moe_ffn",
    "pack_weights",
    "prefers_unpacked",
    "product_dtype",
    "release_buffers",
    "route",
    "soft_combine",
    "soft_dispatch",
]
