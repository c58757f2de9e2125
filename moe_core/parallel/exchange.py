"""The ways in which tokens and the experts of a group of ranks meet.

- `Local`: all experts are in this process.
- `GatheredWeights`: tokens stay, the weights of all experts are gathered (r = 0).
- `Exchanged`: rows are sent to the ranks of their experts, and the results back (r >= 1).
"""

# T tokens, W ranks, E experts, E_l experts of a rank, K top-k, N kept rows here, R rows received, M
# model dim, r hidden parts of an expert, d chunks

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core.config import MoEConfig
from moe_core.experts import Experts
from moe_core.ops import DispatchPlan, ExpertWeights, combine, dispatch
from moe_core.parallel.algorithm import RowCounts
from moe_core.parallel.chunks import ChunkLayout
from moe_core.parallel.gather import gather_weights
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.row_exchange import PendingExchange, RowExchange
from moe_core.parallel.strategy import ParallelStrategy

RowFunction = Callable[[Tensor, Tensor], Tensor]  # rows [R, M], offsets [E_l] -> rows [R, M]


class Exchange(ABC):
    """Takes tokens to the experts and their results back. Immutable: copies of a layer share it."""

    @abstractmethod
    def __call__(
        self, experts: nn.Module, tokens: Tensor, gates: Tensor, plan: DispatchPlan
    ) -> Tensor:
        """tokens [T, M], gates [T, K] -> the experts' results, weighted and summed [T, M]."""

    def __deepcopy__(self, memo: dict) -> "Exchange":
        return self


def make_exchange(config: MoEConfig, group: ExpertGroup, strategy: ParallelStrategy) -> Exchange:
    """The exchange of a strategy.

    Raises:
        ValueError: r or ranks_per_node that does not fit the group; on all ranks, before any
            collective but the comparison of nodes.
    """
    strategy.check(config.num_experts, group.size)
    row_exchange = RowExchange(group, strategy.all_to_all, strategy.ranks_per_node)
    if group.size == 1:
        return Local(config)
    if strategy.r == 0:
        return GatheredWeights(config, group)
    return Exchanged(config, row_exchange, strategy)


class Local(Exchange):
    """No rank but this one takes part."""

    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def __call__(
        self, experts: nn.Module, tokens: Tensor, gates: Tensor, plan: DispatchPlan
    ) -> Tensor:
        if isinstance(experts, Experts):
            weights = self._weights(experts, tokens.dtype)
            return experts(tokens, plan.offsets, weights=weights, gates=gates, plan=plan)
        rows = dispatch(tokens, plan, self.config.kernels)  # [N, M]
        rows = apply_experts(experts, rows, plan.offsets)
        return combine(rows, gates, plan, self.config.kernels)

    def _weights(self, experts: Experts, dtype: torch.dtype) -> Callable[[], ExpertWeights] | None:
        """Reads what to compute with, within the experts' call; None: their own weights."""
        return None


class GatheredWeights(Local):
    """Every rank gathers the weights of all experts; no row leaves it."""

    def __init__(self, config: MoEConfig, group: ExpertGroup) -> None:
        super().__init__(config)
        self.group = group

    def _weights(self, experts: Experts, dtype: torch.dtype) -> Callable[[], ExpertWeights]:
        return partial(gather_weights, experts, self.group, 0, dtype)


class ChunkCounts(NamedTuple):
    """The rows of one chunk; on the host."""

    rows: RowCounts
    by_expert: Tensor  # [W, E_l] rows from every rank for every expert of this rank


class Exchanged(Exchange):
    """Rows are sent to the ranks of their experts, in chunks that overlap with the experts' work.

    The counts of rows are exchanged first and read back to the host, once.
    """

    def __init__(
        self, config: MoEConfig, row_exchange: RowExchange, strategy: ParallelStrategy
    ) -> None:
        self.config = config
        self.row_exchange = row_exchange
        self.group = row_exchange.group
        self.strategy = strategy
        self.layout = ChunkLayout.of(config.num_experts, self.group.size, strategy)

    def __call__(
        self, experts: nn.Module, tokens: Tensor, gates: Tensor, plan: DispatchPlan
    ) -> Tensor:
        kernels = self.config.kernels
        counts = plan.offsets.diff(prepend=plan.offsets.new_zeros(1)).long()  # [E] kept rows
        run_sizes = self.layout.run_sizes(counts)  # [E, Q, d]
        chunks = self._exchange_counts(run_sizes)
        num_sent = sum(int(chunk.rows.send.sum()) for chunk in chunks)  # r N
        plan = self.layout.arrange(plan, run_sizes, num_sent // self.strategy.r)
        rows = dispatch(tokens, plan, kernels)  # [r N, M]
        rows = self._through_experts(rows, chunks, self._row_function(experts, tokens.dtype))
        gates = gates.repeat_interleave(self.strategy.r, dim=1)  # [T, K r]
        return combine(rows, gates, plan, kernels)

    def _exchange_counts(self, run_sizes: Tensor) -> list[ChunkCounts]:
        """How many rows each chunk sends and receives."""
        by_rank = self.layout.by_rank(run_sizes)  # [W, E_l, d]
        received, relayed = self.row_exchange.exchange_counts(by_rank.flatten(1))
        tables = [by_rank, received.view_as(by_rank)]
        if relayed is not None:
            tables.append(relayed.view(*relayed.shape[:-1], *by_rank.shape[1:]))  # [..., E_l, d]
        sent, received, *relayed_tables = _to_host(tables)
        chunks = []
        for chunk in range(self.layout.num_chunks):
            by_expert = received[..., chunk]  # [W, E_l]
            relayed_rows = [table[..., chunk].sum(-1) for table in relayed_tables]
            rows = RowCounts(sent[..., chunk].sum(1), by_expert.sum(1), *relayed_rows)
            chunks.append(ChunkCounts(rows, by_expert))
        return chunks

    def _row_function(self, experts: nn.Module, dtype: torch.dtype) -> RowFunction:
        if not isinstance(experts, Experts):
            return partial(apply_experts, experts)
        # cached: weights are gathered once, however many chunks are computed with them
        weights = functools.cache(
            partial(gather_weights, experts, self.group, self.strategy.r, dtype)
        )
        return partial(apply_experts, partial(experts, weights=weights))

    def _through_experts(
        self, rows: Tensor, chunks: list[ChunkCounts], experts: RowFunction
    ) -> Tensor:
        """rows [r N, M] in the order of sending -> the experts' results, likewise."""
        dispatches = [PendingExchange(self.row_exchange, chunk.rows) for chunk in chunks]
        returns = [PendingExchange(self.row_exchange, chunk.rows, back=True) for chunk in chunks]
        rows_of_chunks = rows.split([int(chunk.rows.send.sum()) for chunk in chunks])
        sent = []
        for pending, chunk_rows in zip(dispatches, rows_of_chunks, strict=True):
            sent.append(pending.depart(chunk_rows))
        returned = []
        for i, chunk in enumerate(chunks):
            arrived = dispatches[i].arrive(sent[i])
            results = _by_expert(arrived, chunk.by_expert, experts)
            returned.append(returns[i].depart(results))
        outputs = [pending.arrive(token) for pending, token in zip(returns, returned, strict=True)]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs)


def apply_experts(experts: RowFunction, rows: Tensor, offsets: Tensor) -> Tensor:
    """`experts(rows, offsets)`; raises ValueError where it returns another shape."""
    out = experts(rows, offsets)
    if out.shape != rows.shape:
        raise ValueError(
            f"the experts returned shape {tuple(out.shape)} for rows of shape {tuple(rows.shape)}"
        )
    return out


def _to_host(tables: list[Tensor]) -> list[Tensor]:
    """All tables in one copy: the only wait for the device."""
    flat = torch.cat([table.flatten() for table in tables]).cpu()
    parts = flat.split([table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables, strict=True)]


def _by_expert(rows: Tensor, counts: Tensor, experts: RowFunction) -> Tensor:
    """Rows [R, M] by (source, expert) through the experts, which take them by expert.

    Args:
        counts: [W, E_l], on the host.
    """
    offsets = counts.sum(0).cumsum(0).int().to(rows.device)
    num_ranks, num_experts = counts.shape
    if num_experts == 1:
        return experts(rows, offsets)
    expert = torch.arange(num_experts, device=rows.device).repeat(num_ranks)
    expert = expert.repeat_interleave(counts.flatten().to(rows.device), output_size=len(rows))
    order = expert.argsort(stable=True)
    inverse = order.argsort()
    results = experts(_Permute.apply(rows, order, inverse), offsets)
    return _Permute.apply(results, inverse, order)


class _Permute(torch.autograd.Function):
    """Rows in another order; their gradients in the inverse one, without autograd's scatter."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
