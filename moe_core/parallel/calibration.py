"""Measures the machine that the program runs on, for the cost model."""

import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from moe_core.parallel.machine import Link, Machine
from moe_core.parallel.strategy import node_size

LinkTimes = tuple[float, float, float]  # seconds of one more message, of a byte, and of the delay


def calibrate(
    process_group: dist.ProcessGroup | None, ranks_per_node: int, device: torch.device | str
) -> Machine:
    """Measure the machine of this process group, in less than a second.

    This is a collective: all ranks of the group call it and get the same result, the values of the
    slowest rank. Without a process group the links cost nothing. If all ranks share a node, or
    every rank has its own node, there is only one kind of link. Its values are used for both.

    Args:
        ranks_per_node: the number of consecutive ranks of the group that share a node.
        device: the device to measure; with NCCL, a CUDA device.

    Raises:
        ValueError: ranks_per_node does not divide the group.
    """
    device = torch.device(device)
    intra = inter = Link(0.0, math.inf)
    reduce_scatter = 1.0
    with torch.no_grad():
        seconds = _compute_seconds(device)
        if process_group is not None and process_group.size() > 1:
            seconds += _link_seconds(process_group, ranks_per_node, device)
            seconds += _gather_seconds(process_group, device)
            slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=process_group)
            seconds = slowest.tolist()
            intra = Link(seconds[4], 1 / seconds[5], seconds[6])
            inter = Link(seconds[7], 1 / seconds[8], seconds[9])
            reduce_scatter = seconds[11] / seconds[10]
    flop_fp32, flop_bf16, copied_byte, kernel = seconds[:4]
    name, memory = "this CPU", math.inf
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    return Machine(
        name,
        intra,
        inter,
        flops=1 / flop_bf16,
        flops_fp32=1 / flop_fp32,
        memory_bandwidth=1 / copied_byte,
        kernel_overhead=kernel,
        memory=memory,
        reduce_scatter=reduce_scatter,
    )


def _compute_seconds(device: torch.device) -> list[float]:
    """Seconds of a FLOP in fp32 and in bf16, of a copied byte, and of a short kernel."""
    is_cuda = device.type == "cuda"
    size, num_elements = 256, 2**20
    if is_cuda:
        size, num_elements = 4096, 2**26
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(size, size, dtype=dtype, device=device)
        product = _fastest(partial(torch.matmul, a, a), device, repeats=5)
        seconds.append(product / (2 * size**3))
    source = torch.ones(num_elements, device=device)
    target = torch.empty_like(source)
    copy = _fastest(lambda: target.copy_(source), device, repeats=5)
    num_bytes = 2 * 4 * num_elements  # read and written
    seconds.append(copy / num_bytes)
    short = torch.ones(1, device=device)
    kernels = _fastest(lambda: [short.add_(1) for _ in range(50)], device, repeats=3)
    seconds.append(kernels / 50)
    return seconds


def _link_seconds(
    process_group: dist.ProcessGroup, ranks_per_node: int, device: torch.device
) -> list[float]:
    """The `LinkTimes` inside a node, followed by the `LinkTimes` between nodes."""
    size = process_group.size()
    rank = process_group.rank()
    per_node = node_size(ranks_per_node, size)
    node, local_rank = divmod(rank, per_node)
    first = node * per_node
    near = [other for other in range(first, first + per_node) if other != rank]
    far = [other for other in range(size) if other // per_node != node]
    near_next = first + (local_rank + 1) % per_node
    near_previous = first + (local_rank - 1) % per_node
    intra = _measure_link(process_group, near, near_next, near_previous, device)
    far_next = (rank + per_node) % size
    far_previous = (rank - per_node) % size
    inter = _measure_link(process_group, far, far_next, far_previous, device)
    measured = intra or inter
    assert measured is not None, "a group of several ranks has peers"
    return list(intra or measured) + list(inter or measured)


def _gather_seconds(process_group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Seconds of an all-gather, and of a reduce-scatter of equally many elements."""
    size = process_group.size()
    num_elements = 2**18  # over all ranks: 1 MiB
    if device.type == "cuda":
        num_elements = 2**24
    part = torch.ones(num_elements // size, device=device)
    gathered = torch.empty(size * len(part), device=device)
    gather = partial(dist.all_gather_into_tensor, gathered, part, group=process_group)
    reduce = partial(dist.reduce_scatter_tensor, part, gathered, group=process_group)
    return [_fastest(gather, device, repeats=3), _fastest(reduce, device, repeats=3)]


def _measure_link(
    process_group: dist.ProcessGroup,
    peers: list[int],
    next_peer: int,
    previous_peer: int,
    device: torch.device,
) -> LinkTimes | None:
    """Measure a kind of link by exchanges with `peers`; None if there are no peers.

    An exchange of one message, from the previous to the next peer, separates the delay from the
    time of a message. With a single peer, all time is counted as the time of the message.
    """
    if not peers:
        return None
    num_peers = len(peers)
    total = 2**20  # bytes: a tenth of a second over Ethernet of 100 Mbit/s
    if device.type == "cuda":
        total = 2**26
    small = 64
    large = max(total // num_peers, 2**16)
    small_seconds = _exchange_seconds(process_group, peers, peers, small, device)
    large_seconds = _exchange_seconds(process_group, peers, peers, large, device)
    # The lower bounds keep the times of messages and bytes positive if timings are noisy.
    transfer = max(large_seconds - small_seconds, 0.1 * large_seconds)
    message, delay = small_seconds, 0.0
    if num_peers > 1:
        single = _exchange_seconds(process_group, [next_peer], [previous_peer], small, device)
        message = max((small_seconds - single) / (num_peers - 1), 0.1 * small_seconds / num_peers)
        delay = max(small_seconds - num_peers * message, 0.0)
    return message, transfer / (num_peers * (large - small)), delay


def _exchange_seconds(
    process_group: dist.ProcessGroup,
    targets: list[int],
    sources: list[int],
    num_bytes: int,
    device: torch.device,
) -> float:
    """Seconds of an exchange that sends `num_bytes` bytes to each target and receives equally many
    from each source.

    It uses single sends and receives. gloo's all-to-all also sends empty messages to all other
    ranks, so it would wait for links that are not measured.
    """
    sent = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    received = torch.empty(len(sources), num_bytes, dtype=torch.uint8, device=device)

    def exchange() -> None:
        operations = []
        for target in targets:
            send = dist.P2POp(dist.isend, sent, group=process_group, group_peer=target)
            operations.append(send)
        for source, row in zip(sources, received, strict=True):
            receive = dist.P2POp(dist.irecv, row, group=process_group, group_peer=source)
            operations.append(receive)
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return _fastest(exchange, device, repeats=3)


def _fastest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest run, after a warm-up run."""
    best = math.inf
    for repeat in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
