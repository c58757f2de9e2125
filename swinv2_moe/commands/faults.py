"""One line for a fault of the machine: memory, disk, descriptors, processes, GPU, a data worker.

`run_command` prints it in place of a traceback. A fault is known by the text of its exception,
because torch raises most of them as RuntimeError, and passes those of data workers on as text.
"""

import os
import re
import resource
import shutil
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

from swinv2_moe.errors import one_line

_MAX_DETAIL = 200  # characters
_MAX_SEARCHED = 4096  # characters at each end of a message; a search takes up to their square
_SHARED_MEMORY = "/dev/shm"


class _Fault(NamedTuple):
    pattern: str  # searched in "type: message" and in the file that raised the exception
    cause: str | Callable[[], str]
    remedy: str


def _shared_memory_full() -> str:
    try:
        size = f"{shutil.disk_usage(_SHARED_MEMORY).total / 2**20:.3g} MiB"
    except OSError:
        size = "missing"
    return f"the shared memory of the data workers is full ({_SHARED_MEMORY}: {size})"


def _no_descriptors() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"too many open files (the limit of a process is {limit})"


def _no_processes() -> str:
    number = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limit = str(number)
    if number == resource.RLIM_INFINITY:
        limit = "unlimited"
    return f"the system allows no more processes or threads (ulimit -u is {limit})"


# The first pattern that is found decides.
_FAULTS = (
    _Fault(
        r"Too many open files|ancdata",
        _no_descriptors,
        "raise it with `ulimit -n 65536` (docker: --ulimit nofile=65536), or lower"
        " DATA.NUM_WORKERS",
    ),
    _Fault(
        r"Bus error|file </torch_|No space left[^\n]*\n\S*multiprocessing",
        _shared_memory_full,
        "enlarge it (docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory at"
        " /dev/shm), lower DATA.NUM_WORKERS and DATA.BATCH_SIZE, or set DATA.NUM_WORKERS 0",
    ),
    _Fault(
        r"DataLoader worker[^\n]*(Killed|exited unexpectedly)",
        "a data worker was killed",
        "most often memory has run out: lower DATA.NUM_WORKERS or DATA.BATCH_SIZE, or give the job"
        " more memory",
    ),
    _Fault(
        r"DataLoader worker[^\n]*is killed by signal",
        "a data worker crashed",
        "a library that decodes pictures is a common reason; `train --check-files` reads every"
        " image before the first step",
    ),
    _Fault(
        r"No space left|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|File too large",
        "the disk is full",
        "free some space; what was saved before is complete, and --resume auto continues a run",
    ),
    _Fault(
        r"CUDA out of memory|OutOfMemoryError|(CUBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED",
        "the memory of the GPU is full",
        "lower DATA.BATCH_SIZE (TRAIN.ACCUMULATION_STEPS keeps the size of a step), or"
        " DATA.IMG_SIZE where single images are large, or set TRAIN.USE_CHECKPOINT True",
    ),
    _Fault(
        r"MemoryError|Cannot allocate memory|can't allocate memory|bad_alloc|failed to map segment"
        r"|not enough memory|Out of memory",
        "memory has run out",
        "lower DATA.BATCH_SIZE or DATA.NUM_WORKERS, or DATA.IMG_SIZE where single images are large,"
        " or give the job more memory (`ulimit -v`, the limit of its container)",
    ),
    _Fault(
        r"can't start new thread|Resource temporarily unavailable|pthread_create|thread creation",
        _no_processes,
        "raise it (docker: --pids-limit), or lower DATA.NUM_WORKERS and OMP_NUM_THREADS",
    ),
    _Fault(
        r"Input/output error|Stale file handle|Read-only file system|endpoint is not connected"
        r"|Remote I/O error|Host is down|No such device",
        "a disk or file system has failed",
        "see the system's log (dmesg) or ask who runs it; --resume auto continues a run",
    ),
    _Fault(
        r"CUDA error|CUDA driver|CUDA initialization|NVIDIA driver|(CUBLAS|CUDNN)_STATUS_",
        "the GPU or its driver has failed",
        "see nvidia-smi and the system's log (dmesg); --resume auto continues a run",
    ),
)


def explain_fault(error: BaseException) -> str | None:
    """One line that names the rank, the cause and a remedy; None if this is no fault of a machine.

    The exceptions that `error` was raised from are looked at too.
    """
    for problem in _chain(error):
        message = str(problem)
        if len(message) > 2 * _MAX_SEARCHED:
            message = message[:_MAX_SEARCHED] + message[-_MAX_SEARCHED:]
        text = f"{type(problem).__name__}: {message}\n{_origin(problem)}"
        for fault in _FAULTS:
            if re.search(fault.pattern, text):
                cause = fault.cause
                if callable(cause):
                    cause = cause()
                return f"{_rank()}{cause}; {fault.remedy} ({_detail(problem)})"
    return None


def own_message(error: BaseException) -> str:
    """The message of an exception; of one in a data worker, without the worker's traceback."""
    message = str(error)
    if message.startswith("Caught ") and "worker process" in message:
        return message.strip().splitlines()[-1].partition(": ")[2]
    return message


def _detail(error: BaseException) -> str:
    """The first line of a message, cut."""
    lines = own_message(error).strip().splitlines() or [type(error).__name__]
    line = one_line(lines[0])
    if len(line) > _MAX_DETAIL:
        return f"{line[:_MAX_DETAIL]}..."
    return line


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _origin(error: BaseException) -> str:
    """The file that raised the exception; "" if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return frames[-1].filename


def _rank() -> str:
    """The beginning of the line: this process among those of a launcher; "" for one process."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return ""
    return f"rank {os.environ.get('RANK', '?')} of {size} on {socket.gethostname()}: "
