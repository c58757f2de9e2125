"""`tutel.net` and `tutel.impls.communicate`: collectives over torch.distributed, and an optimizer
with states sharded over ranks.

`group` None is the world. With one rank, or without torch.distributed, a collective returns its
input.
"""

# W ranks of the group

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core.compat.tutel.groups import create_groups_from_world as create_groups_from_world
from moe_core.context import first_derivative_only
from moe_core.ranks import Ranks

SUM = dist.ReduceOp.SUM


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks; 1 without torch.distributed."""
    if not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def get_world_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank; 0 without torch.distributed."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank(group)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    if get_world_size(group) > 1:
        with _named_errors("barrier", group):
            dist.barrier(group=group)


# 1. Collectives without a gradient


def simple_broadcast(input: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Overwrite `input` with the tensor of rank `src` of the world, and return it."""
    if get_world_size(group) > 1:
        with _named_errors("broadcast", group):
            dist.broadcast(input, src=src, group=group)
    return input


def simple_all_reduce(
    input: Tensor, group: dist.ProcessGroup | None = None, op=SUM, inplace: bool = False
) -> Tensor:
    """The reduction of `input` over the ranks, in a new tensor unless `inplace`."""
    if get_world_size(group) == 1:
        return input
    output = input
    if not inplace:
        output = torch.clone(input, memory_format=torch.contiguous_format)
    with _named_errors("all-reduce", group):
        dist.all_reduce(output, op=op, group=group)
    return output


def simple_all_to_all(
    input: Tensor, group: dist.ProcessGroup | None = None, background: bool = False
) -> Tensor | tuple[Tensor, Callable]:
    """Send part i of W equal parts of the first dim to rank i.

    Returns:
        The received parts, in the order of the ranks; with `background`, also a function that waits
        for them.
    """
    input = input.contiguous()
    if get_world_size(group) == 1:
        if background:
            return input, lambda *args: None
        return input
    output = torch.empty_like(input)
    with _named_errors("all-to-all", group):
        work = dist.all_to_all_single(output, input, group=group, async_op=background)
    if background:
        return output, work.wait
    return output


def simple_split(input: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of the first dim.

    Raises:
        ValueError: the ranks do not divide the first dim.
    """
    num_ranks = get_world_size(group)
    if num_ranks == 1:
        return input
    _check_divides(input, num_ranks)
    return input.contiguous().chunk(num_ranks, dim=0)[get_world_rank(group)]


def simple_reduce_scatter(input: Tensor, group: dist.ProcessGroup | None = None, op=SUM) -> Tensor:
    """This rank's part, along the first dim, of the reduction of `input` over the ranks.

    Raises:
        ValueError: the ranks do not divide the first dim.
    """
    num_ranks = get_world_size(group)
    if num_ranks == 1:
        return input
    _check_divides(input, num_ranks)
    if not input.is_cuda:  # gloo has no reduce-scatter
        return simple_split(simple_all_reduce(input, group, op), group)
    output = input.new_empty(input.shape[0] // num_ranks, *input.shape[1:])
    with _named_errors("reduce-scatter", group):
        dist.reduce_scatter_tensor(output, input.contiguous(), op=op, group=group)
    return output


def simple_all_gather(input: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The tensors of all ranks, joined along the first dim."""
    num_ranks = get_world_size(group)
    if num_ranks == 1:
        return input
    input = input.contiguous()
    parts = [torch.empty_like(input) for _ in range(num_ranks)]
    with _named_errors("all-gather", group):
        dist.all_gather(parts, input, group=group)
    if input.dim() == 0:
        return torch.stack(parts)
    return torch.cat(parts)


def batch_all_to_all_v(
    datas: Sequence[Tensor],
    partition_sizes: Tensor | Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Send parts of each flat tensor to the ranks. The sizes of the parts are the same for all.

    Args:
        partition_sizes: [W], the number of elements for each rank.

    Returns:
        The received elements for each tensor, and the number of elements [W] from each rank.
    """
    num_ranks = get_world_size(group)
    sizes = torch.as_tensor(partition_sizes, dtype=torch.int64, device=datas[0].device)
    if sizes.numel() != num_ranks:
        raise ValueError(f"partition_sizes has {sizes.numel()} values, the group {num_ranks} ranks")
    if num_ranks == 1:
        return list(datas), sizes
    received = simple_all_to_all(sizes, group)
    assert isinstance(received, Tensor)
    outputs = []
    for data in datas:
        output = data.new_empty(int(received.sum()))
        with _named_errors("all-to-all", group):
            dist.all_to_all_single(
                output, data.flatten(), received.tolist(), sizes.tolist(), group=group
            )
        outputs.append(output)
    return outputs, received


def batch_all_gather_v(
    datas: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor], Tensor]:
    """Join the flat tensors of all ranks, which may have different lengths.

    Returns:
        The joined tensors, and the length of the tensors on each rank [W].
    """
    sizes = torch.tensor([datas[0].numel()], device=datas[0].device)
    num_ranks = get_world_size(group)
    if num_ranks == 1:
        return list(datas), sizes
    sizes = simple_all_gather(sizes, group)
    longest = int(sizes.max())
    outputs = []
    for data in datas:
        padded = data.new_zeros(longest)
        padded[: data.numel()] = data.flatten()
        rows = simple_all_gather(padded, group).view(num_ranks, longest)
        outputs.append(torch.cat([row[:n] for row, n in zip(rows, sizes.tolist(), strict=True)]))
    return outputs, sizes


# 2. Collectives with a gradient


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, group):
        ctx.group = group
        return simple_all_to_all(input, group)

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.group), None


class _Collective(torch.autograd.Function):
    """A collective, and another one for the gradient of its input."""

    @staticmethod
    def forward(ctx, input, collective, of_gradient):
        ctx.of_gradient = of_gradient
        return collective(input)

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad):
        return ctx.of_gradient(grad), None, None


def all_to_all_single(input: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """`simple_all_to_all` with a gradient."""
    return _AllToAll.apply(input, group)


def all_to_all(
    input: Tensor,
    input_dim: int,
    output_dim: int,
    group: dist.ProcessGroup | None = None,
    background: bool = False,
    use_2dh: bool = False,
) -> Tensor | Callable[[], Tensor]:
    """As `exchange`. `use_2dh` has no effect: the linear exchange, with the same result, is used.

    Returns:
        The tensor; with `background`, a function that waits and returns it.
    """
    output = exchange(input, input_dim, output_dim, group)
    if background:
        return lambda: output
    return output


def exchange(
    input: Tensor, input_dim: int, output_dim: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """An all-to-all that divides `output_dim` over the ranks and joins their parts in `input_dim`.

    `[E, C, M]` with dims (1, 0) becomes `[E / W, W * C, M]`, and (0, 1) is the inverse.

    Raises:
        ValueError: the ranks do not divide `output_dim`.
    """
    num_ranks = get_world_size(group)
    if input_dim == output_dim or num_ranks == 1:
        return input
    if input.shape[output_dim] % num_ranks:
        raise ValueError(
            f"dim {output_dim} ({input.shape[output_dim]}) must be divisible by the"
            f" {num_ranks} ranks"
        )
    parts = torch.stack(input.chunk(num_ranks, output_dim))  # [W, ...]
    received = all_to_all_single(parts, group)
    return torch.cat(received.unbind(), input_dim)


def all_gather(
    input: Tensor, dim: int, fused: bool = False, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Join the ranks' tensors along `dim`. With `fused` the ranks' gradients are summed."""
    return _gathered(input.transpose(0, dim), fused, group).transpose(0, dim)


def _gathered(input: Tensor, sums: bool, group: dist.ProcessGroup | None) -> Tensor:
    """An all-gather. The gradient is this rank's part of its own gradient or, with `sums`, of the
    sum of all ranks' gradients."""
    of_gradient = simple_reduce_scatter if sums else simple_split
    return _Collective.apply(
        input, partial(simple_all_gather, group=group), partial(of_gradient, group=group)
    )


def zero_gather(
    input: Tensor, full_shape: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Join the ranks' parts of a parameter; their gradients are summed.

    Args:
        full_shape: the shape of the whole parameter. The ranks have flat parts of equal length.
            None: the shape of a part, with W times the first dim.
    """
    gathered = _gathered(input, True, group)
    if full_shape is None:
        return gathered
    shape = torch.Size(full_shape)
    return gathered.reshape(-1)[: shape.numel()].view(shape)


def zero_scatter(
    input: Tensor, scatter_fn: Callable, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, torch.Size]:
    """`scatter_fn` of the flat tensor, padded with zeros to a multiple of W, and the shape of
    `input`."""
    flat = input.reshape(-1)
    missing = -flat.numel() % get_world_size(group)
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return scatter_fn(flat, group=group), input.shape


def _check_divides(input: Tensor, num_ranks: int) -> None:
    if input.shape[0] % num_ranks:
        raise ValueError(f"dim 0 ({input.shape[0]}) must be divisible by the {num_ranks} ranks")


def _named_errors(operation: str, group: dist.ProcessGroup | None):
    description = f"rank {get_world_rank(group)} of {get_world_size(group)}"
    return Ranks(group, description).named_errors(operation)


# 3. The optimizer


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


# Only tutel.parted, which has no counterpart, uses them.
_MISSING = (
    "create_standalone_group",
    "spatial_split",
    "reduce_scatter",
    "allreduce_forward",
    "allreduce_backward",
)


def __getattr__(name: str) -> object:
    """Raise NotImplementedError for names of Tutel without a counterpart."""
    if name in _MISSING:
        raise NotImplementedError(f"tutel.net.{name} has no counterpart here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
