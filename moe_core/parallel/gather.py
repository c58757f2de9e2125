"""Gathers expert weights from other ranks: all experts (r = 0) or parts of one expert (E < W)."""

# W ranks, E experts, M model dim

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.config import ExpertShard
from moe_core.experts import ComputedWeights, Experts
from moe_core.ops import Int8Weights
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.rank_subset import RankSubset
from moe_core.transforms import first_derivative_only


def gather_weights(
    experts: Experts,
    group: ExpertGroup,
    r: int,
    dtype: torch.dtype,
    owners: RankSubset | None = None,
) -> ComputedWeights:
    """The weights that this rank computes with under strategy r, in `dtype`.

    With r = 0 these are the weights of all experts, otherwise those of this rank's experts. If s
    ranks share an expert, each rank gathers 1/r of the hidden dim from s/r ranks. The output bias
    is 0 outside of the corresponding 1/r of M, so the sum of the r partial results is the expert's
    result. Gradients are summed over the ranks and returned to the owners.

    Args:
        owners: the ranks that gather each other's weights, with their collectives. None: ranks of
            `group` that use torch.distributed.
    """
    config, shard = experts.config, experts.shard
    num_gathered = group.size if r == 0 else shard.num_parts // r
    if num_gathered == 1:
        weights = experts.weights(dtype)
    else:
        sharing = owners or group.owners(num_gathered)
        num_experts = 1
        if r == 0:
            num_experts = config.num_experts

        def gather(parameter: Tensor) -> Tensor:
            return join(_Gather.apply(parameter, sharing, dtype), parameter, num_experts)

        weights = experts.weights(dtype, gather, num_gathered)
    b2 = weights.b2
    if b2 is None or b2.shape[1] == config.model_dim:
        return weights
    before = shard.part // num_gathered * b2.shape[1]
    after = config.model_dim - before - b2.shape[1]
    padded = F.pad(b2, (before, after))
    if isinstance(weights, Int8Weights):
        return weights.with_b2(padded)
    return weights._replace(b2=padded)


def join(gathered: Tensor, part: Tensor, num_experts: int) -> Tensor:
    """gathered [ranks * n, ...], the joined parts [n, ...] of a parameter -> the parameter of their
    experts [num_experts, ...]."""
    return gathered.view(num_experts, -1, *part.shape[2:])


@torch.no_grad()
def join_parts(tensor: Tensor, shard: ExpertShard, group: ExpertGroup) -> Tensor:
    """This rank's part [1, n, ...] of a shared expert -> the whole tensor, on each of its ranks.

    If ranks do not share experts, the result is `tensor`.
    """
    if shard.num_parts == 1:
        return tensor
    return join(_gather(tensor, group.owners(shard.num_parts)), tensor, 1)


class _Gather(torch.autograd.Function):
    """parameter [n, ...] of every owner -> [ranks * n, ...] in `dtype`.

    Gradients are summed in the dtype of the parameter.
    """

    @staticmethod
    def forward(ctx, parameter, owners, dtype):
        ctx.owners = owners
        ctx.dtype = parameter.dtype
        return _gather(parameter.to(dtype), owners)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        owners = ctx.owners
        with owners.group.ranks.named_errors("reduce-scatter of expert gradients"):
            return owners.reduce_scatter(grad.to(ctx.dtype)), None, None


def _gather(tensor: Tensor, owners: RankSubset) -> Tensor:
    with owners.group.ranks.named_errors("all-gather of expert weights"):
        return owners.gather(tensor)
