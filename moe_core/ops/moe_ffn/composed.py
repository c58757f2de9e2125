"""Tokens through their experts and back, by one op after the other."""

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
    """As `op.moe_ffn`, with the experts' networks as a function of rows [N, M]; differentiated by
    the ops."""
    rows = ffn(dispatch(tokens, plan, kernels))
    if gates is None:
        return dispatch(rows, inverse_plan(plan), kernels)
    return combine(rows, gates, plan, kernels)
