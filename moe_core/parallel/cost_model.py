"""Seconds that one MoE layer takes on a cluster, for any strategy, without running it.

1. `volume` counts what a strategy sends, to ranks of the same node and of others.
2. A message of n bytes costs `latency + n / bandwidth` of its link (the alpha-beta model); a matrix
   product costs its FLOPs at the machine's rate and the reading of its weights; everything else
   costs its bytes and its kernels.
3. `layer_time` adds these up and subtracts what a pipeline hides; `ranked` does so for every
   strategy worth a trial.
4. The machine is a named one (`machine.PROFILES`) or the one at hand (`calibration.calibrate`).

Rows are taken to be balanced over the experts. How well it predicts: docs/explanation/planner.md.
"""

# W ranks of the group, g of them on each of N nodes; T tokens of a rank, E experts, K top-k, M
# model dim, H hidden dim; n rows that a rank has for one expert; s = max(W / E, 1) ranks of one
# expert; d chunks

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from moe_core.config import MoEConfig, expert_capacity
from moe_core.parallel.machine import ExchangeCost, LinkTraffic, Machine
from moe_core.parallel.strategy import ParallelStrategy, node_size, valid_r
from moe_core.registry import ALL_TO_ALLS

GRADIENT_BYTES = 4  # the engine sums weight gradients in the parameters' own dtype
# over [T, E] in fp32: logits, noise, softmax, top-k, losses; an estimate
ROUTER_PASSES, ROUTER_KERNELS = 6, 20
LAYER_KERNELS = 6  # dispatch, combine, offsets, reordering: an estimate


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
        """Elements of one expert."""
        biases = self.bias * self.hidden_dim + self.output_bias * self.model_dim
        return 2 * self.model_dim * self.hidden_dim + biases

    @property
    def expert_tensors(self) -> int:
        """Parameters that hold a rank's experts; each is gathered on its own."""
        return 2 + self.bias + self.output_bias


@dataclass(frozen=True)
class Volume:
    """What one rank sends in a forward pass; a backward pass sends as much, with gradients in the
    weights' place."""

    dispatch: LinkTraffic  # rows to the experts
    combine: LinkTraffic  # results to the tokens
    weights: LinkTraffic  # its own part of the experts to those who gather it


def volume(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> Volume:
    """Elements and messages of one forward pass, without the counts of rows that precede them.

    A hierarchical exchange sends most rows twice, once on each kind of link. Weights count as sent
    to each gatherer.

    Raises:
        ValueError: r that is not valid here; ranks_per_node that does not divide the group; experts
            that neither divide over the ranks nor the ranks over them.
    """
    cost = _exchange_cost(shape, group_size, strategy)
    rows = cost.traffic
    rows = replace(
        rows,
        intra_messages=strategy.pipeline_degree * rows.intra_messages,
        inter_messages=strategy.pipeline_degree * rows.inter_messages,
    )
    return Volume(rows, rows, _weights_traffic(shape, group_size, strategy))


def _exchange_cost(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> ExchangeCost:
    """One direction of all chunks, with the messages of one chunk; nothing for r = 0."""
    ranks_per_node = _ranks_per_node(shape.num_experts, group_size, strategy)
    if strategy.r == 0:
        return ExchangeCost()
    algorithm = ALL_TO_ALLS[strategy.all_to_all]
    return algorithm.cost(_sent_elements(shape, strategy), group_size, ranks_per_node)


def _ranks_per_node(num_experts: int, group_size: int, strategy: ParallelStrategy) -> int:
    strategy.check(num_experts, group_size)
    if num_experts % group_size and group_size % num_experts:
        raise ValueError(
            f"num_experts ({num_experts}) and the group's size ({group_size}): neither divides the"
            " other"
        )
    return node_size(strategy.ranks_per_node or group_size, group_size)  # not given: one node


def _sent_elements(shape: LayerShape, strategy: ParallelStrategy) -> float:
    """Elements of the rows of one rank, those for itself included; as many arrive."""
    return strategy.r * shape.num_experts * shape.rows_per_expert * shape.model_dim


def _gatherers(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> tuple[int, int]:
    """Consecutive ranks that gather each other's weights, and how many of them share a node."""
    ranks_per_node = _ranks_per_node(shape.num_experts, group_size, strategy)
    ranks_per_expert = max(group_size // shape.num_experts, 1)
    ranks = group_size if strategy.r == 0 else ranks_per_expert // strategy.r
    return ranks, math.gcd(ranks, ranks_per_node)


def _weights_traffic(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> LinkTraffic:
    ranks, near = _gatherers(shape, group_size, strategy)
    elements = shape.expert_parameters * shape.num_experts / group_size
    messages = shape.expert_tensors
    return LinkTraffic(
        intra=elements * (near - 1),
        inter=elements * (ranks - near),
        intra_messages=messages * (near - 1),
        inter_messages=messages * (ranks - near),
    )


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on the slowest path; forward, and backward if the shape trains."""

    routing: float  # router, top-k, losses
    dispatch: float  # tokens to rows and back, reordering by expert
    exchange: float  # all-to-all in both directions, including what is hidden
    gather: float  # expert weights to those who share them, gradients back
    experts: float  # their products
    hidden: float  # of exchange and experts: the time in which both are at work

    @property
    def total(self) -> float:
        parts = self.routing + self.dispatch + self.exchange + self.gather + self.experts
        return parts - self.hidden

    @property
    def exposed_exchange(self) -> float:
        """The exchange's part in `total`."""
        return self.exchange - self.hidden

    def plus(self, other: "LayerTime", times: int = 1) -> "LayerTime":
        """The sum of this and so many of the other."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return LayerTime(*[a + times * b for a, b in pairs])


def layer_time(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy
) -> LayerTime:
    """Predicted seconds of one layer by part. Raises what `volume` raises."""
    forward = _pass_time(machine, shape, group_size, strategy, backward=False)
    if not shape.training:
        return forward
    return forward.plus(_pass_time(machine, shape, group_size, strategy, backward=True))


def _pass_time(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy, backward: bool
) -> LayerTime:
    chunks = _num_chunks(strategy)
    cost = _exchange_cost(shape, group_size, strategy)
    exchange = _exchange_seconds(machine, shape, cost, strategy) / chunks  # one direction
    experts = _experts_seconds(machine, shape, group_size, strategy, backward) / chunks
    counts = 0.0
    if shape.counts_first and not backward:
        sent = cost.traffic
        counts = machine.intra.latency * sent.intra_messages
        counts += machine.inter.latency * sent.inter_messages
    hidden = 0.0
    if chunks > 1:
        hidden = chunks * (2 * exchange + experts) - _pipelined_seconds(exchange, experts, chunks)
    return LayerTime(
        routing=_routing_seconds(machine, shape, backward),
        dispatch=_dispatch_seconds(machine, shape, group_size, strategy),
        exchange=2 * chunks * exchange + counts,
        gather=_gather_seconds(machine, shape, group_size, strategy, backward),
        experts=chunks * experts,
        hidden=hidden,
    )


def _num_chunks(strategy: ParallelStrategy) -> int:
    if strategy.r:
        return strategy.pipeline_degree
    return 1


def _pipelined_seconds(exchange: float, experts: float, chunks: int) -> float:
    """From the departure of the first chunk to the arrival of the last result.

    One wire, on which all chunks leave one after the other and then results as they are ready,
    beside one processor.

    Args:
        exchange, experts: seconds of one chunk.
    """
    worked, wire = 0.0, chunks * exchange
    for chunk in range(1, chunks + 1):
        worked = max(worked, chunk * exchange) + experts
        wire = max(wire, worked) + exchange
    return wire


def _exchange_seconds(
    machine: Machine, shape: LayerShape, cost: ExchangeCost, strategy: ParallelStrategy
) -> float:
    """One direction of all chunks: its stages one after the other, then the copies."""
    chunks = _num_chunks(strategy)
    size = shape.element_size
    seconds = 0.0
    for stage in cost.stages:
        intra = machine.intra.seconds(chunks * stage.intra_messages, stage.intra * size)
        inter = machine.inter.seconds(chunks * stage.inter_messages, stage.inter * size)
        seconds += max(intra, inter)
    # a copy reads and writes
    copied_bytes = cost.copies * 2 * _sent_elements(shape, strategy) * size
    seconds += copied_bytes / machine.memory_bandwidth
    return seconds + cost.copies * chunks * machine.kernel_overhead


def _experts_seconds(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy, backward: bool
) -> float:
    """Two products and the activation of all rows that arrive here; backward: two of each, for
    input and weights.

    Each product reads (or writes, for the gradient) its weights once a chunk.
    """
    products = 2
    if backward:
        products = 4
    parts = max(strategy.r, 1)
    chunks = _num_chunks(strategy)
    rows = parts * shape.num_experts * shape.rows_per_expert
    experts = shape.num_experts
    if strategy.r:
        experts = max(shape.num_experts // group_size, 1)
    matrix = shape.model_dim * shape.hidden_dim / parts
    work = 2 * rows * matrix * products / machine.rate(shape.element_size)
    weights = chunks * experts * matrix * products * shape.element_size / machine.memory_bandwidth
    return work + weights + chunks * (products + 1) * machine.kernel_overhead


def _routing_seconds(machine: Machine, shape: LayerShape, backward: bool) -> float:
    product = 2 * shape.tokens * shape.num_experts * shape.model_dim / machine.flops_fp32
    scores = 4 * shape.tokens * shape.num_experts * ROUTER_PASSES / machine.memory_bandwidth
    products = 1
    if backward:
        products = 2
    return products * product + scores + ROUTER_KERNELS * machine.kernel_overhead


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
    ranks, near = _gatherers(shape, group_size, strategy)
    if ranks == 1:
        return 0.0
    element_size = GRADIENT_BYTES if backward else shape.element_size
    nodes = ranks // near
    own_bytes = shape.expert_parameters * shape.num_experts / group_size * element_size
    tensors = shape.expert_tensors
    intra = machine.intra.seconds(tensors * (near - 1), own_bytes * nodes * (near - 1))
    inter = machine.inter.seconds(tensors * (nodes - 1), own_bytes * (nodes - 1))
    return max(intra, inter)


def candidates(
    num_experts: int, group_size: int, num_nodes: int, degrees: Sequence[int] = (1, 2, 4, 8)
) -> list[ParallelStrategy]:
    """Every strategy worth a trial: r = 0 has no chunks and no all-to-all; an algorithm by node
    needs several nodes of several ranks.

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
    has_levels = num_nodes > 1 and per_node > 1
    names = [name for name, algorithm in ALL_TO_ALLS.items() if has_levels or not algorithm.by_node]
    strategies = [ParallelStrategy(0, ranks_per_node=per_node)]
    for r in valid_r(num_experts, group_size)[1:]:
        for degree in degrees:
            for name in names:
                strategies.append(ParallelStrategy(r, degree, name, per_node))
    return strategies


def ranked(
    machine: Machine,
    shape: LayerShape,
    group_size: int,
    ranks_per_node: int,
    degrees: Sequence[int] = (1, 2, 4, 8),
) -> list[tuple[ParallelStrategy, float]]:
    """The candidates with their predicted seconds, best first. Raises what `candidates` and
    `volume` raise."""
    num_nodes = group_size // node_size(ranks_per_node, group_size)
    timed = []
    for strategy in candidates(shape.num_experts, group_size, num_nodes, degrees):
        timed.append((strategy, layer_time(machine, shape, group_size, strategy).total))
    return sorted(timed, key=lambda pair: pair[1])
