"""The two-dimensional hierarchical (2DH) all-to-all: inside the nodes, then between them.

There are g ranks on each of N nodes. Rank (a, j) is local rank j of node a.

1. Sort the rows by (local rank, node) of their destination.
2. All-to-all inside the node, g - 1 messages. Local rank j collects the rows that this node sends
   to local rank j of any node.
3. Sort the received rows by (node of the destination, local rank of the source).
4. All-to-all between equal local ranks of the nodes, N - 1 messages.

`send_back` performs the same steps in reverse, so it needs only the counts of `send`.

Source: arXiv 2206.03382 (Tutel), section 3.4.
"""

# W ranks, g ranks per node, N nodes, M model dim, n columns of a table of counts

import torch
from torch import Tensor

from moe_core.parallel.algorithm import AllToAll, ExchangeStep, RowCounts
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.machine import ExchangeCost, LinkTraffic
from moe_core.registry import register_all_to_all


@register_all_to_all("2dh")
class Hierarchical(AllToAll):
    """Sends fewer and larger messages than the linear all-to-all; most rows are sent twice.

    Raises:
        ValueError: ranks_per_node does not divide the group, or is not known.
    """

    by_node = True

    def __init__(self, group: ExpertGroup, ranks_per_node: int | None = None) -> None:
        super().__init__(group, ranks_per_node)
        self.ranks_per_node = group.ranks_per_node(ranks_per_node)
        self.num_nodes = group.size // self.ranks_per_node
        self.inside = group.inside_node(self.ranks_per_node)
        self.between = group.between_nodes(self.ranks_per_node)

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """As AllToAll. Relayed counts are [g, N, n]: from a local rank of this node to a node."""
        received, relayed = run_steps(self.count_steps(), counts)
        return received, relayed

    def count_steps(self) -> list[ExchangeStep]:
        """As AllToAll: inside the node, then between the nodes."""

        def inside(counts: Tensor) -> tuple[Tensor, ...]:
            by_node = counts.view(self.num_nodes, self.ranks_per_node, counts.shape[1])
            by_local_rank = by_node.transpose(0, 1).contiguous()  # [g, N, n]
            return (self.inside.all_to_all(by_local_rank),)

        def between(relayed: Tensor) -> tuple[Tensor, ...]:
            received = self.between.all_to_all(relayed.transpose(0, 1).contiguous())  # [N, g, n]
            return (received.flatten(0, 1), relayed)

        return [ExchangeStep(self.inside, inside), ExchangeStep(self.between, between)]

    def equal_counts(self, num_rows: int) -> RowCounts:
        each = super().equal_counts(num_rows).send
        return RowCounts(each, each, each.view(self.ranks_per_node, self.num_nodes))

    def send(self, rows: Tensor, counts: RowCounts) -> Tensor:
        """As AllToAll."""
        (received,) = run_steps(self.row_steps(counts, back=False), rows)
        return received

    def send_back(self, rows: Tensor, counts: RowCounts) -> Tensor:
        """As AllToAll."""
        (returned,) = run_steps(self.row_steps(counts, back=True), rows)
        return returned

    def row_steps(self, counts: RowCounts, back: bool) -> list[ExchangeStep]:
        """As AllToAll: inside the node, then between the nodes; back, in reverse."""
        send, receive, relayed = self._tables(counts)

        def inside(rows: Tensor) -> tuple[Tensor, ...]:
            rows = _transpose_blocks(rows, send)  # [N, g] -> [g, N]
            rows = self.inside.all_to_all(rows, send.sum(0), relayed.sum(1))
            return (_transpose_blocks(rows, relayed),)  # [g, N] -> [N, g]

        def between(rows: Tensor) -> tuple[Tensor, ...]:
            return (self.between.all_to_all(rows, relayed.sum(0), receive.sum(1)),)

        def between_back(rows: Tensor) -> tuple[Tensor, ...]:
            return (self.between.all_to_all(rows, receive.sum(1), relayed.sum(0)),)

        def inside_back(rows: Tensor) -> tuple[Tensor, ...]:
            rows = _transpose_blocks(rows, relayed.T)  # [N, g] -> [g, N]
            rows = self.inside.all_to_all(rows, relayed.sum(1), send.sum(0))
            return (_transpose_blocks(rows, send.T),)  # [g, N] -> [N, g]

        if back:
            return [
                ExchangeStep(self.between, between_back),
                ExchangeStep(self.inside, inside_back),
            ]
        return [ExchangeStep(self.inside, inside), ExchangeStep(self.between, between)]

    def _tables(self, counts: RowCounts) -> tuple[Tensor, Tensor, Tensor]:
        """The counts of rows sent [N, g], received [N, g] and relayed [g, N]."""
        assert counts.relayed is not None
        shape = (self.num_nodes, self.ranks_per_node)
        return counts.send.reshape(shape), counts.receive.reshape(shape), counts.relayed

    @staticmethod
    def cost(elements: float, group_size: int, ranks_per_node: int) -> ExchangeCost:
        num_nodes = group_size // ranks_per_node
        inside = elements * (ranks_per_node - 1) / ranks_per_node
        between = elements * (num_nodes - 1) / num_nodes
        first = LinkTraffic(intra=inside, intra_messages=ranks_per_node - 1)
        second = LinkTraffic(inter=between, inter_messages=num_nodes - 1)
        return ExchangeCost((first, second), copies=2)


def run_steps(steps: list[ExchangeStep], tensor: Tensor) -> tuple[Tensor, ...]:
    """Run the steps one after the other on the caller's thread, and return the last result."""
    tensors: tuple[Tensor, ...] = (tensor,)
    for step in steps:
        tensors = step.run(*tensors)
    return tensors


def _transpose_blocks(rows: Tensor, sizes: Tensor) -> Tensor:
    """Reorder blocks of rows from the order [A, B] to [B, A]; `sizes` [A, B] is on the host."""
    block = torch.arange(sizes.numel()).view(sizes.shape).T.flatten()  # in the new order
    new_sizes = sizes.flatten()[block]
    begin = sizes.flatten().cumsum(0) - sizes.flatten()
    new_begin = new_sizes.cumsum(0) - new_sizes
    table = torch.stack([begin[block] - new_begin, new_sizes])
    # The host does not wait for the device.
    moved_by, repeats = table.to(rows.device, non_blocking=True)
    num_rows = rows.shape[0]
    moved_by = moved_by.repeat_interleave(repeats, output_size=num_rows)
    index = torch.arange(num_rows, device=rows.device) + moved_by
    return rows.index_select(0, index)
