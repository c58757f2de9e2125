"""Expert weights from the ranks that share them: r = 0 gathers all experts, E < W the parts of
one."""

# W ranks, E experts, M model dim

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core.config import ExpertShard
from moe_core.experts import Experts
from moe_core.ops import ExpertWeights
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.part import Part


def strategy_weights(
    experts: Experts, num_experts: int, group: ExpertGroup, r: int, dtype: torch.dtype
) -> ExpertWeights:
    """What this rank computes with under strategy r; the gradients return to the owners, summed
    over the ranks.

    r = 0: all experts. Otherwise this rank's own; where s ranks share one, the 1/r of its hidden
    dim that s/r of them hold. The output bias is cut likewise, along M, and 0 elsewhere: the r
    partial results add up to the whole.
    """
    model_dim, shard = experts.config.model_dim, experts.shard
    joined = group.size if r == 0 else shard.num_parts // r
    if joined == 1:
        weights = experts.weights(dtype)
    else:
        owners, first = group.owners(joined), num_experts if r == 0 else 1

        def gather(own: Tensor) -> Tensor:
            return _Gather.apply(own, group, owners, dtype).view(first, -1, *own.shape[2:])

        weights = experts.weights(dtype, gather)
    b2 = weights.b2
    if b2 is not None and b2.shape[1] < model_dim:
        before = shard.part // joined * b2.shape[1]
        weights = weights._replace(b2=F.pad(b2, (before, model_dim - before - b2.shape[1])))
    return weights


@torch.no_grad()
def join_parts(own: Tensor, shard: ExpertShard, group: ExpertGroup) -> Tensor:
    """This rank's part [1, n, ...] of an expert that several ranks share -> the whole, on each of
    them; else `own`."""
    if shard.num_parts == 1:
        return own
    return _gather(own, group, group.owners(shard.num_parts)).view(1, -1, *own.shape[2:])


class _Gather(torch.autograd.Function):
    """own [n, ...] of every rank -> [ranks * n, ...] in `dtype`; gradients are summed in the
    parameter's own dtype."""

    @staticmethod
    def forward(ctx, own, group, owners, dtype):
        ctx.group, ctx.owners, ctx.dtype = group, owners, own.dtype
        _count(group, owners, own.numel())
        return _gather(own.to(dtype), group, owners)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        with ctx.group.named_errors("reduce-scatter of expert gradients"):
            own = ctx.owners.reduce_scatter(grad.to(ctx.dtype))
        _count(ctx.group, ctx.owners, own.numel())
        return own, None, None, None


def _gather(own: Tensor, group: ExpertGroup, owners: Part) -> Tensor:
    with group.named_errors("all-gather of expert weights"):
        return owners.gather(own)


def _count(group: ExpertGroup, owners: Part, elements: int) -> None:
    if group.traffic is not None:
        for rank in owners.members:
            if rank != group.rank:
                group.traffic.add(rank, elements)
