"""Shared parameters on several ranks: replicated (DDP) or sharded (FSDP2). In both, each rank keeps
its own experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from moe_core import expert_parameters, ignore_experts
from swinv2_moe.models import MoEModel, WithAuxLoss
from swinv2_moe.ranks.world import World


def parallelize(
    model: MoEModel, world: World, compile: bool = False, shard: bool = False
) -> nn.Module:
    """Replicate or shard the model over the ranks. The result has the auxiliary loss as second
    output.

    Args:
        compile: compile the model. Ignored if it is sharded.
        shard: shard the shared parameters over the ranks, instead of replicating them.
    """
    wrapped = WithAuxLoss(model)
    if world.size > 1 and shard:
        shard_trunk(model, world)
        return wrapped
    if compile:
        wrapped.compile()
    if world.size == 1:
        return wrapped
    replicated = DistributedDataParallel(ignore_experts(wrapped), process_group=world.group)
    replicated.broadcast_buffers = False  # the argument warns from torch 2.15 on
    return replicated


def settle_buckets(replicated: nn.Module, model: MoEModel, world: World) -> None:
    """Run one backward pass, which leaves the model unchanged; call it before the first step.

    After its first backward pass, DDP assigns the gradients to new buckets, in the order in which
    they were computed. With three or more ranks, this changes the order of summation. Without this
    call, the first step after a resume would differ by a rounding error from the same step of an
    uninterrupted run.
    """
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
    """Give each rank 1/W of every shared parameter, as a DTensor.

    The parameters of a block are gathered for its forward and its backward pass. Each rank receives
    its part of the gradient of the ranks' mean loss.
    """
    assert world.group is not None
    mesh = DeviceMesh.from_group(world.group, world.device.type)
    experts = set(expert_parameters(model).values())
    blocks = [block for stage in model.block_stages() for block in stage]
    modules = blocks + [model]
    sharded: list[FSDPModule] = []
    for module in modules:
        # True for the root as well: it must release its parameters after a forward pass without a
        # backward pass.
        sharded.append(
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=experts)
        )
    for part in sharded:
        # Allocates the gathered parameters. Allocated in inference mode, they would be inference
        # tensors, which training cannot use.
        part.unshard()
        part.reshard()


def averaged_copy(model: MoEModel, world: World, decay: float, shard: bool) -> ModelEmaV3 | None:
    """The moving average of the weights, sharded like the weights; None if `decay` is 0.

    `update(model, step)` (steps from 1) uses the decay min(`decay`, t / (t + 9)) after t earlier
    steps, about that of TensorFlow's ExponentialMovingAverage with `num_updates`. It averages over
    at most the last tenth of the run so far, whatever `decay` is.

    Call it before `parallelize`: a sharded model cannot be copied.
    """
    if not decay:
        return None
    is_sharded = shard and world.size > 1
    average = ModelEmaV3(
        model,
        decay=decay,
        use_warmup=True,
        warmup_gamma=9.0,
        warmup_power=1.0,
        foreach=not is_sharded,  # foreach operators cannot mix sharded tensors and others
    )
    if is_sharded:
        shard_trunk(average.module, world)
    return average


@contextmanager
def gradient_sync(wrapped: nn.Module, enabled: bool) -> Iterator[None]:
    """A context for a forward and a backward pass. With `enabled` False, the shared gradients are
    not averaged over the ranks."""
    if isinstance(wrapped, DistributedDataParallel) and not enabled:
        with wrapped.no_sync():
            yield
        return
    if isinstance(wrapped, WithAuxLoss) and isinstance(wrapped.model, FSDPModule):
        wrapped.model.set_requires_gradient_sync(enabled)
    yield


def gather_shards(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Gather each sharded tensor from all ranks. Every rank calls this.

    Args:
        keep: whether this rank's result includes the gathered tensors, on the CPU.
    """
    result = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            result[name] = tensor
            continue
        gathered = tensor.full_tensor()
        if keep:
            result[name] = gathered.cpu()
    return result


def placed_like(tensor: Tensor, model_tensor: Tensor) -> Tensor:
    """Place a tensor on the device of the model's tensor, and shard it in the same way.

    Args:
        tensor: complete on every rank, or already sharded.
    """
    tensor = tensor.to(model_tensor.device)
    if not isinstance(model_tensor, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(
        tensor, model_tensor.device_mesh, model_tensor.placements, src_data_rank=None
    )


def load_sharded(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load complete tensors into a model that may be sharded. Each rank takes its part."""
    state = model.state_dict()
    model.load_state_dict(
        {name: placed_like(tensor, state[name]) for name, tensor in tensors.items()}
    )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor. Other tensors are returned unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
