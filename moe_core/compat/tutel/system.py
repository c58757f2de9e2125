"""`tutel.system`: the processes of a run, time and names of files."""

import atexit
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from moe_core.compat.tutel.groups import ParallelEnv, create_groups_from_world

_log = logging.getLogger("moe_core")
_sessions: list[ParallelEnv] = []  # of `init_data_model_parallel`, the last one counts


def init_affinity_at_program_beginning() -> None:
    """Run this process on the CPUs of one NUMA node, by its LOCAL_RANK; a warning where the system
    does not say which these are. NUMA_TYPE=0 turns it off."""
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
    """Start torch.distributed if a launcher has set its variables, and cut the world into
    `group_count` model groups (`create_groups_from_world`). It ends with the process.

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
    if dist.is_initialized():
        dist.destroy_process_group()


def get_local_session() -> ParallelEnv:
    """What `init_data_model_parallel` returned.

    Raises:
        RuntimeError: it was not called.
    """
    if not _sessions:
        raise RuntimeError("system.init_data_model_parallel() was not called")
    return _sessions[-1]


def record_time(is_cuda: bool | None = None) -> float:
    """Seconds of a clock, after the work of the GPU; `is_cuda` None: as the session says."""
    if is_cuda is None:
        is_cuda = get_local_session().is_cuda
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


class LocalCache:
    """Values by key, in this process."""

    _values: dict = {}  # noqa: RUF012 - of the class, as Tutel's users read it

    @staticmethod
    def reset() -> None:
        LocalCache._values.clear()

    @staticmethod
    def set(key, value) -> None:
        LocalCache._values[key] = value

    @staticmethod
    def get(key=None):
        """The value of `key`; a list of all values if there is none."""
        if key in LocalCache._values:
            return LocalCache._values[key]
        return list(LocalCache._values.values())


def cache() -> type[LocalCache]:
    return LocalCache


def perform(fn: Callable[[], object], num_runs: int = 100) -> float:
    """The mean seconds of a call, after five others; printed, too."""
    for _ in range(5):
        fn()
    start = record_time()
    for _ in range(num_runs):
        fn()
    seconds = (record_time() - start) / num_runs
    print(f"Function Latency = {seconds:.8f} sec\n")
    return max(seconds, 1e-6)


def apply_rank_size_from_pattern(
    filename: str, rank: int, size: int, create_dir: bool = True
) -> str:
    """`filename` with {rank} and {size} filled in; its directory is made."""
    if "{rank}" not in filename:
        _log.warning("%s has no {rank}: all ranks use one file", filename)
    filename = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    if create_dir and os.path.dirname(filename):
        os.makedirs(os.path.dirname(filename), exist_ok=True)
    return filename


def __getattr__(name: str) -> object:
    """`save`, `load` and `from_url` read and write NumPy's files, which this engine does not."""
    if name in ("save", "load", "from_url"):
        raise NotImplementedError(f"tutel.system.{name} has no counterpart here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
