"""Dispatch, the experts' networks and combine, as separate ops."""

# T tokens, K top-k, N rows, M model dim

from collections.abc import Callable

from torch import Tensor

from moe_core.ops.combine.op import combine, dispatch
from moe_core.ops.plan.op import DispatchPlan, inverse_plan


def moe_ffn(
    tokens: Tensor,
    gates: Tensor | None,
    ffn: Callable[[Tensor], Tensor],
    plan: DispatchPlan,
    kernels: str,
) -> Tensor:
    """As `op.moe_ffn`. `ffn` computes the experts' networks: rows [N, M] -> [N, M].

    The autograd formulas of the ops give the gradients.
    """
    rows = ffn(dispatch(tokens, plan, kernels))
    if gates is None:
        return dispatch(rows, inverse_plan(plan), kernels)
    return combine(rows, gates, plan, kernels)
