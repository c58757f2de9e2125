"""`tutel.system`: the processes of a run, time and names of files."""

import atexit
import logging
import os
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist

from moe_core.compat.tutel.groups import ParallelEnv, create_groups_from_world

_log = logging.getLogger("moe_core")
_RELEASE_SECONDS = 0.1
_sessions: list[ParallelEnv] = []  # results of `init_data_model_parallel`; the last one is current


def init_affinity_at_program_beginning() -> None:
    """Bind this process to the CPUs of one NUMA node, which LOCAL_RANK selects.

    If the system does not list the CPUs of a node, it logs a warning. NUMA_TYPE=0 disables this.
    """
    ranks_per_node = int(os.environ.get("NUMA_TYPE", "1"))
    if ranks_per_node <= 0 or int(os.environ.get("TUTEL_CUDA_SANDBOX", "0")):
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=_number)
    try:
        node = nodes[local_rank // ranks_per_node % len(nodes)]
        os.sched_setaffinity(0, [_number(cpu) for cpu in node.glob("cpu[0-9]*")])
    except (OSError, ZeroDivisionError, AttributeError) as error:
        _log.warning("no NUMA affinity for local rank %d: %s", local_rank, error)


def _number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))


def init_data_model_parallel(group_count: int = 1, backend: str = "nccl") -> ParallelEnv:
    """Start torch.distributed and divide the world into `group_count` model groups.

    torch.distributed starts only if a launcher has set the environment variables. It is shut down
    when the process exits. For the groups see `create_groups_from_world`.

    Raises:
        ValueError: see `create_groups_from_world`.
    """
    env = create_groups_from_world(group_count, include_init=backend)
    env.is_cuda = env.local_device is not None and env.local_device.type == "cuda"
    _log.info(
        "rank %d: data rank %d, model rank %d", env.global_rank, env.data_rank, env.model_rank
    )
    if not _sessions:
        atexit.register(_end)
    _sessions.append(env)
    return env


def _end() -> None:
    if not dist.is_initialized():
        return
    # After a collective, a thread of gloo releases the tensors, for which it needs the GIL. If it
    # still waits for the GIL when the interpreter ends, it aborts the process. A sleep lets it run.
    time.sleep(_RELEASE_SECONDS)
    dist.destroy_process_group()


def get_local_session() -> ParallelEnv:
    """The result of the last call of `init_data_model_parallel`.

    Raises:
        RuntimeError: `init_data_model_parallel` was not called.
    """
    if not _sessions:
        raise RuntimeError("system.init_data_model_parallel() was not called")
    return _sessions[-1]


def record_time(is_cuda: bool | None = None) -> float:
    """The seconds of a clock, read after the GPU has finished.

    Args:
        is_cuda: whether there is a GPU to wait for; None: the value of the session.
    """
    if is_cuda is None:
        is_cuda = get_local_session().is_cuda
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def apply_rank_size_from_pattern(
    filename: str, rank: int, size: int, create_dir: bool = True
) -> str:
    """`filename` with {rank} and {size} replaced. With `create_dir`, its directory is created."""
    if "{rank}" not in filename:
        _log.warning("%s has no {rank}: all ranks use one file", filename)
    filename = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    if create_dir and os.path.dirname(filename):
        os.makedirs(os.path.dirname(filename), exist_ok=True)
    return filename


_MISSING = ("save", "load", "from_url", "cache", "LocalCache", "perform")


def __getattr__(name: str) -> object:
    """Raise NotImplementedError for names of Tutel without a counterpart."""
    if name in _MISSING:
        raise NotImplementedError(f"tutel.system.{name} has no counterpart here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
