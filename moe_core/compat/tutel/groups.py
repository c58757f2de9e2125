"""Process groups and this process's ranks in them, for `tutel.net.create_groups_from_world`."""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_core.parallel import ExpertGroup, make_expert_groups

_BACKENDS = ("nccl", "gloo")
_DEFAULT_TIMEOUT = 86400  # seconds; TUTEL_GLOBAL_TIMEOUT_SEC


@dataclass
class ParallelEnv:
    """The ranks and groups of a process.

    The world is divided into `group_count` model groups of consecutive ranks. A data group consists
    of the ranks with the same rank in each model group.
    """

    global_size: int
    global_rank: int
    local_rank: int
    local_size: int
    group_count: int
    data_rank: int
    model_size: int
    model_rank: int
    local_device: torch.device | None
    data_group: dist.ProcessGroup | None
    model_group: dist.ProcessGroup | None
    global_group: dist.ProcessGroup | None
    is_distributed: bool
    dist_print: Callable[..., None]
    is_cuda: bool = False


# By the world's process group, group_count and backend, so that all layers share process groups.
_made: dict[tuple[dist.ProcessGroup | None, int, str | None], ParallelEnv] = {}
_expert_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by process group
_backends: dict[dist.ProcessGroup | None, str] = {}  # by the world's process group


def create_groups_from_world(
    group_count: int,
    include_init: str | None = None,
    parent_group: dist.ProcessGroup | None = None,
) -> ParallelEnv:
    """Divide the world into `group_count` groups of consecutive ranks.

    Every rank of the world must call this. Calls with the same arguments return the same groups.

    Args:
        group_count: the number of groups; -n means groups of n ranks.
        include_init: "nccl" or "gloo": start torch.distributed with this backend, if a launcher has
            set the environment variables. None: do not start it.
        parent_group: the group to divide: the world, or a group of one rank, which is ignored.

    Raises:
        ValueError: `group_count` does not divide the number of ranks; the backend is unknown or not
            the one in use; `parent_group` is a part of the world.
    """
    if include_init is not None:
        _start(include_init)
    world = None
    if dist.is_initialized():
        world = dist.group.WORLD
        _check_parent(parent_group, world)
    backend = _backends.get(world, include_init)
    if include_init is not None and backend != include_init:
        raise ValueError(f"backend ({include_init!r}) is not the one in use ({backend!r})")
    if backend is not None:
        _backends[world] = backend
    key = (world, group_count, backend)
    if key not in _made:
        _made[key] = _make(group_count, backend)
    return _made[key]


def expert_group_of(group: dist.ProcessGroup | None) -> ExpertGroup:
    """The ExpertGroup of a process group (None: the world). All layers share it.

    For the world, it has the process groups of strategies, since every rank creates a layer.
    """
    if not dist.is_initialized():
        return ExpertGroup()
    world = dist.group.WORLD
    group = group or world
    if group not in _expert_groups:
        if group == world:
            _expert_groups[group] = make_expert_groups(dist.get_world_size())
        else:
            _expert_groups[group] = ExpertGroup(group)
        # Tutel's gradients are sums, and its state dicts hold the experts of a rank
        _expert_groups[group].for_torch_tools = False
        _expert_groups[group].averaged_elsewhere = True
    return _expert_groups[group]


def _start(backend: str) -> None:
    """Start torch.distributed under torchrun or mpirun. Otherwise this is the only process."""
    if backend not in _BACKENDS:
        raise ValueError(f"backend ({backend!r}) must be one of {', '.join(_BACKENDS)}")
    if dist.is_initialized():
        return
    seconds = int(os.environ.get("TUTEL_GLOBAL_TIMEOUT_SEC", _DEFAULT_TIMEOUT))
    timeout = timedelta(seconds=seconds)
    if "LOCAL_RANK" not in os.environ and "OMPI_COMM_WORLD_SIZE" in os.environ:
        port = os.environ.get("MASTER_PORT", "23456")
        dist.init_process_group(
            backend,
            init_method=f"tcp://{os.environ['MASTER_ADDR']}:{port}",
            rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
            world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
            timeout=timeout,
        )
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)


def _check_parent(parent_group: dist.ProcessGroup | None, world: dist.ProcessGroup | None) -> None:
    if parent_group is None or parent_group == world:
        return
    size = dist.get_world_size(parent_group)
    if 1 < size < dist.get_world_size():
        raise ValueError(
            f"parent_group has {size} of {dist.get_world_size()} ranks: only the world can be"
            " divided"
        )


def _make(group_count: int, backend: str | None) -> ParallelEnv:
    size, rank = 1, 0
    if dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
    count = group_count
    if group_count < 0:
        count = size // -group_count
    if count < 1 or size % count:
        raise ValueError(f"group_count ({group_count}) must divide the {size} ranks of the world")
    model_size = size // count
    local_rank = _local_rank()
    device = None
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif backend == "gloo":
        device = torch.device("cpu")
    model_group = data_group = global_group = None
    if dist.is_initialized():
        global_group = dist.group.WORLD
        blocks = [range(i, i + model_size) for i in range(0, size, model_size)]
        strides = [range(i, size, model_size) for i in range(model_size)]
        model_group, data_group = _own_group(blocks), _own_group(strides)
    return ParallelEnv(
        global_size=size,
        global_rank=rank,
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        group_count=count,
        data_rank=rank // model_size,
        model_size=model_size,
        model_rank=rank % model_size,
        local_device=device,
        data_group=data_group,
        model_group=model_group,
        global_group=global_group,
        is_distributed=dist.is_initialized(),
        dist_print=_printer(rank),
    )


def _local_rank() -> int:
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if "LOCAL_RANK" not in os.environ:
        local_rank = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0))
    if torch.cuda.is_available():
        local_rank = min(local_rank, torch.cuda.device_count() - 1)
    return local_rank


def _own_group(partition: list[range]) -> dist.ProcessGroup | None:
    """Create a process group for each part of the world, and return this rank's."""
    if len(partition) == 1:
        return dist.group.WORLD
    group_of_rank = None
    seconds = int(os.environ.get("TUTEL_GLOBAL_TIMEOUT_SEC", _DEFAULT_TIMEOUT))
    for ranks in partition:
        process_group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))
        if dist.get_rank() in ranks:
            group_of_rank = process_group
    return group_of_rank


def _printer(rank: int) -> Callable[..., None]:
    """A function that prints only on the first rank."""

    def dist_print(*values) -> None:
        if rank == 0:
            print(*values)

    return dist_print
