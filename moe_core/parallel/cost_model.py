"""Cost model: predicts the seconds of one MoE layer on a cluster, for any parallel strategy.

1. `volume` counts what a strategy sends inside a node and between nodes.
2. A message of n bytes costs `latency + n / bandwidth` of its link (the alpha-beta model), and each
   exchange the delay of its link once. A matrix product costs its FLOPs at the machine's rate, and
   the time to read its weights. Everything else costs its bytes and its kernel launches.
3. `layer_time` adds these costs and subtracts the time that a pipeline hides. `ranked` does so for
   every candidate strategy.
4. The machine is a known one (`machine.PROFILES`) or a measured one (`calibration.calibrate`).

The model assumes that the experts' loads are balanced. Its accuracy: docs/explanation/planner.md.
"""

# W ranks of the group, g ranks on each of N nodes; T tokens of a rank, E experts, K top-k, M model
# dim, H hidden dim; n rows that a rank has for one expert; s = max(W / E, 1) ranks of one expert; d
# chunks

import math
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace

from moe_core.capacity import expert_capacity
from moe_core.config import MoEConfig
from moe_core.parallel.machine import ExchangeCost, LinkTraffic, Machine
from moe_core.parallel.strategy import ParallelStrategy, node_size, valid_r
from moe_core.registry import ALL_TO_ALLS

GRADIENT_BYTES = 4  # gradients of weights are summed in the parameters' dtype, assumed to be fp32
# Estimates. The router passes over [T, E] in fp32: logits, noise, softmax, top-k, losses.
ROUTER_PASSES = 6
ROUTER_KERNELS = 20
LAYER_KERNELS = 6  # dispatch, combine, offsets, reordering


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one call of a layer on one rank."""

    tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    rows_per_expert: float  # n: kept rows that one rank has for one expert, on average
    element_size: int = 2  # bytes of a row's or a weight's element, in products and on the wire
    training: bool = True  # forward and backward; False: forward alone
    bias: bool = True
    output_bias: bool = True
    gated: bool = False  # experts with three weights
    # With unequal splits, the ranks exchange the numbers of rows before the rows.
    counts_first: bool = True
    # rows that a rank may have for one expert, all of which a static exchange sends; None: no limit
    capacity: float | None = None

    @classmethod
    def of(
        cls, config: MoEConfig, tokens: int, element_size: int = 2, training: bool = True
    ) -> "LayerShape":
        """The configured layer with `tokens` tokens per rank, evenly distributed over experts."""
        top_k = min(config.top_k, config.num_experts)
        rows = tokens * top_k / config.num_experts
        capacity = expert_capacity(tokens, config.num_experts, top_k, config.capacity_factor)
        if config.routing == "expert_choice":
            assert capacity is not None, "MoEConfig refuses a dropless layer"
            rows = min(capacity, tokens)
        elif capacity is not None:
            rows = min(rows, capacity)
        return cls(
            tokens,
            config.model_dim,
            config.hidden_dim,
            config.num_experts,
            top_k,
            rows,
            element_size,
            training,
            bias=config.bias,
            output_bias=config.bias and config.output_bias,
            gated=config.gated,
            capacity=capacity,
        )

    def sent_by(self, strategy: ParallelStrategy) -> "LayerShape":
        """The shape with the rows that a strategy sends: a static exchange sends full capacity."""
        if strategy.exchange != "static":
            return self
        if self.capacity is None:
            raise ValueError("exchange 'static' needs a capacity, the layer is dropless")
        return replace(self, rows_per_expert=self.capacity, counts_first=False)

    @property
    def expert_parameters(self) -> int:
        """The number of parameter elements of one expert."""
        biases = self.bias * (1 + self.gated) * self.hidden_dim + self.output_bias * self.model_dim
        return self.expert_weights * self.model_dim * self.hidden_dim + biases

    @property
    def expert_weights(self) -> int:
        """The number of weight matrices of one expert."""
        return 2 + self.gated

    @property
    def expert_tensors(self) -> int:
        """The number of parameter tensors of a rank's experts. Each is gathered separately."""
        return self.expert_weights + self.bias * (1 + self.gated) + self.output_bias


@dataclass(frozen=True)
class Volume:
    """The traffic that one rank sends in a forward pass.

    A backward pass sends equally much, with gradients in place of weights.
    """

    dispatch: LinkTraffic  # rows to the experts
    combine: LinkTraffic  # results to the tokens
    weights: LinkTraffic  # the rank's experts to the ranks that gather them


def volume(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> Volume:
    """Elements and messages of one forward pass, without the exchange of the numbers of rows.

    A hierarchical exchange sends most rows twice, once on each kind of link. Weights count once for
    each rank that gathers them.

    Raises:
        ValueError: r is not valid for these sizes; ranks_per_node does not divide the group; or the
            number of experts and the number of ranks do not divide one another.
    """
    shape = shape.sent_by(strategy)
    cost = _exchange_cost(shape, group_size, strategy)
    rows = cost.traffic
    rows = replace(
        rows,
        intra_messages=strategy.pipeline_degree * rows.intra_messages,
        inter_messages=strategy.pipeline_degree * rows.inter_messages,
    )
    return Volume(rows, rows, _weights_traffic(shape, group_size, strategy))


def _exchange_cost(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> ExchangeCost:
    """The cost of one direction of the exchange: elements of all chunks, messages of one chunk.

    It is empty for r = 0.
    """
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
    # By default all ranks share one node.
    return node_size(strategy.ranks_per_node or group_size, group_size)


def _sent_elements(shape: LayerShape, strategy: ParallelStrategy) -> float:
    """The elements of the rows that one rank sends, including rows for itself.

    The rank receives equally many.
    """
    return strategy.r * shape.num_experts * shape.rows_per_expert * shape.model_dim


def _gatherers(shape: LayerShape, group_size: int, strategy: ParallelStrategy) -> tuple[int, int]:
    """The number of (consecutive) ranks that gather each other's weights, and how many of them
    share a node."""
    ranks_per_node = _ranks_per_node(shape.num_experts, group_size, strategy)
    ranks = group_size
    if strategy.r:
        ranks_per_expert = max(group_size // shape.num_experts, 1)
        ranks = ranks_per_expert // strategy.r
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
    """Seconds of one layer: forward and, with `shape.training`, backward."""

    routing: float  # router, top-k, losses
    dispatch: float  # tokens to rows and back, reordering by expert
    exchange: float  # all-to-all in both directions, including the hidden part
    gather: float  # all-gather of expert weights, reduce-scatter of their gradients
    experts: float  # matrix products and activation
    hidden: float  # overlap of exchange and experts

    @property
    def total(self) -> float:
        parts = self.routing + self.dispatch + self.exchange + self.gather + self.experts
        return parts - self.hidden

    @property
    def exposed_exchange(self) -> float:
        """The part of the exchange that `total` includes: not hidden by the experts' work."""
        return self.exchange - self.hidden

    def plus(self, other: "LayerTime", times: int = 1) -> "LayerTime":
        """This time plus `times` times the other."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return LayerTime(*[a + times * b for a, b in pairs])


def layer_time(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy
) -> LayerTime:
    """Predicted seconds of each part of one layer.

    Raises:
        ValueError: as `volume`.
    """
    shape = shape.sent_by(strategy)
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
        for stage in cost.stages:
            counts += machine.intra.seconds(stage.intra_messages, 0)
            counts += machine.inter.seconds(stage.inter_messages, 0)
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
    """Seconds from sending the first chunk to receiving the last result.

    One link and one processor work at the same time. The link first sends all chunks one after the
    other, and then each result when it is ready.

    Args:
        exchange, experts: seconds of one chunk.
    """
    experts_end = 0.0
    link_end = chunks * exchange
    for chunk in range(1, chunks + 1):
        chunk_arrival = chunk * exchange
        experts_end = max(experts_end, chunk_arrival) + experts
        link_end = max(link_end, experts_end) + exchange
    return link_end


def _exchange_seconds(
    machine: Machine, shape: LayerShape, cost: ExchangeCost, strategy: ParallelStrategy
) -> float:
    """Seconds of one direction for all chunks: the stages one after the other, then the copies."""
    chunks = _num_chunks(strategy)
    size = shape.element_size
    seconds = 0.0
    for stage in cost.stages:
        intra = machine.intra.seconds(chunks * stage.intra_messages, stage.intra * size, chunks)
        inter = machine.inter.seconds(chunks * stage.inter_messages, stage.inter * size, chunks)
        seconds += max(intra, inter)
    # A copy reads and writes each element.
    copied_bytes = cost.copies * 2 * _sent_elements(shape, strategy) * size
    seconds += copied_bytes / machine.memory_bandwidth
    return seconds + cost.copies * chunks * machine.kernel_overhead


def _experts_seconds(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy, backward: bool
) -> float:
    """Seconds of the experts' matrix products and activation.

    A forward pass has one product for each weight. A backward pass has two products for each
    weight: the gradients of the input and of the weight. Each product reads the weight, or writes
    its gradient, once per chunk.
    """
    products = shape.expert_weights
    if backward:
        products *= 2
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
    """Seconds of reading and writing rows. A backward pass takes the same time."""
    rows = shape.num_experts * shape.rows_per_expert * max(strategy.r, 1)
    # Dispatch reads and writes rows. Combine reads rows and writes tokens.
    moved = 3 * rows + shape.tokens
    if strategy.r and group_size > 1 and shape.num_experts > group_size:
        moved += 4 * rows  # reordering from source rank to local expert, and back
    moved_bytes = moved * shape.model_dim * shape.element_size
    return moved_bytes / machine.memory_bandwidth + LAYER_KERNELS * machine.kernel_overhead


def _gather_seconds(
    machine: Machine, shape: LayerShape, group_size: int, strategy: ParallelStrategy, backward: bool
) -> float:
    """Seconds of the all-gather of weights, or of the reduce-scatter of their gradients.

    As in NCCL, each weight is sent to a node once, to one of the node's ranks. Rings inside the
    node, whose steps follow each other, pass it on. Both kinds of link work at the same time.
    """
    ranks, near = _gatherers(shape, group_size, strategy)
    if ranks == 1:
        return 0.0
    element_size = shape.element_size
    if backward:
        element_size = GRADIENT_BYTES
    nodes = ranks // near
    rank_bytes = shape.expert_parameters * shape.num_experts / group_size * element_size
    if strategy.r == 0 and ALL_TO_ALLS[strategy.all_to_all].through_memory and nodes == 1:
        copied_bytes = 2 * 2 * (ranks - 1) * rank_bytes  # into slots and out of them
        return copied_bytes / machine.memory_bandwidth
    tensors = shape.expert_tensors
    near_steps = tensors * (near - 1)
    far_steps = tensors * (nodes - 1)
    intra = machine.intra.seconds(near_steps, rank_bytes * nodes * (near - 1), near_steps)
    inter = machine.inter.seconds(far_steps, rank_bytes * (nodes - 1), far_steps)
    seconds = max(intra, inter)
    if backward:
        seconds *= machine.reduce_scatter
    return seconds


def candidates(
    num_experts: int,
    group_size: int,
    num_nodes: int,
    degrees: Sequence[int] = (1, 2, 4, 8),
    has_capacity: bool = False,
    all_to_alls: Collection[str] | None = None,
) -> list[ParallelStrategy]:
    """All strategies that differ in cost.

    A strategy with r = 0 has no chunks and sends no rows. An algorithm with `by_node` needs several
    nodes of several ranks. A static exchange needs a capacity.

    Args:
        all_to_alls: the algorithms that are available; None: all that need no shared memory.

    Raises:
        ValueError: the ranks do not divide over the nodes.
    """
    if group_size % num_nodes:
        raise ValueError(
            f"num_nodes ({num_nodes}) must divide the expert-parallel size ({group_size})"
        )
    per_node = group_size // num_nodes
    if group_size == 1:
        return [ParallelStrategy(ranks_per_node=1)]
    has_levels = num_nodes > 1 and per_node > 1
    names = []
    for name, algorithm in ALL_TO_ALLS.items():
        if algorithm.by_node and not has_levels:
            continue
        if algorithm.through_memory and num_nodes > 1:
            continue
        if all_to_alls is None:
            is_tried = not algorithm.through_memory
        else:
            is_tried = name in all_to_alls
        if is_tried:
            names.append(name)
    strategies = [ParallelStrategy(0, ranks_per_node=per_node)]
    for name in names:
        if ALL_TO_ALLS[name].through_memory:
            strategies.append(ParallelStrategy(0, 1, name, per_node))
    for r in valid_r(num_experts, group_size)[1:]:
        for degree in degrees:
            for name in names:
                strategies.append(ParallelStrategy(r, degree, name, per_node))
                if has_capacity and num_experts >= group_size:
                    strategies.append(ParallelStrategy(r, degree, name, per_node, "static"))
    return strategies


def ranked(
    machine: Machine,
    shape: LayerShape,
    group_size: int,
    ranks_per_node: int,
    degrees: Sequence[int] = (1, 2, 4, 8),
    all_to_alls: Collection[str] | None = None,
) -> list[tuple[ParallelStrategy, float]]:
    """The candidates with their predicted seconds, best first.

    Raises:
        ValueError: as `candidates` and `volume`.
    """
    num_nodes = group_size // node_size(ranks_per_node, group_size)
    timed = []
    has_capacity = shape.capacity is not None
    for strategy in candidates(
        shape.num_experts, group_size, num_nodes, degrees, has_capacity, all_to_alls
    ):
        timed.append((strategy, layer_time(machine, shape, group_size, strategy).total))
    return sorted(timed, key=lambda pair: pair[1])
