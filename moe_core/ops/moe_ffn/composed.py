"""Tokens through their experts and back, by one op after the other."""

# T tokens, K top-k, M model dim

from torch import Tensor

from moe_core.ops.combine.op import combine, dispatch
from moe_core.ops.ffn.inputs import ExpertWeights
from moe_core.ops.ffn.op import expert_ffn
from moe_core.ops.plan.op import DispatchPlan, inverse_plan


def moe_ffn(
    tokens: Tensor,
    gates: Tensor | None,
    weights: ExpertWeights,
    plan: DispatchPlan,
    activation: str,
    dropout: float,
    kernels: str,
) -> Tensor:
    """As `op.moe_ffn`; differentiated by the ops."""
    rows = dispatch(tokens, plan, kernels)
    rows = expert_ffn(rows, weights, plan.offsets, activation, dropout, kernels)
    if gates is None:
        return dispatch(rows, inverse_plan(plan), kernels)
    return combine(rows, gates, plan, kernels)
