"""Memory that the ranks of one machine share, without a name in the file system.

The first rank creates an anonymous file (memfd_create). The others open it through /proc/<pid>/fd
while it exists. /dev/shm is not used. So a killed rank leaves no file behind, and the size limit of
/dev/shm does not apply. The memory is counted as memory of the processes.
"""

import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_core.ranks import CollectiveError, Ranks

_KEY_BYTES = 32


@dataclass(frozen=True)
class _Offer:
    """The information that ranks exchange before they share memory."""

    request: str  # must be the same on all ranks
    problem: str = ""
    pid: int = 0
    descriptor: int = 0
    key: bytes = b""  # the last bytes of the file, which identify it


def check_machine(ranks: Ranks) -> None:
    """Raise ValueError, on all ranks, if they are on several machines or in several containers.
    This is a collective."""
    place = (machine_identity(), socket.gethostname())
    places = ranks.gather_objects(place, "meeting of the ranks with channels")
    if len({machine for machine, _ in places}) > 1:
        hosts = ", ".join(host for _, host in places)
        raise ValueError(
            f"ranks 0 to {ranks.size - 1} of {ranks.description} cannot share memory: they must be"
            f" on one machine and in one container, and they are on {hosts}; use another all_to_all"
        )


def share_memory(ranks: Ranks, num_bytes: int, request: str, problem: str = "") -> Tensor:
    """Map the same `num_bytes` zeros on every rank. This is a collective.

    Args:
        request: describes the memory. It must be the same on all ranks.
        problem: the reason why this rank cannot take part; "" if it can.

    Returns:
        A tensor of bytes. The memory is freed when no rank keeps its tensor.

    Raises:
        ValueError: the requests differ.
        RuntimeError: a rank cannot make or map the memory, or has a problem.
        All of them are raised on every rank.
    """
    descriptor = -1
    offer = _Offer(request, problem)
    if ranks.rank == 0 and not problem:
        descriptor, offer = _make_file(num_bytes, offer)
    try:
        offers = ranks.gather_objects(offer, "meeting of the ranks that share memory")
        _check_offers(ranks, offers)
        memory, problem = _map(descriptor, offers[0], num_bytes)
        problems = ranks.gather_objects(problem, "mapping of shared memory")
        _check_problems(ranks, problems)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert memory is not None, "no rank has a problem"
    return memory[:num_bytes]


def watch_processes(ranks: Ranks) -> list[int]:
    """A pidfd of each rank, which is readable once the rank's process has ended; -1 if the system
    has no pidfds (Linux before 5.3, some containers). This is a collective.

    Raises:
        CollectiveError: a rank has ended.
    """
    pids = ranks.gather_objects(os.getpid(), "exchange of process numbers")
    descriptors = []
    for rank, pid in enumerate(pids):
        descriptor = -1
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise CollectiveError(f"rank {rank} has ended ({ranks.description})") from error
        except OSError:
            pass  # a wait then ends after the timeout
        descriptors.append(descriptor)
    return descriptors


def machine_identity() -> str:
    """An identifier of the boot and the PID namespace.

    It is the same for processes that see each other in /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"no /proc on {socket.gethostname()}"


def available_bytes() -> int:
    """The kernel's estimate of the available memory of this machine, in bytes.

    It does not include the limit of a container.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def _make_file(num_bytes: int, offer: _Offer) -> tuple[int, _Offer]:
    """Create an anonymous file with allocated pages. It ends with a random key."""
    key = secrets.token_bytes(_KEY_BYTES)
    descriptor = -1
    size_text = f"{num_bytes / 2**20:.1f} MiB of shared memory"
    try:
        # posix_fallocate would not fail. Instead, the kernel would kill processes to free memory.
        if num_bytes > available_bytes():
            free = f"{available_bytes() / 2**20:.1f} MiB of memory are available"
            return descriptor, replace(offer, problem=f"{size_text}: {free}")
        # The name appears only in /proc/*/maps.
        descriptor = os.memfd_create(f"moe_core.comm.{os.getpid()}")
        # Without allocated pages, the first rank to write would be killed if there is no memory.
        os.posix_fallocate(descriptor, 0, num_bytes + _KEY_BYTES)
        os.pwrite(descriptor, key, num_bytes)
    except OSError as error:
        return descriptor, replace(offer, problem=f"{size_text}: {error.strerror}")
    return descriptor, replace(offer, pid=os.getpid(), descriptor=descriptor, key=key)


def _map(descriptor: int, offer: _Offer, num_bytes: int) -> tuple[Tensor | None, str]:
    """Map the file of the first rank; returns the memory, or the reason for a failure."""
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    opened = descriptor
    try:
        if descriptor < 0:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(opened, _KEY_BYTES, num_bytes) != offer.key:
            return None, f"{path} is not the memory of the first rank"
        mapping = mmap.mmap(opened, num_bytes + _KEY_BYTES)
    except OSError as error:
        return None, f"{path}: {error.strerror}"
    finally:
        if descriptor < 0 <= opened:
            os.close(opened)
    return torch.frombuffer(mapping, dtype=torch.uint8), ""


def _check_offers(ranks: Ranks, offers: Sequence[_Offer]) -> None:
    _check_problems(ranks, [offer.problem for offer in offers])
    for rank, offer in enumerate(offers):
        if offer.request != offers[0].request:
            raise ValueError(
                f"rank 0 asks for {offers[0].request} and rank {rank} for {offer.request}: all"
                " ranks of a group must make the same buffers"
            )


def _check_problems(ranks: Ranks, problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise RuntimeError(f"shared memory failed on rank {rank} of {ranks.size}: {problem}")
