"""Seconds that one MoE layer takes on a cluster, for any strategy, without running it.

1. `volume` counts what a strategy sends, to ranks of the same node and of others.
2. A message of n bytes costs `latency + n / bandwidth` of its link (the alpha-beta model); a matrix
   product costs its FLOPs at the machine's rate and the reading of its weights; everything else
   costs its bytes and its kernels.
3. `layer_time` adds up, and takes off what a pipeline hides; `ranked` does so for every strategy
   worth a trial.
4. `calibrate` measures the machine at hand; `PROFILES` holds named ones.

Rows are taken to be balanced over the experts. How well it predicts: docs/explanation/planner.md.
"""

# W ranks of the group, g of them on each of N nodes; T tokens of a rank, E experts, K top-k, M
# model dim, H hidden dim n rows that a rank has for one expert; s = max(W / E, 1) ranks of one
# expert; d chunks

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from moe_core.config import MoEConfig, expert_capacity
from moe_core.parallel.strategy import ALGORITHMS, ParallelStrategy, valid_r

GRADIENT_BYTES = 4  # the engine sums weight gradients in the parameters' own dtype
# over [T, E] in fp32: logits, noise, softmax, top-k, losses; an estimate
ROUTER_PASSES, ROUTER_KERNELS = 6, 20
LAYER_KERNELS = 6  # dispatch, combine, offsets, reordering: an estimate


@dataclass(frozen=True)
class Link:
    """One message of n bytes takes `latency + n / bandwidth` seconds."""

    latency: float  # seconds that one more message of an exchange costs a rank
    bandwidth: float  # bytes/s that one rank sends

    def seconds(self, messages: float, num_bytes: float) -> float:
        return messages * self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """One rank of a cluster and its links to the ranks of its node (`intra`) and of others
    (`inter`)."""

    name: str
    intra: Link
    inter: Link
    flops: float  # FLOP/s that large products reach in bf16 or fp16
    flops_fp32: float  # the same in fp32: the router's, and the experts' without mixed precision
    memory_bandwidth: float  # bytes/s
    kernel_overhead: float  # seconds that the shortest kernel takes
    memory: float = math.inf  # bytes

    def rate(self, element_size: int) -> float:
        """FLOP/s of products whose elements have so many bytes."""
        return self.flops if element_size <= 2 else self.flops_fp32


# One constant is fitted for the A100, the share of its peak that products reach; one for its
# network, the latency of a message; both to Tutel's all-to-all shares (arXiv 2206.03382, table 2:
# 33.7% at 16 and 56.7% at 256 GPUs). Peaks, memory and link rates are the data sheets'. The newer
# GPUs inherit the A100's shares and latencies: untested.
_REACHED = 0.514  # fitted: share of the peak that the experts' products reach
_INTER_LATENCY = 75e-6  # fitted: seconds that one more message of a linear all-to-all costs
# 7/8 of 128 MiB in 600 us over 8 GPUs (the same paper, appendix A.2), of NVLink 3's 300 GB/s
_INTRA_REACHED = 0.653
_KERNEL = 5e-6  # an estimate: launch and run of a short kernel, and a message inside a node


def _gpu(
    name: str,
    nvlink: float,
    network: float,
    peak: float,
    peak_fp32: float,
    hbm: float,
    memory: float,
) -> Machine:
    """Rates of the data sheet in units of 1e9 (bytes/s one way), 1e12 (FLOP/s, bytes/s) and GiB."""
    links = Link(_KERNEL, nvlink * 1e9 * _INTRA_REACHED), Link(_INTER_LATENCY, network * 1e9)
    rates = peak * 1e12 * _REACHED, peak_fp32 * 1e12 * _REACHED
    return Machine(name, *links, *rates, hbm * 1e12, _KERNEL, memory * 2**30)


PROFILES = {
    # A100 SXM 80 GB: NVLink 3 at 300 GB/s, HDR InfiniBand 200 Gb/s per GPU, 312 TFLOP/s dense bf16,
    # 19.5 fp32
    "a100-hdr": _gpu(
        "a100-hdr", nvlink=300, network=25, peak=312, peak_fp32=19.5, hbm=2.039, memory=80
    ),
    # H100 SXM 80 GB: NVLink 4 at 450 GB/s, NDR InfiniBand 400 Gb/s per GPU, 989 TFLOP/s dense bf16,
    # 67 fp32
    "h100": _gpu("h100", nvlink=450, network=50, peak=989, peak_fp32=67, hbm=3.35, memory=80),
    # H200 SXM 141 GB: an H100 with HBM3e
    "h200": _gpu("h200", nvlink=450, network=50, peak=989, peak_fp32=67, hbm=4.8, memory=141),
}


@dataclass(frozen=True)
class LayerShape:
    """One call of a layer on one rank."""

    tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    rows_per_expert: float  # n: kept rows that one rank has for one expert, on average
    element_size: int = 2  # bytes of a row's or a weight's element, in products and on the wire
    training: bool = True  # forward and backward; else forward
    bias: bool = True
    output_bias: bool = True
    # unequal splits: the counts of rows are exchanged first, like the rows but empty
    counts_first: bool = True

    @classmethod
    def of(
        cls, config: MoEConfig, tokens: int, element_size: int = 2, training: bool = True
    ) -> "LayerShape":
        """The configured layer on so many tokens a rank, spread evenly over the experts up to the
        capacity."""
        top_k = min(config.top_k, config.num_experts)
        rows = tokens * top_k / config.num_experts
        capacity = expert_capacity(tokens, config.num_experts, top_k, config.capacity_factor)
        rows = rows if capacity is None else min(rows, capacity)
        dims = (config.model_dim, config.hidden_dim, config.num_experts)
        biases = (config.bias, config.bias and config.output_bias)
        return cls(tokens, *dims, top_k, rows, element_size, training, *biases)

    @property
    def expert_parameters(self) -> int:
        """Elements of one whole expert."""
        biases = self.bias * self.hidden_dim + self.output_bias * self.model_dim
        return 2 * self.model_dim * self.hidden_dim + biases

    @property
    def expert_tensors(self) -> int:
        """Parameters that hold a rank's experts; each is gathered on its own."""
        return 2 + self.bias + self.output_bias


@dataclass(frozen=True)
class Traffic:
    """What one rank sends to other ranks, the average over the ranks: elements and messages, by
    kind of link."""

    intra: float = 0.0
    inter: float = 0.0
    intra_messages: int = 0
    inter_messages: int = 0

    @property
    def elements(self) -> float:
        return self.intra + self.inter


@dataclass(frozen=True)
class Volume:
    """What one rank sends in a forward pass; a backward pass sends as much, with gradients in the
    weights' place."""

    there: Traffic  # rows to the experts
    back: Traffic  # results to the tokens
    weights: Traffic  # its own part of the experts to those who gather it


def volume(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> Volume:
    """Elements and messages of one forward pass, without the counts of rows that precede them.

    A hierarchical exchange sends most rows twice, once on each kind of link. Weights count as sent
    to each gatherer.

    Raises:
        ValueError: r that is not valid here; ranks_per_node that does not divide the group; experts
            that neither divide over the ranks nor the ranks over them.
    """
    per_node = _ranks_per_node(shape.num_experts, group_size, strategy)
    rows = _rows_traffic(
        _sent_rows(shape, strategy) * shape.model_dim, group_size, per_node, strategy
    )
    return Volume(rows, rows, _weights_traffic(shape, group_size, per_node, strategy))


def _ranks_per_node(num_experts: int, group_size: int, strategy: ParallelStrategy) -> int:
    strategy.check(num_experts, group_size)
    if num_experts % group_size and group_size % num_experts:
        raise ValueError(
            f"num_experts ({num_experts}) and the group's size ({group_size}): neither divides the"
            " other"
        )
    return _node_size(strategy.ranks_per_node or group_size, group_size)  # not given: one node


def _node_size(ranks_per_node: int, group_size: int) -> int:
    if group_size > ranks_per_node and group_size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node ({ranks_per_node}) must divide the expert-parallel size ({group_size})"
        )
    return min(ranks_per_node, group_size)


def _sent_rows(shape: LayerShape, strategy: ParallelStrategy) -> float:
    """Rows of one rank in the exchange, those for itself included; as many arrive."""
    return strategy.r * shape.num_experts * shape.rows_per_expert


def _rows_traffic(
    elements: float, group_size: int, per_node: int, strategy: ParallelStrategy
) -> Traffic:
    if strategy.r == 0:
        return Traffic()
    nodes, chunks = group_size // per_node, strategy.pipeline_degree
    if strategy.all_to_all == "linear":
        far = group_size - per_node
        share = elements / group_size
        return Traffic(share * (per_node - 1), share * far, chunks * (per_node - 1), chunks * far)
    intra, inter = elements * (per_node - 1) / per_node, elements * (nodes - 1) / nodes
    return Traffic(intra, inter, chunks * (per_node - 1), chunks * (nodes - 1))


def _gatherers(
    shape: LayerShape, group_size: int, per_node: int, strategy: ParallelStrategy
) -> tuple[int, int]:
    """Consecutive ranks that gather each other's weights, and how many of them share a node."""
    ranks_per_expert = max(group_size // shape.num_experts, 1)
    ranks = group_size if strategy.r == 0 else ranks_per_expert // strategy.r
    return ranks, math.gcd(ranks, per_node)


def _weights_traffic(
    shape: LayerShape, group_size: int, per_node: int, strategy: ParallelStrategy
) -> Traffic:
    ranks, near = _gatherers(shape, group_size, per_node, strategy)
    own, each = shape.expert_parameters * shape.num_experts / group_size, shape.expert_tensors
    return Traffic(own * (near - 1), own * (ranks - near), each * (near - 1), each * (ranks - near))


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on the slowest path; forward, and backward if the shape trains."""

    routing: float  # router, top-k, losses
    dispatch: float  # tokens to rows and back, reordering by expert
    exchange: float  # all-to-all, there and back, what is hidden included
    gather: float  # expert weights to those who share them, gradients back
    experts: float  # their products
    hidden: float  # of exchange and experts: the time that both work at once

    @property
    def total(self) -> float:
        return (
            self.routing + self.dispatch + self.exchange + self.gather + self.experts - self.hidden
        )

    @property
    def exposed_exchange(self) -> float:
        """The exchange's part in `total`."""
        return self.exchange - self.hidden

    def plus(self, other: "LayerTime", times: int = 1) -> "LayerTime":
        """The sum of this and so many of the other."""
        return LayerTime(
            *(a + times * b for a, b in zip(astuple(self), astuple(other), strict=True))
        )


def layer_time(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy
) -> LayerTime:
    """Predicted seconds of one layer by part. Raises what `volume` raises."""
    forward = _pass_time(machine, shape, group_size, strategy, backward=False)
    return forward.plus(
        _pass_time(machine, shape, group_size, strategy, backward=True), int(shape.training)
    )


def _pass_time(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy, backward: bool
) -> LayerTime:
    sent, chunks = (
        volume(shape, group_size, strategy),
        strategy.pipeline_degree if strategy.r else 1,
    )
    way = _exchange_seconds(machine, shape, sent.there, strategy) / chunks
    experts = _experts_seconds(machine, shape, group_size, strategy, backward) / chunks
    counts = 0.0
    if shape.counts_first and not backward:
        counts = (
            machine.intra.latency * sent.there.intra_messages
            + machine.inter.latency * sent.there.inter_messages
        )
    return LayerTime(
        routing=_routing_seconds(machine, shape, backward),
        dispatch=_dispatch_seconds(machine, shape, group_size, strategy),
        exchange=2 * chunks * way + counts / chunks,
        gather=_gather_seconds(machine, shape, group_size, strategy, backward),
        experts=chunks * experts,
        hidden=chunks * (2 * way + experts) - _pipelined_seconds(way, experts, chunks)
        if chunks > 1
        else 0.0,
    )


def _pipelined_seconds(way: float, experts: float, chunks: int) -> float:
    """From the first chunk's departure to the last result's arrival.

    One wire, on which all chunks leave one after the other and then results as they are ready,
    beside one processor.
    """
    worked, wire = 0.0, chunks * way
    for chunk in range(1, chunks + 1):
        worked = max(worked, chunk * way) + experts
        wire = max(wire, worked) + way
    return wire


def _exchange_seconds(
    machine: Machine, shape: LayerShape, sent: Traffic, strategy: ParallelStrategy
) -> float:
    """One way of all chunks. Linear: both kinds of links at once. 2DH: one after the other, with
    two copies between."""
    intra = machine.intra.seconds(sent.intra_messages, sent.intra * shape.element_size)
    inter = machine.inter.seconds(sent.inter_messages, sent.inter * shape.element_size)
    if strategy.all_to_all == "linear" or strategy.r == 0:
        return max(intra, inter)
    # two copies: read and write
    copied = 2 * 2 * _sent_rows(shape, strategy) * shape.model_dim * shape.element_size
    return (
        intra
        + inter
        + copied / machine.memory_bandwidth
        + 2 * strategy.pipeline_degree * machine.kernel_overhead
    )


def _experts_seconds(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy, backward: bool
) -> float:
    """Two products and the activation of all rows that arrive here; backward: two of each, for
    input and weights.

    Each product reads (or writes, for the gradient) its weights once a chunk.
    """
    products = 4 if backward else 2
    copies, chunks = max(strategy.r, 1), strategy.pipeline_degree if strategy.r else 1
    rows = copies * shape.num_experts * shape.rows_per_expert
    experts = shape.num_experts if strategy.r == 0 else max(shape.num_experts // group_size, 1)
    matrix = shape.model_dim * shape.hidden_dim / copies
    work = 2 * rows * matrix * products / machine.rate(shape.element_size)
    weights = chunks * experts * matrix * products * shape.element_size / machine.memory_bandwidth
    return work + weights + chunks * (products + 1) * machine.kernel_overhead


def _routing_seconds(machine: Machine, shape: LayerShape, backward: bool) -> float:
    product = 2 * shape.tokens * shape.num_experts * shape.model_dim / machine.flops_fp32
    scores = 4 * shape.tokens * shape.num_experts * ROUTER_PASSES / machine.memory_bandwidth
    return (2 if backward else 1) * product + scores + ROUTER_KERNELS * machine.kernel_overhead


def _dispatch_seconds(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy
) -> float:
    """Reads and writes of rows; a backward pass moves the same rows."""
    rows = shape.num_experts * shape.rows_per_expert * max(strategy.r, 1)
    # gathered from tokens: read, written; combined to tokens: read, written
    moved = 3 * rows + shape.tokens
    if strategy.r and group_size > 1 and shape.num_experts > group_size:
        moved += 4 * rows  # by source -> by local expert, and back
    moved_bytes = moved * shape.model_dim * shape.element_size
    return moved_bytes / machine.memory_bandwidth + LAYER_KERNELS * machine.kernel_overhead


def _gather_seconds(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy, backward: bool
) -> float:
    """All-gather of weights, or reduce-scatter of their gradients, as NCCL does it: a weight enters
    each node once, at one of its ranks, and goes on inside; each link at once."""
    per_node = _ranks_per_node(shape.num_experts, group_size, strategy)
    ranks, near = _gatherers(shape, group_size, per_node, strategy)
    if ranks == 1:
        return 0.0
    size, nodes = GRADIENT_BYTES if backward else shape.element_size, ranks // near
    own = shape.expert_parameters * shape.num_experts / group_size * size
    intra = machine.intra.seconds(shape.expert_tensors * (near - 1), own * nodes * (near - 1))
    inter = machine.inter.seconds(shape.expert_tensors * (nodes - 1), own * (nodes - 1))
    return max(intra, inter)


def candidates(
    num_experts: int, group_size: int, num_nodes: int, degrees: Sequence[int] = (1, 2, 4, 8)
) -> list[ParallelStrategy]:
    """Every strategy worth a trial: r = 0 has no chunks and no algorithm, 2DH needs several nodes
    of several ranks.

    Raises:
        ValueError: ranks that do not divide over the nodes.
    """
    if group_size % num_nodes:
        raise ValueError(
            f"num_nodes ({num_nodes}) must divide the expert-parallel size ({group_size})"
        )
    per_node = group_size // num_nodes
    if group_size == 1:
        return [ParallelStrategy(ranks_per_node=1)]
    algorithms = ALGORITHMS if num_nodes > 1 and per_node > 1 else ALGORITHMS[:1]
    return [
        ParallelStrategy(0, ranks_per_node=per_node),
        *(
            ParallelStrategy(r, degree, algorithm, per_node)
            for r in valid_r(num_experts, group_size)[1:]
            for degree in degrees
            for algorithm in algorithms
        ),
    ]


def ranked(
    machine: Machine,
    shape: LayerShape,
    group_size: int,
    ranks_per_node: int,
    degrees: Sequence[int] = (1, 2, 4, 8),
) -> list[tuple[ParallelStrategy, float]]:
    """The candidates with their predicted seconds, best first. Raises what `candidates` and
    `volume` raise."""
    num_nodes = group_size // _node_size(ranks_per_node, group_size)
    found = candidates(shape.num_experts, group_size, num_nodes, degrees)
    timed = [
        (strategy, layer_time(machine, shape, group_size, strategy).total) for strategy in found
    ]
    return sorted(timed, key=lambda pair: pair[1])


def calibrate(
    process_group: dist.ProcessGroup | None, ranks_per_node: int, device: torch.device | str
) -> Machine:
    """The machine at hand, measured in well under a second; the same on all ranks of the group, who
    all call this.

    The slowest rank counts. Without a process group nothing is sent and the links cost nothing;
    ranks that all share a node, or none, have one kind of link, which stands for both.

    Args:
        ranks_per_node: consecutive ranks of the group share a node.
        device: where the work is; with NCCL, a CUDA device.

    Raises:
        ValueError: ranks_per_node that does not divide the group.
    """
    device = torch.device(device)
    with torch.no_grad():
        seconds = _compute_seconds(device)
        if process_group is not None and process_group.size() > 1:
            seconds += _link_seconds(process_group, ranks_per_node, device)
            slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=process_group)
            seconds = slowest.tolist()
    fp32, bf16, copied, kernel, *links = seconds
    free = Link(0.0, math.inf)
    intra, inter = (
        (Link(links[0], 1 / links[1]), Link(links[2], 1 / links[3])) if links else (free, free)
    )
    name, memory = "this CPU", math.inf
    if device.type == "cuda":
        name, memory = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_properties(device).total_memory,
        )
    return Machine(name, intra, inter, 1 / bf16, 1 / fp32, 1 / copied, kernel, memory)


def _compute_seconds(device: torch.device) -> list[float]:
    """Seconds of a FLOP in fp32 and bf16, of a copied byte, and of a short kernel."""
    size, num_elements = (4096, 2**26) if device.type == "cuda" else (256, 2**20)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(size, size, dtype=dtype, device=device)
        found.append(_fastest(lambda a=a: a @ a, device, repeats=5) / (2 * size**3))
    source = torch.ones(num_elements, device=device)
    target, short = torch.empty_like(source), torch.ones(1, device=device)
    # read and write
    found.append(_fastest(lambda: target.copy_(source), device, repeats=5) / (2 * 4 * num_elements))
    found.append(_fastest(lambda: [short.add_(1) for _ in range(50)], device, repeats=3) / 50)
    return found


def _link_seconds(
    process_group: dist.ProcessGroup, ranks_per_node: int, device: torch.device
) -> list[float]:
    """Seconds of a message and of a byte, inside a node and between nodes."""
    size, rank = process_group.size(), process_group.rank()
    per_node = _node_size(ranks_per_node, size)
    near = [
        other for other in range(size) if other // per_node == rank // per_node and other != rank
    ]
    far = [other for other in range(size) if other // per_node != rank // per_node]
    intra, inter = (_measure_link(process_group, peers, device) for peers in (near, far))
    return [*(intra or inter), *(inter or intra)]


def _measure_link(
    process_group: dist.ProcessGroup, peers: list[int], device: torch.device
) -> list[float]:
    """Seconds of a message and of a byte, from exchanges with these peers alone; empty without
    any."""
    if not peers:
        return []
    # over 100 Mbit/s Ethernet that is a tenth of a second
    total = 2**26 if device.type == "cuda" else 2**20
    small, large = 64, max(total // len(peers), 2**16)
    seconds = []
    for size in (small, large):
        splits = [size if other in peers else 0 for other in range(process_group.size())]
        sent = torch.ones(sum(splits), dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)

        def exchange(received=received, sent=sent, splits=splits) -> None:
            dist.all_to_all_single(received, sent, splits, splits, group=process_group)

        seconds.append(_fastest(exchange, device, repeats=2))
    latency = seconds[0] / len(peers)
    transfer = max(seconds[1] - seconds[0], 0.1 * seconds[1])  # noise must not make a link free
    return [latency, transfer / (len(peers) * (large - small))]


def _fastest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest run after one that is not counted."""
    best = math.inf
    for repeat in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        best = min(best, time.perf_counter() - start) if repeat else best
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
