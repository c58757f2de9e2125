"""Shared parameters over the ranks: replicated (DDP) or sharded (FSDP2). Experts stay with their
owners in both."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from moe_core import WithoutExperts, expert_parameters
from swinv2_moe.models import MoEModel, WithAuxLoss
from swinv2_moe.train.distributed import World


def parallelize(
    model: MoEModel, world: World, compile: bool = False, shard: bool = False
) -> nn.Module:
    """The model with its aux loss as second output, compiled if asked, its shared parameters
    replicated or, if `shard`, sharded (and not compiled)."""
    wrapped = WithAuxLoss(model)
    if world.size > 1 and shard:
        shard_trunk(model, world)
        return wrapped
    if compile:
        wrapped.compile()
    if world.size == 1:
        return wrapped
    return DistributedDataParallel(WithoutExperts(wrapped), process_group=world.group)


def settle_buckets(replicated: nn.Module, model: MoEModel, world: World) -> None:
    """Comes before the first step, and has no effect on the model. After its first backward pass
    DDP puts the gradients into other buckets, by the order in which they came; from three ranks on
    that changes how they are summed, so the first step after a resume would differ from the
    uninterrupted run's by a rounding error."""
    if not isinstance(replicated, DistributedDataParallel) or world.size < 3:
        return
    was_training = model.training
    images = torch.zeros(2, *model.input_shape(), device=world.device)
    model.eval()
    logits, aux_loss = replicated(images)
    (logits.sum() + aux_loss).backward()
    model.train(was_training)
    model.zero_grad(set_to_none=True)


def shard_trunk(model: MoEModel, world: World) -> None:
    """Give each rank 1/W of every shared parameter, as a DTensor; a block is gathered while it is
    at work.

    The gradient of the mean loss of all ranks comes back, to each rank its part.
    """
    mesh = DeviceMesh.from_group(world.group, world.device.type)
    experts = set(expert_parameters(model).values())
    blocks = [block for blocks in model.block_stages() for block in blocks]
    for module in (*blocks, model):
        # Also the root's own parameters go back to shards after a forward pass without a backward
        # one.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=experts)
    for module in (*blocks, model):
        # Sets up what the gathered parameters live in: were the first pass in inference mode,
        # training could not use it
        module.unshard()
        module.reshard()


def averaged_copy(model: MoEModel, world: World, decay: float, shard: bool) -> ModelEmaV3 | None:
    """The moving average of the weights, sharded like them; None at a decay of 0. Comes before
    `parallelize`: a sharded model cannot be copied."""
    if not decay:
        return None
    if world.size == 1 or not shard:
        return ModelEmaV3(model, decay=decay)
    # a list cannot mix sharded tensors and others
    average = ModelEmaV3(model, decay=decay, foreach=False)
    shard_trunk(average.module, world)
    return average


@contextmanager
def gradient_sync(wrapped: nn.Module, enabled: bool) -> Iterator[None]:
    """A forward and a backward pass after which the ranks' shared gradients are averaged, or still
    to be."""
    if isinstance(wrapped, DistributedDataParallel) and not enabled:
        with wrapped.no_sync():
            yield
        return
    if isinstance(wrapped, WithAuxLoss) and isinstance(wrapped.model, FSDPModule):
        wrapped.model.set_requires_gradient_sync(enabled)
    yield


def whole_tensors(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Sharded tensors put together, one after the other; only a rank that is to `keep` them does,
    on the CPU.

    Other tensors stay as they are. Every rank calls this.
    """
    whole = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            whole[name] = tensor
            continue
        gathered = tensor.full_tensor()
        if keep:
            whole[name] = gathered.cpu()
    return whole


def placed_like(tensor: Tensor, model_tensor: Tensor) -> Tensor:
    """A tensor, whole on every rank or sharded already, on the device of the model's and sharded as
    that is."""
    tensor = tensor.to(model_tensor.device)
    if not isinstance(model_tensor, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(
        tensor, model_tensor.device_mesh, model_tensor.placements, src_data_rank=None
    )


def load_whole(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """`model.load_state_dict` for what may be whole tensors where the model's are sharded: each
    rank takes its part."""
    state = model.state_dict()
    model.load_state_dict(
        {name: placed_like(tensor, state[name]) for name, tensor in tensors.items()}
    )
