"""Exchanges: how the tokens of a group of ranks are processed by the experts of the group.

- `Local`: all experts are in this process.
- `GatheredWeights`: the weights of all experts are gathered; tokens stay on their rank (r = 0).
- `Exchanged`: rows are sent to the ranks of their experts, and the results back (r >= 1).
- `StaticExchange`: as `Exchanged`, but with equally many rows for each expert.

A call has two steps. First the ranks agree on the capacity (`agree`). Then the experts process the
tokens (`__call__`).
"""

# T tokens, W ranks, E experts, E_l experts of a rank, K top-k, N kept rows here, R rows received, M
# model dim, r hidden parts of an expert, d chunks

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.capacity import expert_capacity
from moe_core.config import MoEConfig
from moe_core.experts import Experts
from moe_core.ops import DispatchPlan, ExpertWeights, Kernels, combine, dispatch, inverse_plan
from moe_core.parallel.algorithm import RowCounts
from moe_core.parallel.calls import LayerCall
from moe_core.parallel.chunks import ChunkLayout, plan_received
from moe_core.parallel.gather import gather_weights
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.row_exchange import PendingExchange, RowExchange
from moe_core.parallel.strategy import ParallelStrategy


class Agreement(NamedTuple):
    """The result of the communication before tokens are dropped.

    Attributes:
        capacity: the largest number of rows of one rank for one expert, for `make_plan`; None: no
            limit.
        messages: the exchanged numbers of choices; None if the ranks exchange no numbers.
        call: the pass of the layer; None: one rank.
    """

    capacity: int | Tensor | None
    messages: "Messages | None" = None
    call: LayerCall | None = None


class Messages(NamedTuple):
    """The messages that the ranks exchange before the rows, as tables on the device.

    A message has n = E_l + 4 columns: the number of the sender's rows for each expert of the
    receiver, without the capacity limit; the two tags of the sender's call
    (`LayerCall.tags`); the receiver's index among the sharers of an expert's rows
    (`ChunkLayout.sharers`); and T of the sender.
    """

    sent: Tensor  # [W, n] to every rank
    received: Tensor  # [W, n] from every rank
    relayed: Tensor | None  # [..., n] copies of messages that this rank relayed; None: none
    capacity: Tensor | None  # scalar; None: the capacity does not limit the rows
    on_host: Callable[[], list[Tensor]]  # waits, and returns the tables that are not None


class Choices(NamedTuple):
    """The tokens' choices of experts, and what the ranks have agreed on for them."""

    gates: Tensor  # [T, K]
    plan: DispatchPlan
    agreement: Agreement
    kernels: Kernels  # of the pass


class Exchange(ABC):
    """Brings tokens to the experts and the results back.

    It is immutable, so copies of a layer share it.
    """

    @abstractmethod
    def agree(
        self,
        expert_ids: Tensor,
        top_k: int,
        capacity_factor: float | Tensor,
        call: LayerCall | None = None,
    ) -> Agreement:
        """Compute the capacity from the largest number of tokens of a rank.

        Args:
            expert_ids: [T, K].
            call: compared over the ranks, here or in `__call__`; None: one rank.

        Raises:
            ValueError: as LayerCall.check.
        """

    @abstractmethod
    def __call__(self, experts: nn.Module, tokens: Tensor, choices: Choices) -> Tensor:
        """tokens [T, M] -> the experts' results, weighted and summed [T, M].

        Dispatch and combine are part of the call, since a kernel may fuse them with the experts."""

    def __deepcopy__(self, memo: dict) -> "Exchange":
        return self


def make_exchange(config: MoEConfig, group: ExpertGroup, strategy: ParallelStrategy) -> Exchange:
    """The exchange of a strategy.

    Raises:
        ValueError: r or ranks_per_node does not fit the group. It is raised on all ranks, before
            any collective except the comparison of nodes.
    """
    strategy.check(config.num_experts, group.size)
    row_exchange = RowExchange(group, strategy.all_to_all, strategy.ranks_per_node)
    if group.size == 1:
        return Local(config)
    if strategy.r == 0:
        return GatheredWeights(config, row_exchange)
    if strategy.exchange == "static":
        return StaticExchange(config, row_exchange, strategy)
    return Exchanged(config, row_exchange, strategy)


class Local(Exchange):
    """All experts are in this process, so there is no communication."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def agree(
        self,
        expert_ids: Tensor,
        top_k: int,
        capacity_factor: float | Tensor,
        call: LayerCall | None = None,
    ) -> Agreement:
        num_tokens = expert_ids.shape[0]  # with len it would be a constant in torch.export
        num_experts = self.config.num_experts
        return Agreement(expert_capacity(num_tokens, num_experts, top_k, capacity_factor))

    def __call__(self, experts: nn.Module, tokens: Tensor, choices: Choices) -> Tensor:
        gates, plan, agreement, kernels = choices
        if isinstance(experts, Experts):
            weights = self._weights(experts, tokens.dtype, agreement.call)
            return experts(
                tokens, plan.offsets, weights=weights, gates=gates, plan=plan, kernels=kernels
            )
        rows = dispatch(tokens, plan, kernels)  # [N, M]
        rows = apply_experts(experts, rows, plan.offsets)
        return combine(rows, gates, plan, kernels)

    def _weights(
        self, experts: Experts, dtype: torch.dtype, call: LayerCall | None
    ) -> Callable[[], ExpertWeights] | None:
        """A function that the experts call for the weights to use; None: their own weights."""
        return None


class GatheredWeights(Local):
    """Every rank gathers the weights of all experts. No rows are sent."""

    def __init__(self, config: MoEConfig, row_exchange: RowExchange) -> None:
        super().__init__(config)
        self.group = row_exchange.group
        self.owners = row_exchange.gathering_ranks()

    def agree(
        self,
        expert_ids: Tensor,
        top_k: int,
        capacity_factor: float | Tensor,
        call: LayerCall | None = None,
    ) -> Agreement:
        if capacity_factor == 0:
            return Agreement(None, call=call)
        most_tokens: int | Tensor = len(expert_ids)
        if not self.group.has_equal_tokens:
            most_tokens = torch.full((), len(expert_ids), device=expert_ids.device)
            self.group.ranks.all_reduce(most_tokens, "maximum", dist.ReduceOp.MAX)
        num_experts = self.config.num_experts
        capacity = expert_capacity(most_tokens, num_experts, top_k, capacity_factor)
        return Agreement(capacity, call=call)

    def _weights(
        self, experts: Experts, dtype: torch.dtype, call: LayerCall | None
    ) -> Callable[[], ExpertWeights]:
        return partial(self._gather, experts, dtype, call)

    def _gather(
        self, experts: Experts, dtype: torch.dtype, call: LayerCall | None
    ) -> ExpertWeights:
        weights: ExpertWeights | None = None
        if self.group.take_gathered is not None:
            weights = self.group.take_gathered(experts, dtype, call)
        return weights or gather_weights(experts, self.group, 0, dtype, self.owners, call)


class Chunk(NamedTuple):
    """The rows of one chunk."""

    rows: RowCounts  # on the host
    by_expert: Tensor  # [W, E_l] from every rank for every expert of this rank, on the device


class Exchanged(Exchange):
    """Rows are sent to the ranks of their experts, in chunks that overlap with the experts' work.

    The ranks tell each other the number of their choices for each expert, and their number of
    tokens. From these, every rank computes the capacity and the numbers of rows to send and to
    receive. The host reads these numbers once, which is the only wait for the device.
    """

    def __init__(
        self, config: MoEConfig, row_exchange: RowExchange, strategy: ParallelStrategy
    ) -> None:
        self.config = config
        self.group = row_exchange.group
        self.row_exchange = row_exchange
        self.strategy = strategy
        self.layout = ChunkLayout.of(config.num_experts, self.group.size, strategy)

    def agree(
        self,
        expert_ids: Tensor,
        top_k: int,
        capacity_factor: float | Tensor,
        call: LayerCall | None = None,
    ) -> Agreement:
        counts = count_choices(expert_ids, self.config.num_experts)
        messages = self._exchange_messages(counts, len(expert_ids), top_k, capacity_factor, call)
        return Agreement(messages.capacity, messages, call)

    def __call__(self, experts: nn.Module, tokens: Tensor, choices: Choices) -> Tensor:
        """A choice becomes r rows, one for each rank with a part of its expert's hidden units.
        Their results are partial sums, which combine adds with the same gate."""
        gates, plan, agreement, kernels = choices
        assert agreement.messages is not None
        chunks = self._chunks(agreement.messages, agreement.call)
        num_sent = sum(int(chunk.rows.send.sum()) for chunk in chunks)  # r N
        plan = self.layout.arrange(plan, num_sent // self.strategy.r)
        rows = dispatch(tokens, plan, kernels)  # [r N, M]
        function = self._expert_function(experts, tokens.dtype, kernels)
        rows = self._through_experts(rows, chunks, function, agreement.call)
        gates = gates.repeat_interleave(self.strategy.r, dim=1)  # [T, K r]
        return combine(rows, gates, plan, kernels)

    def _exchange_messages(
        self,
        counts: Tensor,
        num_tokens: int,
        top_k: int,
        capacity_factor: float | Tensor,
        call: LayerCall | None,
    ) -> Messages:
        """Tell every rank the number of choices of its experts, from `counts` [E]. The capacity
        limits the rows later."""
        by_rank = self.layout.by_rank(counts)  # [W, E_l]
        sent = F.pad(by_rank, (0, 4), value=num_tokens)  # [W, E_l + 4]
        if call is not None:
            sent[:, -4:-2] = call.tags(counts.device)
        sent[:, -2] = self.layout.sharers(counts.device)
        received, relayed = self.row_exchange.exchange_counts(sent)
        most_tokens = received[:, -1].max()
        num_experts = self.config.num_experts
        capacity = expert_capacity(most_tokens, num_experts, top_k, capacity_factor)
        tables = [t for t in (sent, received, relayed, capacity) if t is not None]
        return Messages(sent, received, relayed, capacity, start_host_copy(tables))

    def _chunks(self, messages: Messages, call: LayerCall | None) -> list[Chunk]:
        """The numbers of rows that each chunk sends and receives.

        Raises:
            ValueError: as LayerCall.check.
        """
        tables = messages.on_host()
        if call is not None:
            call.check(tables[1][:, -4:-2])
        capacity = None
        if messages.capacity is not None:
            capacity = tables.pop()
        # [W, E_l, d] sent, [W, E_l, d] received, perhaps [..., E_l, d] relayed
        on_host = [self._chunk_sizes(table, capacity) for table in tables]
        on_device = self._chunk_sizes(messages.received, messages.capacity)  # [W, E_l, d]
        chunks = []
        for chunk in range(self.layout.num_chunks):
            rows = RowCounts(*(sizes[..., chunk].sum(-1) for sizes in on_host))
            chunks.append(Chunk(rows, on_device[..., chunk]))
        return chunks

    def _chunk_sizes(self, messages: Tensor, capacity: Tensor | None) -> Tensor:
        """messages [..., n] -> the numbers of rows [..., E_l, d] after the capacity limit."""
        counts = messages[..., :-4]
        if capacity is not None:
            counts = torch.minimum(counts, capacity)
        return self.layout.chunk_sizes(counts, messages[..., -2:-1])

    def _expert_function(
        self, experts: nn.Module, dtype: torch.dtype, kernels: Kernels
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """A function from received rows [R, M], sorted by (source, expert), and their counts
        [W, E_l] to the experts' results in the same order."""
        if not isinstance(experts, Experts):
            return partial(_apply_to_received, experts, kernels)
        # Cached, so that weights are gathered once for all chunks.
        weights = functools.cache(
            partial(gather_weights, experts, self.group, self.strategy.r, dtype)
        )

        def run(rows: Tensor, counts: Tensor) -> Tensor:
            if counts.shape[1] == 1:
                return experts(rows, _offsets(counts), weights=weights, kernels=kernels)
            plan = plan_received(counts, len(rows))
            return experts(rows, plan.offsets, weights=weights, plan=plan, kernels=kernels)

        return run

    def _through_experts(
        self,
        rows: Tensor,
        chunks: list[Chunk],
        experts: Callable[[Tensor, Tensor], Tensor],
        call: LayerCall | None,
    ) -> Tensor:
        """rows [r N, M] in the order of sending -> the experts' results in the same order."""
        exchange = self.row_exchange
        dispatches = [PendingExchange(exchange, chunk.rows) for chunk in chunks]
        returns = [PendingExchange(exchange, chunk.rows, True, call) for chunk in chunks]
        rows_of_chunks = rows.split([int(chunk.rows.send.sum()) for chunk in chunks])
        sent = []
        for pending, chunk_rows in zip(dispatches, rows_of_chunks, strict=True):
            sent.append(pending.depart(chunk_rows))
        returned = []
        for i, chunk in enumerate(chunks):
            (arrived,) = dispatches[i].arrive(sent[i])
            results = experts(arrived, chunk.by_expert)
            returned.append(returns[i].depart(results))
        pairs = zip(returns, returned, strict=True)
        outputs = [pending.arrive(token)[0] for pending, token in pairs]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs)


class StaticExchange(Exchanged):
    """Each rank sends exactly C rows, the capacity, for each expert to the expert's rank.

    Unused rows hold zeros, and their results are not read. All numbers of rows follow from C, so
    the ranks exchange no counts. They agree on C by a collective, unless the caller guarantees
    equal numbers of tokens (`moe_core.equal_tokens`).

    Source: GShard, arXiv 2006.16668. Source of the layout (E_l, W C, M) of received rows: arXiv
    2206.03382, section 3.3.
    """

    def agree(
        self,
        expert_ids: Tensor,
        top_k: int,
        capacity_factor: float | Tensor,
        call: LayerCall | None = None,
    ) -> Agreement:
        most_tokens = self.group.most_tokens(len(expert_ids), expert_ids.device, call)
        if self.group.has_equal_tokens and call is not None:
            call.begin()
        num_experts = self.config.num_experts
        capacity = expert_capacity(most_tokens, num_experts, top_k, capacity_factor)
        return Agreement(capacity, call=call)

    def __call__(self, experts: nn.Module, tokens: Tensor, choices: Choices) -> Tensor:
        gates, plan, agreement, kernels = choices
        capacity = agreement.capacity
        assert isinstance(capacity, int), "a static exchange has a capacity on the host"
        places = self.layout.places(plan, capacity)
        if len(tokens) > 0:
            rows = dispatch(tokens, places.padded, kernels)  # [E C, M]
            # Otherwise a value that is not finite would reach the experts' gradients: 0 * inf is
            # NaN.
            rows = rows.masked_fill(~places.is_taken.unsqueeze(1), 0)
        else:  # there is no token to copy
            num_places = len(places.padded.choices)
            rows = tokens.new_zeros(num_places, tokens.shape[1]) + tokens.sum()
        chunks = self._static_chunks(capacity, tokens.device)
        function = self._expert_function(experts, tokens.dtype, kernels)
        rows = self._through_experts(rows, chunks, function, agreement.call)
        rows = dispatch(rows, places.returned, kernels)  # [N, M]
        return combine(rows, gates, plan, kernels)

    def _static_chunks(self, capacity: int, device: torch.device) -> list[Chunk]:
        """The chunks of a static exchange, with equally many rows between any two ranks."""
        num_ranks = self.group.size
        experts_per_rank = self.config.num_experts // num_ranks
        chunks = []
        for size in self.layout.capacity_of_chunks(capacity):
            counts = self.row_exchange.algorithm.equal_counts(experts_per_rank * size)
            by_expert = torch.full((num_ranks, experts_per_rank), size, device=device)
            chunks.append(Chunk(counts, by_expert))
        return chunks


def apply_experts(experts: nn.Module, rows: Tensor, offsets: Tensor) -> Tensor:
    """Call a custom experts module: `experts(rows, offsets)`.

    Raises:
        ValueError: the shape of the result differs from that of the rows.
    """
    out = experts(rows, offsets)
    if out.shape != rows.shape:
        raise ValueError(
            f"the experts returned shape {tuple(out.shape)} for rows of shape {tuple(rows.shape)}"
        )
    return out


def try_experts(experts: nn.Module, rows: Tensor) -> None:
    """Try a custom experts module on one row for each expert: rows [E_l, M].

    Raises:
        ValueError: as `apply_experts`.
    """
    training = [module for module in experts.modules() if module.training]
    experts.eval()  # these rows must not change batch statistics, for example
    with torch.no_grad(), torch.random.fork_rng([rows.device] if rows.is_cuda else []):
        offsets = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=rows.device)
        apply_experts(experts, rows, offsets)
    for module in training:
        module.training = True


def _apply_to_received(
    experts: nn.Module, kernels: Kernels, rows: Tensor, counts: Tensor
) -> Tensor:
    """Apply a custom experts module to received rows [R, M], sorted by (source, expert)."""
    if counts.shape[1] == 1:
        return apply_experts(experts, rows, _offsets(counts))
    plan = plan_received(counts, len(rows))
    results = apply_experts(experts, dispatch(rows, plan, kernels), plan.offsets)
    return dispatch(results, inverse_plan(plan), kernels)


def _offsets(counts: Tensor) -> Tensor:
    """counts [W, E_l] -> the end of each expert's rows [E_l] when rows are sorted by expert."""
    return counts.sum(0).cumsum(0).int()


def count_choices(expert_ids: Tensor, num_experts: int) -> Tensor:
    """expert_ids [T, K] -> how often each expert was chosen [E]."""
    ids = expert_ids.flatten().long()
    return ids.new_zeros(num_experts).scatter_add_(0, ids, torch.ones_like(ids))


def start_host_copy(tables: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start to copy integer tables of one dtype to the host, in one transfer.

    Returns:
        A function that waits and returns the copies. On a CPU it returns the tables themselves.
    """
    if not tables[0].is_cuda:
        return lambda: list(tables)
    flat = torch.cat([table.flatten() for table in tables])
    pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
    pinned.copy_(flat, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[Tensor]:
        copied.synchronize()
        parts = pinned.split([table.numel() for table in tables])
        return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]

    return wait
