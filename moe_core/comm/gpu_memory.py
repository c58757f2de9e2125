"""GPU memory that the ranks of one machine share: torch's symmetric memory (CUDA)."""

import importlib.util
import socket
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_core.comm.memory import machine_identity
from moe_core.ranks import Ranks


@dataclass(frozen=True)
class GpuMemory:
    """Shared memory with the same number of bytes on every rank. Every rank can access all of it.

    Attributes:
        local: the bytes of this rank.
        addresses: the address of each rank's bytes in this process.
        multicast: the multicast address for the bytes of all ranks; 0: there is none.
        handle: keeps the memory of the other ranks mapped.
    """

    local: Tensor
    addresses: list[int]
    multicast: int = 0
    handle: object = field(default=None, repr=False)


def share_gpu_memory(ranks: Ranks, num_bytes: int, purpose: str) -> GpuMemory:
    """Allocate `num_bytes` zeros on the current CUDA device of every rank. This is a collective.

    Args:
        purpose: describes the memory in error messages; the same on all ranks.

    Raises:
        ValueError: the ranks are on several machines, or have different sizes or purposes.
        RuntimeError: a rank has no CUDA device, no Triton or no symmetric memory.
        All of them are raised on every rank.
    """
    request = f"{purpose} of {num_bytes} bytes"
    offer = (machine_identity(), socket.gethostname(), request, _problem())
    offers = ranks.gather_objects(offer, "meeting of the ranks that share GPU memory")
    _check_offers(ranks, offers)
    memory, problem = _share(ranks, num_bytes)
    _check_problems(ranks, ranks.gather_objects(problem, "mapping of GPU memory"))
    assert memory is not None, "no rank has a problem"
    return memory


def _problem() -> str:
    """Why this process cannot share GPU memory; "" if it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return ""


def _share(ranks: Ranks, num_bytes: int) -> tuple[GpuMemory | None, str]:
    """The memory of this rank with the addresses of all ranks, or the reason for a failure."""
    from torch.distributed._symmetric_memory import empty, rendezvous

    device = torch.device("cuda", torch.cuda.current_device())
    assert ranks.process_group is not None, "one rank shares nothing"
    try:
        local = empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
        handle = rendezvous(local, ranks.process_group)
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        return None, f"torch's symmetric memory on {torch.cuda.get_device_name()}: {first_line}"
    addresses = list(handle.buffer_ptrs)  # of the allocations; the tensor must be at the start
    if addresses[ranks.rank] != local.data_ptr():
        return None, "torch's symmetric memory has another address than its tensor"
    return GpuMemory(local, addresses, handle.multicast_ptr, handle), ""


def _check_offers(ranks: Ranks, offers: list) -> None:
    if len({machine for machine, *_ in offers}) > 1:
        hosts = ", ".join(host for _, host, *_ in offers)
        raise ValueError(
            f"channels through GPU memory need all ranks on one machine and in one container, and"
            f" those of {ranks.description} are on {hosts}: use another all_to_all"
        )
    _check_problems(ranks, [problem for *_, problem in offers])
    first_request = offers[0][2]
    for rank, (_, _, request, _) in enumerate(offers):
        if request != first_request:
            raise ValueError(f"rank 0 asks for {first_request} and rank {rank} for {request}")


def _check_problems(ranks: Ranks, problems: list[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise RuntimeError(
                f"channels through GPU memory failed on rank {rank} of {ranks.size}: {problem}"
            )
