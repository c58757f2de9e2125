"""Binds a rank, and the data workers that it starts, to the NUMA nodes near its GPU.

A NUMA node is a part of the machine's CPUs and memory. Pages are allocated on the node of the CPU
that first writes them; a copy from another node's memory to a GPU is slower.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from swinv2_moe.errors import UserError

BINDS = ("auto", "none")
_SYSFS = Path("/sys")
_TASKS = Path("/proc/self/task")  # the threads of this process


class NotBound(Exception):
    """The rank keeps its CPUs; the message says why."""


@contextmanager
def bound_to_node(bind: str, device: torch.device, sysfs: Path = _SYSFS) -> Iterator[str]:
    """Bind this process to the CPUs of the NUMA node of its GPU, until the end of the block.

    Without a GPU, the ranks of a machine share its nodes in equal parts. An affinity that a
    scheduler has set (a cgroup, taskset, Slurm) stays as it is.

    Args:
        bind: one of `BINDS`; "none" leaves the process as it is.

    Yields:
        What was done, for the log; empty on a machine with one NUMA node.

    Raises:
        UserError: `bind` is not one of `BINDS`.
    """
    if bind not in BINDS:
        raise UserError(f"--bind is {bind!r}, allowed: {', '.join(BINDS)}")
    try:
        if len(read_nodes(sysfs)) < 2:
            yield ""
            return
        if bind == "none":
            raise NotBound("--bind none")
        cpus, description = choose_cpus(device, sysfs)
        before = os.sched_getaffinity(0)
        num_threads = torch.get_num_threads()
        _set_affinity(cpus)
    except NotBound as reason:
        yield f"not bound ({reason})"
        return
    torch.set_num_threads(min(num_threads, len(cpus)))
    try:
        yield description
    finally:
        _set_affinity(before)
        torch.set_num_threads(num_threads)


def placement_line(placements: Sequence[str]) -> str:
    """One line for the log, from what each rank was told."""
    parts = []
    for placement, count in Counter(placements).items():
        ranks = "1 rank"
        if count > 1:
            ranks = f"{count} ranks"
        parts.append(f"{placement}: {ranks}")
    return f"placement: {'; '.join(parts)}"


def choose_cpus(device: torch.device, sysfs: Path) -> tuple[set[int], str]:
    """The CPUs for this rank, and their description.

    Raises:
        NotBound: the rank keeps its CPUs.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise NotBound("this system has no CPU affinity")
    nodes = read_nodes(sysfs)
    all_cpus = set().union(*nodes.values())
    allowed = os.sched_getaffinity(0)
    if not all_cpus <= allowed:
        raise NotBound(f"the scheduler allows {len(allowed)} of {len(all_cpus)} CPUs")
    if device.type == "cuda":
        chosen: Sequence[int] = [_node_of_gpu(_pci_address(device), nodes, sysfs)]
    else:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        chosen = equal_part(sorted(nodes), local_rank, local_size)
    cpus = set().union(*(nodes[node] for node in chosen))
    return cpus, f"NUMA node {'+'.join(map(str, chosen))} ({len(cpus)} CPUs)"


def read_nodes(sysfs: Path) -> dict[int, set[int]]:
    """The CPUs of each NUMA node that has any."""
    nodes = {}
    for directory in sysfs.glob("devices/system/node/node[0-9]*"):
        try:
            cpus = parse_cpu_list((directory / "cpulist").read_text())
            number = int(directory.name.removeprefix("node"))
        except (OSError, ValueError):
            continue
        if cpus:
            nodes[number] = cpus
    return nodes


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's list format: "0-3,8" is 0, 1, 2, 3, 8.

    Raises:
        ValueError: `text` has another format.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def equal_part(nodes: Sequence[int], local_rank: int, local_size: int) -> Sequence[int]:
    """The nodes of a rank, where the ranks of a machine share them in equal parts.

    Raises:
        NotBound: one rank; numbers that do not divide.
    """
    if local_size == 1:
        raise NotBound("one rank without a GPU")
    if local_size % len(nodes) == 0:
        ranks_per_node = local_size // len(nodes)
        return [nodes[local_rank // ranks_per_node]]
    if len(nodes) % local_size == 0:
        nodes_per_rank = len(nodes) // local_size
        first = local_rank * nodes_per_rank
        return nodes[first : first + nodes_per_rank]
    raise NotBound(f"{local_size} ranks do not divide over {len(nodes)} NUMA nodes")


def _pci_address(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(device)  # its type omits the fields of PCI
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"


def _node_of_gpu(address: str, nodes: Iterable[int], sysfs: Path) -> int:
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError) as error:
        raise NotBound(f"the NUMA node of GPU {address} is not known") from error
    if node not in nodes:  # -1: the firmware does not say
        raise NotBound(f"the NUMA node of GPU {address} is {node}")
    return node


def _set_affinity(cpus: set[int]) -> None:
    """Bind all threads of this process; those that it starts later inherit the affinity.

    Raises:
        NotBound: the system refuses.
    """
    threads = [0]
    if _TASKS.is_dir():
        threads = [int(task.name) for task in _TASKS.iterdir()]
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cpus)
        except ProcessLookupError:  # the thread has ended
            continue
        except OSError as error:
            raise NotBound(f"the system refuses ({error.strerror})") from error
