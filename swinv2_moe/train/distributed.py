"""The processes of a run: one, or those that torchrun started."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.parallel import CollectiveError, ExpertGroup, Ranks, make_expert_groups
from swinv2_moe.config import ExpertsConfig
from swinv2_moe.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all of them; `group` is None for a single one."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def ranks(self) -> Ranks:
        """The collectives of all processes."""
        return Ranks(self.group, f"rank {self.rank} of {self.size}", "within TIMEOUT")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.ranks.barrier(self.device)

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over all ranks, in place."""
        return self.ranks.all_reduce(values, "sum over all ranks")

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over all ranks, in place."""
        return self.ranks.all_reduce(values, "maximum over all ranks", dist.ReduceOp.MAX)

    def gather(self, value: object) -> list:
        """Every rank's `value` (picklable, small), on every rank."""
        return self.ranks.gather_objects(value, "gathering from all ranks")

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[N, ...] of every rank, i-th rows of all before the next ones -> [N * size, ...] on the
        main rank's CPU.

        So what belongs to the images of a ValSampler comes in the order of the data set. The others
        get no rows.
        """
        if self.group is None:
            return rows.cpu()
        parts = self.ranks.gather_to_first(rows, "gathering rows from all ranks")
        if parts is None:
            return rows[:0].cpu()
        return torch.stack(parts, dim=1).flatten(0, 1).cpu()

    def agree(self, value: object) -> object:
        """The main rank's `value` (picklable, small), on every rank."""
        return self.gather(value if self.is_main else None)[0]

    def everywhere(self, load: Callable[[], T]) -> T:
        """What `load` returns; a UserError that it raises on one rank is raised on all. Every rank
        calls this."""
        loaded, problem = None, None
        try:
            loaded = load()
        except UserError as error:
            problem = str(error)
        problems = self.gather(problem)
        for rank, problem in enumerate(problems):
            if problem is not None:
                alone = ""
                if None in problems:
                    alone = f" (rank {rank})"
                raise UserError(f"{problem}{alone}")
        return loaded

    def named_errors(self, operation: str) -> AbstractContextManager[None]:
        """Gives a collective that fails or times out within the block the name of the operation: a
        rank has ended, or is stuck."""
        return self.ranks.named_errors(operation)


@contextmanager
def open_world(device: str = "auto", timeout: int = 600) -> Iterator[World]:
    """Join the processes torchrun started, or run alone; leaves the group at the end.

    `timeout` is in seconds, for ranks that do not answer.

    Raises:
        UserError: CUDA asked for but absent, or more ranks on this machine than GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if use_cuda and not torch.cuda.is_available():
        raise UserError("DEVICE is 'cuda', but torch finds no GPU here; use DEVICE cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}"
        )
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(place)
    if size == 1:
        yield World(0, 1, place)
        return
    limit = timedelta(seconds=timeout)
    try:
        # No device_id: NCCL would set up a communicator for every process group at once, also for
        # those never used.
        dist.init_process_group("nccl" if use_cuda else "gloo", timeout=limit)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {os.environ['RANK']} of {size} did not find the others ({error})"
        ) from error
    try:
        yield World(dist.get_rank(), size, place, dist.group.WORLD, limit)
    finally:
        dist.destroy_process_group()


def expert_group(config: ExpertsConfig, world: World) -> ExpertGroup | None:
    """The ranks that share this one's experts, and its replicas; None for a single process or a
    dense model.

    Raises:
        UserError: sizes that do not divide.
    """
    if world.group is None or not config.num_experts:
        return None
    try:
        return make_expert_groups(
            config.expert_parallel_size or world.size, world.timeout, config.ranks_per_node or None
        )
    except ValueError as error:
        raise UserError(f"MODEL.MOE: {error}") from error


def seed_everything(*parts: int) -> None:
    """Seed `random`, numpy and torch from `parts`, say (seed, epoch, rank): an epoch's random
    numbers do not depend on those before it, so a run that resumes at its start repeats them."""
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what timm draws mixup from
    torch.manual_seed(seed)
