"""Memory that the ranks of one node share, without a name in the file system.

A node is consecutive ranks of one machine, usually all of them. Its first rank makes an anonymous
file (memfd_create). The others open it through /proc/<pid>/fd while it lives. Nothing appears in
/dev/shm at any moment, so a killed rank leaves nothing behind, and the size of /dev/shm does not
matter: the memory counts for the processes alone.
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

from moe_core.ranks import Ranks

_KEY_BYTES = 32


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others before they share memory."""

    request: str  # what all ranks must agree on
    problem: str = ""
    pid: int = 0
    descriptor: int = 0
    key: bytes = b""  # the last bytes of the file, to recognise it


def find_node(ranks: Ranks, ranks_per_node: int | None) -> range:
    """The ranks of this rank's node. A collective.

    Args:
        ranks_per_node: consecutive ranks that share a machine; None: the ranks of each machine.

    Raises:
        ValueError: ranks_per_node does not divide the group; or the ranks of a node are on several
            machines or in several containers; or, without ranks_per_node, machines have different
            numbers of ranks, or ranks that are not consecutive. On all ranks.
    """
    place = (machine_identity(), socket.gethostname())
    places = ranks.gather_objects(place, "meeting of the ranks with channels")
    machines = [machine for machine, _ in places]
    hosts = ", ".join(host for _, host in places)
    if ranks_per_node is None:
        ranks_per_node = machines.count(machines[0])
    if ranks_per_node < 1 or ranks.size % ranks_per_node:
        raise ValueError(
            f"the ranks of {ranks.description} do not form nodes of {ranks_per_node}: they are on"
            f" {hosts}"
        )
    for first in range(0, ranks.size, ranks_per_node):
        if len(set(machines[first : first + ranks_per_node])) > 1:
            last = first + ranks_per_node - 1
            raise ValueError(
                f"ranks {first} to {last} of {ranks.description} cannot share memory: they must be"
                f" on one machine and in one container, and all ranks are on {hosts}; use another"
                " all_to_all"
            )
    first = ranks.rank // ranks_per_node * ranks_per_node
    return range(first, first + ranks_per_node)


def share_memory(
    ranks: Ranks, node: range, num_bytes: int, request: str, problem: str = ""
) -> Tensor:
    """Map the same `num_bytes` zeros on every rank of a node. A collective of all nodes.

    Args:
        node: as `find_node`.
        request: what the memory is for. It must be the same on all ranks.
        problem: why this rank cannot take part; "" if it can.

    Returns:
        A tensor of bytes. The memory is freed when no rank holds its tensor.

    Raises:
        ValueError: different requests.
        RuntimeError: a rank cannot make or map the memory, or has a problem.
        All of them are raised on every rank.
    """
    descriptor = -1
    offer = _Offer(request, problem)
    if ranks.rank == node.start and not problem:
        descriptor, offer = _make_file(num_bytes, offer)
    try:
        offers = ranks.gather_objects(offer, "meeting of the ranks that share memory")
        _check_offers(ranks, offers)
        memory, problem = _map(descriptor, offers[node.start], num_bytes)
        problems = ranks.gather_objects(problem, "mapping of shared memory")
        _check_problems(ranks, problems)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    assert memory is not None, "no rank has a problem"
    return memory[:num_bytes]


def machine_identity() -> str:
    """The same for processes that see each other in /proc: one boot and one set of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"no /proc on {socket.gethostname()}"


def available_bytes() -> int:
    """Memory of this machine that processes could still use, as the kernel estimates it; without
    the limit of a container."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def _make_file(num_bytes: int, offer: _Offer) -> tuple[int, _Offer]:
    """An anonymous file with its pages, which ends with a random key."""
    key = secrets.token_bytes(_KEY_BYTES)
    descriptor = -1
    size_text = f"{num_bytes / 2**20:.1f} MiB of shared memory"
    try:
        # posix_fallocate would not fail: the kernel would end processes to make room.
        if num_bytes > available_bytes():
            free = f"{available_bytes() / 2**20:.1f} MiB of memory are available"
            return descriptor, replace(offer, problem=f"{size_text}: {free}")
        # the name appears in /proc/*/maps alone
        descriptor = os.memfd_create(f"moe_core.comm.{os.getpid()}")
        # Without the pages, a machine that is out of memory would kill the first rank to write.
        os.posix_fallocate(descriptor, 0, num_bytes + _KEY_BYTES)
        os.pwrite(descriptor, key, num_bytes)
    except OSError as error:
        return descriptor, replace(offer, problem=f"{size_text}: {error.strerror}")
    return descriptor, replace(offer, pid=os.getpid(), descriptor=descriptor, key=key)


def _map(descriptor: int, offer: _Offer, num_bytes: int) -> tuple[Tensor | None, str]:
    """The memory of the node's first rank's file, or why it cannot be mapped."""
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    opened = descriptor
    try:
        if descriptor < 0:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(opened, _KEY_BYTES, num_bytes) != offer.key:
            return None, f"{path} is not the memory of the node's first rank"
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
                " ranks of a group must run the same plan"
            )


def _check_problems(ranks: Ranks, problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise RuntimeError(f"shared memory failed on rank {rank} of {ranks.size}: {problem}")
