"""The processes of a run: a single one, or those that torchrun started; and the signals that stop
them.

SIGTERM comes from schedulers and `kill`, SIGUSR1 from `sbatch --signal=USR1@120`, SIGINT from
Ctrl-C.
"""

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_core import check_kernels
from moe_core.parallel import (
    CollectiveError,
    ExpertGroup,
    Ranks,
    largest_group,
    make_expert_groups,
    parse_strategy,
)
from swinv2_moe.errors import UserError
from swinv2_moe.models.section import ExpertsConfig
from swinv2_moe.threads import keep_freed_memory

T = TypeVar("T")
_STORE_SECONDS = 5  # on top of the timeout, after which torch itself gives up
_POLL_SECONDS = 0.2  # while rank 0 does not listen yet
# `timeout -s INT` and some launchers send SIGINT twice, within this many seconds.
_DUPLICATE_SECONDS = 0.1


@dataclass(frozen=True)
class World:
    """This process's rank and device, and collectives over all processes.

    `group` and `timeout` are None for a single process.
    """

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
        """Collectives over all processes. Their errors name the rank."""
        return Ranks(self.group, f"rank {self.rank} of {self.size}", "within TIMEOUT")

    def barrier(self) -> None:
        """Wait until every rank has called this."""
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
        """Gather [N, ...] from every rank to [N * size, ...] on the CPU of the main rank.

        Row i of all ranks comes before row i + 1 of any. With a ValSampler this is the order of the
        data set. The other ranks get no rows.
        """
        if self.group is None:
            return rows.cpu()
        parts = self.ranks.gather_to_first(rows, "gathering rows from all ranks")
        if parts is None:
            return rows[:0].cpu()
        return torch.stack(parts, dim=1).flatten(0, 1).cpu()

    def agree(self, value: T) -> T:
        """The main rank's `value` (picklable, small), on every rank."""
        sent: object = None
        if self.is_main:
            sent = value
        return self.gather(sent)[0]

    def on_every_rank(self, load: Callable[[], T], main_first: bool = False) -> T:
        """Call `load` on every rank and return its result. Collective.

        Args:
            main_first: call it on the main rank alone before, which downloads to a cache.

        Raises:
            UserError: on all ranks, if `load` raises one on any of them. The message names the rank
                unless `load` failed on all.
        """
        if main_first and self.size > 1:
            self.on_every_rank(lambda: load() if self.is_main else None)
        results: list[T] = []
        problem = None
        try:
            results.append(load())
        except UserError as error:
            problem = str(error)
        problems = self.gather(problem)
        for rank, problem in enumerate(problems):
            if problem is None:
                continue
            if None in problems:
                problem = f"{problem} (rank {rank})"
            raise UserError(problem)
        return results[0]

    def named_errors(self, operation: str) -> AbstractContextManager[None]:
        """A context in which the error of a failed collective names `operation`.

        A collective fails or times out when a rank has ended or hangs.
        """
        return self.ranks.named_errors(operation)


@contextmanager
def open_world(device: str = "auto", timeout: int = 600) -> Iterator[World]:
    """Join the process group of torchrun's processes; leave it at the end of the block.

    Without torchrun the world is this process alone. On a CPU the process keeps freed memory
    (`swinv2_moe.threads`).

    Args:
        device: "auto", "cpu" or "cuda".
        timeout: seconds after which a collective fails if a rank does not answer.

    Raises:
        UserError: CUDA is requested but not available, or this machine has more ranks than GPUs.
        CollectiveError: a variable that torchrun sets is missing or wrong, or the ranks do not meet
            within the timeout.
    """
    size = _rank_variable("WORLD_SIZE", 1)
    local_rank = _rank_variable("LOCAL_RANK", 0)
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if use_cuda and not torch.cuda.is_available():
        raise UserError("DEVICE is 'cuda', but torch finds no GPU here; use DEVICE cpu")
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}"
        )
    own_device = torch.device("cpu")
    backend = "gloo"
    if use_cuda:
        own_device = torch.device("cuda", local_rank)
        backend = "nccl"
        # Expert groups and the gradients' all-reduce have communicators of their own, which may
        # run at the same time: NCCL then keeps the order of the host, which all ranks share.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        torch.cuda.set_device(own_device)
    else:
        keep_freed_memory()
    if size == 1:
        yield World(0, 1, own_device)
        return
    limit = timedelta(seconds=timeout)
    _join(backend, size, limit)
    try:
        yield World(dist.get_rank(), size, own_device, dist.group.WORLD, limit)
    finally:
        dist.destroy_process_group()


def _rank_variable(name: str, default: int | None = None) -> int:
    """The number in one of the variables that torchrun sets.

    Raises:
        CollectiveError: it is not a number, or it is missing and there is no default.
    """
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise CollectiveError(f"{name} is {value!r}: it must be a number, which torchrun sets")
    return int(value)


def _join(backend: str, size: int, limit: timedelta) -> None:
    """Join the process group of all ranks.

    Raises:
        CollectiveError: the variables that torchrun sets are wrong, or the ranks do not meet within
            `limit`.
    """
    rank, port = _rank_variable("RANK"), _rank_variable("MASTER_PORT")
    host = os.environ.get("MASTER_ADDR")
    if rank >= size:
        raise CollectiveError(f"RANK is {rank}: it must be below WORLD_SIZE ({size})")
    if not host:
        raise CollectiveError("MASTER_ADDR is missing: the host of rank 0, which torchrun sets")
    try:
        if rank:
            _wait_for_port(host, port, limit)
        store = _open_store(limit)
        _compare_sizes(store, rank, size)
        # Without device_id NCCL creates a group's communicator at its first collective. With
        # device_id it creates the communicators of all groups at once, including groups that are
        # never used.
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except CollectiveError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        reason = _why_not_joined(error, f"within TIMEOUT ({limit.total_seconds():g} s)")
        raise CollectiveError(
            f"rank {rank} of {size} on {socket.gethostname()} did not find the others at"
            f" {host}:{port}: {reason}"
        ) from error


def _wait_for_port(host: str, port: int, limit: timedelta) -> None:
    """Wait until rank 0 listens. torch's own wait logs a backtrace for each attempt.

    Raises:
        OSError: it does not listen within `limit`, or the host has no address.
    """
    end = time.monotonic() + limit.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=limit.total_seconds()).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(_POLL_SECONDS)


def _open_store(limit: timedelta) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, through which the ranks meet.

    It is opened in a thread: if another program answers at the port, torch waits without a limit.
    """
    stores: list[dist.Store] = []
    errors: list[Exception] = []

    def open_store() -> None:
        try:
            stores.append(next(dist.rendezvous("env://", timeout=limit))[0])
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=open_store, name="rendezvous", daemon=True)
    thread.start()
    thread.join(limit.total_seconds() + _STORE_SECONDS)
    if errors:
        raise errors[0]
    if not stores:
        raise RuntimeError("what answers there is not rank 0")
    return _of_this_attempt(stores[0])


def _has_agents_store() -> bool:
    """Whether the store lives in torchrun, which keeps it when it restarts the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _of_this_attempt(store: dist.Store) -> dist.Store:
    """The store without the keys of the ranks that torchrun has restarted: their addresses are no
    longer valid.

    On several nodes the ranks may have been restarted at different counts, so that they would not
    find each other. There the store stays as it is.
    """
    if _has_agents_store() and os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"attempt {attempt}", store)
    return store


def _compare_sizes(store: dist.Store, rank: int, size: int) -> None:
    """Compare WORLD_SIZE with that of rank 0; on rank 0, with those of all ranks.

    Raises:
        CollectiveError: the sizes differ. gloo and NCCL would wait for ranks that do not exist.
    """
    store.set(f"WORLD_SIZE/{rank}", str(size))
    others = [0]
    if rank == 0:
        others = list(range(1, size))
    for other in others:
        value = store.get(f"WORLD_SIZE/{other}").decode()
        if value != str(size):
            raise CollectiveError(
                f"WORLD_SIZE is {size} on rank {rank} ({socket.gethostname()}) and {value} on rank"
                f" {other}: start all ranks with the same"
            )


def _why_not_joined(error: Exception, within: str) -> str:
    """The cause of an error of `_join`, and a remedy."""
    message = str(error).strip().partition("\n")[0]
    joined = re.search(r"(\d+)/(\d+) clients joined", message)
    if joined:
        return (
            f"{joined[1]} of {joined[2]} ranks came {within}; have the others been started, with"
            " this address and WORLD_SIZE?"
        )
    if "EADDRINUSE" in message:
        return (
            "another program uses the port; choose another MASTER_PORT (torchrun: --master-port,"
            " or --standalone for one node)"
        )
    if isinstance(error, socket.gaierror):
        return f"MASTER_ADDR has no address here; is it the host of rank 0? ({message})"
    if isinstance(error, OSError):
        return (
            f"rank 0 does not answer {within}; has it been started, and can this host reach it?"
            f" ({message})"
        )
    if _has_agents_store() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return (
            "torchrun has restarted the ranks and keeps the addresses of the earlier ones; on"
            " several nodes a restart needs --rdzv-backend c10d --rdzv-endpoint HOST:PORT and the"
            f" variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ({message})"
        )
    return (
        f"a rank may have ended, or not joined {within}, or another program may use the port"
        f" ({message})"
    )


def expert_group(config: ExpertsConfig, world: World) -> ExpertGroup | None:
    """The ranks over which the experts are spread, and the replicas of this rank's experts.

    None for a single process or a dense model.

    Raises:
        UserError: the number of ranks is not divisible by EXPERT_PARALLEL_SIZE, or the experts'
            kernels cannot run on the world's device.
    """
    if config.layer is None:
        return None
    try:
        check_kernels(config.layer.kernels, world.device.type)
    except ValueError as error:
        raise UserError(f"MODEL.MOE: {error}") from error
    if world.group is None:
        return None
    try:
        _, ranks_per_node = parse_strategy(config.strategy)
        size = config.expert_parallel_size or largest_group(config.num_experts, world.size)
        group = make_expert_groups(size, world.timeout, ranks_per_node)
    except ValueError as error:
        raise UserError(f"MODEL.MOE: {error}") from error
    group.for_torch_tools = False  # a step averages once, and moe_core.checkpoint saves
    return group


def seed_everything(*parts: int) -> None:
    """Seed `random`, numpy and torch from `parts`, for example (seed, step, rank).

    The random numbers of a step then do not depend on earlier steps, and a resumed run repeats
    them.
    """
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what timm draws mixup from
    torch.manual_seed(seed)


class Stopped(Exception):
    """Raised on every rank, between two steps, after any of them received a stop signal."""


class StopSignal:
    """Records the first stop signal that this process receives inside the `with` block.

    Further signals are ignored, since torchrun and a scheduler may both send one. The exception is
    a second SIGINT, which ends the process at once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: str | None = None
        self._first_interrupt: float | None = None  # time of the first SIGINT

    def __enter__(self) -> "StopSignal":
        self._previous_handlers = {}
        # Python delivers signals to the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self.SIGNALS:
            # `nohup` and a shell's background jobs set signals to be ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def came_from_elsewhere(self, stopped_by: str | None) -> bool:
        """True if another rank received the SIGTERM and torchrun may restart this rank."""
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        return stopped_by == "SIGTERM" and self.received is None and restarts > 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
        elif now - self._first_interrupt > _DUPLICATE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
