"""`tutel.net`: collectives, process groups and an optimizer with states sharded over ranks."""

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import nn

from moe_core.compat.tutel.communicate import (
    all_gather,
    all_to_all,
    all_to_all_single,
    allreduce_backward,
    allreduce_forward,
    barrier,
    batch_all_gather_v,
    batch_all_to_all_v,
    create_standalone_group,
    get_world_rank,
    get_world_size,
    reduce_scatter,
    simple_all_gather,
    simple_all_reduce,
    simple_all_to_all,
    simple_broadcast,
    simple_reduce_scatter,
    simple_split,
    spatial_split,
    zero_gather,
    zero_scatter,
)
from moe_core.compat.tutel.groups import create_groups_from_world

__all__ = [
    "TutelDistributedOptimizer",
    "all_gather",
    "all_to_all",
    "all_to_all_single",
    "allreduce_backward",
    "allreduce_forward",
    "barrier",
    "batch_all_gather_v",
    "batch_all_to_all_v",
    "create_groups_from_world",
    "create_standalone_group",
    "get_world_rank",
    "get_world_size",
    "reduce_scatter",
    "simple_all_gather",
    "simple_all_reduce",
    "simple_all_to_all",
    "simple_broadcast",
    "simple_reduce_scatter",
    "simple_split",
    "spatial_split",
    "zero_gather",
    "zero_scatter",
]


class TutelDistributedOptimizer:
    """An optimizer that shards its states over the ranks.

    Each rank has the states of an equal part of the shared parameters, and the states of all its
    own experts' parameters.

    >>> optimizer = TutelDistributedOptimizer(model.parameters()).warp_local(torch.optim.SGD, lr=1)

    Args:
        group: the ranks that share the parameters; None: the world.
        average_shared: whether gradients of shared parameters are averaged over the ranks; False:
            they are summed.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        average_shared: bool = False,
    ) -> None:
        everything = list(params)
        self.params = [p for p in everything if not hasattr(p, "_tutel_expert")]
        self.expert_params = [p for p in everything if hasattr(p, "_tutel_expert")]
        self.group = group
        self.average_shared = average_shared

    def warp_local(self, local_optim: Callable, *args, **kwargs) -> "TutelDistributedOptimizer":
        """Create the optimizer of this rank's parts: `local_optim(parameters, *args, **kwargs)`."""
        self.parts = []
        for parameter in self.params:
            part, _ = zero_scatter(parameter.data, simple_split, group=self.group)
            self.parts.append(nn.Parameter(part.clone()))
        self.local_optim = local_optim(self.parts + self.expert_params, *args, **kwargs)
        return self

    def zero_grad(self) -> None:
        for parameter in self.params + self.expert_params:
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()

    def step(self) -> None:
        """Reduce the gradients, update this rank's parts and gather the parameters."""
        for parameter, part in zip(self.params, self.parts, strict=True):
            part.grad = None
            if parameter.grad is not None:
                grad = parameter.grad
                if self.average_shared:
                    grad = grad / get_world_size(self.group)
                part.grad, _ = zero_scatter(grad, simple_reduce_scatter, group=self.group)
        self.local_optim.step()
        for parameter, part in zip(self.params, self.parts, strict=True):
            gathered = simple_all_gather(part.data, group=self.group)
            parameter.data.copy_(gathered[: parameter.numel()].view_as(parameter))
