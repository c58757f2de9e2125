"""All-to-all over a group of ranks, linear or two-dimensional hierarchical (2DH); both give the
same result.

2DH, with g ranks on each of N nodes (arXiv 2206.03382, section 3.4). Rank (a, j) is local rank j of
node a.

1. Order the rows by (local rank, node) of their destination.
2. All-to-all inside the node, g - 1 messages: local rank j collects what this node sends to any
   node's local rank j.
3. Order what arrived by (node of the destination, local rank of the source).
4. All-to-all between equal local ranks of the nodes, N - 1 messages.

The way back takes the same steps in reverse, so that it needs no sizes but those of the way there.
"""

# W ranks, g ranks per node, N nodes, E_l experts of a rank, C rows per expert and rank, M model dim

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.strategy import ALGORITHMS


@dataclass(frozen=True)
class Splits:
    """How many rows go where; on the host."""

    send: Tensor  # [W] rows from here to every rank
    receive: Tensor  # [W] rows from every rank to here
    # 2DH, [g, N]: rows that pass through here from a local rank of this node to a node
    middle: Tensor | None


class Algorithm:
    """One of the two algorithms on one group. Whatever it does runs on the group's lane, in
    order."""

    def __init__(
        self, group: ExpertGroup, name: str = "linear", ranks_per_node: int | None = None
    ) -> None:
        if name not in ALGORITHMS:
            raise ValueError(f"all_to_all ({name!r}) must be one of {', '.join(ALGORITHMS)}")
        self.group, self.name = group, name
        if name == "2dh":
            self.per_node = group.ranks_per_node(ranks_per_node)
            self.nodes = group.size // self.per_node
            self.inside = group.inside_node(self.per_node)
            self.between = group.between_nodes(self.per_node)
        else:
            self.whole = group.all_ranks()

    def start(self, rows: Tensor, splits: Splits, back: bool = False):
        """Begin to send rows [sum(send), M]; returns what will be [sum(receive), M] and a function
        that waits for it.

        `back`: rows [sum(receive), M] return to where they came from, as [sum(send), M].
        """
        size = int((splits.send if back else splits.receive).sum())
        out = rows.new_empty(size, *rows.shape[1:])
        self._count(splits, rows.shape[1:].numel(), back)
        run = self._linear if self.name == "linear" else self._hierarchical
        wait = self.group.lane.submit(run, (rows.contiguous(), out), splits, back)
        return out, lambda: self._wait(wait)

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """counts [W, E_l] of rows for every rank's experts -> those of every rank for the experts
        here [W, E_l], and for 2DH those that pass through here [g, N, E_l]."""
        received = torch.empty_like(counts)
        width = counts.shape[1]
        middle = (
            None if self.name == "linear" else counts.new_empty(self.per_node, self.nodes, width)
        )
        tensors = (counts.contiguous(), received) + (() if middle is None else (middle,))
        self._wait(self.group.lane.submit(self._equal_counts, tensors))
        return received, middle

    def _wait(self, wait) -> None:
        with self.group.named_errors(f"{self.name} all-to-all"):
            wait()

    def _equal_counts(self, counts: Tensor, received: Tensor, middle: Tensor | None = None) -> None:
        if middle is None:
            self.whole.all_to_all(received, counts)
            return
        # [g, N, E_l]
        by_local = counts.view(self.nodes, self.per_node, -1).transpose(0, 1).contiguous()
        self.inside.all_to_all(middle, by_local)
        by_node = middle.transpose(0, 1).contiguous()  # [N, g, E_l]
        self.between.all_to_all(received.view(by_node.shape), by_node)

    def _linear(self, rows: Tensor, out: Tensor, splits: Splits, back: bool) -> None:
        send, receive = (splits.receive, splits.send) if back else (splits.send, splits.receive)
        self.whole.all_to_all(out, rows, receive, send)

    def _hierarchical(self, rows: Tensor, out: Tensor, splits: Splits, back: bool) -> None:
        send = splits.send.reshape(self.nodes, self.per_node)  # [N, g]
        receive = splits.receive.reshape(self.nodes, self.per_node)
        middle = splits.middle
        between = rows.new_empty(int(middle.sum()), *rows.shape[1:])
        if back:
            self.between.all_to_all(between, rows, middle.sum(0), receive.sum(1))
            between = _transpose_blocks(between, middle.T)  # [N, g] -> [g, N]
            inside = rows.new_empty(len(out), *rows.shape[1:])
            self.inside.all_to_all(inside, between, send.sum(0), middle.sum(1))
            out.copy_(_transpose_blocks(inside, send.T))
        else:
            rows = _transpose_blocks(rows, send)  # [N, g] -> [g, N]
            self.inside.all_to_all(between, rows, middle.sum(1), send.sum(0))
            between = _transpose_blocks(between, middle)
            self.between.all_to_all(out, between, receive.sum(1), middle.sum(0))

    def _count(self, splits: Splits, width: int, back: bool) -> None:
        if self.group.traffic is None:
            return
        here = self.group.rank
        send = splits.receive if back else splits.send
        if self.name == "linear":
            sent = dict(enumerate(send.tolist()))
        else:
            node, local = divmod(here, self.per_node)
            inside = (
                splits.middle.sum(1) if back else send.reshape(self.nodes, self.per_node).sum(0)
            )
            between = (
                send.reshape(self.nodes, self.per_node).sum(1) if back else splits.middle.sum(0)
            )
            sent = {node * self.per_node + j: n for j, n in enumerate(inside.tolist())}
            for other, n in enumerate(between.tolist()):
                if other != node:
                    sent[other * self.per_node + local] = n
        for rank, rows in sent.items():
            if rank != here:
                self.group.traffic.add(rank, rows * width)


def _transpose_blocks(rows: Tensor, sizes: Tensor) -> Tensor:
    """Blocks of rows in the order of `sizes` [A, B], reordered as [B, A]."""
    blocks = rows.split(sizes.flatten().tolist())
    columns = sizes.shape[1]
    return torch.cat([block for column in range(columns) for block in blocks[column::columns]])


class Crossing:
    """One chunk of rows on its way there or back, for autograd: the gradient takes the opposite
    way.

    `depart` and `arrive` are apart so that work can be done in between, and in the backward pass
    too: autograd runs the latest node first, so every gradient that can depart does so before the
    first one has to arrive.
    """

    def __init__(self, algorithm: Algorithm, splits: Splits, back: bool = False) -> None:
        self.algorithm, self.splits, self.back = algorithm, splits, back
        self._wait = self._wait_gradient = self._gradient = None

    def depart(self, rows: Tensor) -> Tensor:
        """rows -> a tensor for the arriving rows, still empty."""
        return _Depart.apply(rows, self)

    def arrive(self, pending: Tensor) -> Tensor:
        """What `depart` returned, now filled."""
        return _Arrive.apply(pending, self)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, crossing):
        ctx.crossing = crossing
        out, crossing._wait = crossing.algorithm.start(rows, crossing.splits, crossing.back)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        crossing = ctx.crossing
        crossing._wait_gradient()
        gradient, crossing._gradient = crossing._gradient, None
        return gradient, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, pending, crossing):
        ctx.crossing = crossing
        crossing._wait()
        return pending.view_as(pending)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        crossing = ctx.crossing
        crossing._gradient, crossing._wait_gradient = crossing.algorithm.start(
            grad, crossing.splits, not crossing.back
        )
        return grad, None  # stands for the one under way, which has another shape


def all_to_all(
    rows: Tensor,
    group: ExpertGroup,
    send: Sequence[int] | None = None,
    algorithm: str = "linear",
    ranks_per_node: int | None = None,
) -> Tensor:
    """rows [N, ...] by destination rank -> rows by source rank; differentiable.

    Args:
        send: rows for each rank; None: as many for each.

    Raises:
        ValueError: rows that do not divide over the ranks or do not add up to `send`;
            ranks_per_node that does not divide the group.
    """
    way = Algorithm(group, algorithm, ranks_per_node)
    if send is None and len(rows) % group.size:
        raise ValueError(
            f"the number of rows ({len(rows)}) must be divisible by the group's size ({group.size})"
        )
    if send is not None and (len(send) != group.size or sum(send) != len(rows) or min(send) < 0):
        raise ValueError(
            f"send ({list(send)}) must be {group.size} counts that add up to the {len(rows)} rows"
        )
    if group.size == 1:
        return rows
    crossing = Crossing(way, _splits(way, len(rows), send, rows.device))
    return crossing.arrive(crossing.depart(rows))


def _splits(
    way: Algorithm, num_rows: int, send: Sequence[int] | None, device: torch.device
) -> Splits:
    size = way.group.size
    if send is None:  # known without asking
        each = torch.full((size,), num_rows // size, device="cpu")
        return Splits(each, each, each.view(way.per_node, way.nodes) if way.name == "2dh" else None)
    counts, middle = way.exchange_counts(torch.tensor(send, device=device).unsqueeze(1))
    return Splits(
        torch.tensor(send, device="cpu"),
        counts[:, 0].cpu(),
        None if middle is None else middle[..., 0].cpu(),
    )


def flexible_all_to_all(
    x: Tensor,
    group: ExpertGroup,
    back: bool = False,
    algorithm: str = "linear",
    ranks_per_node: int | None = None,
) -> Tensor:
    """The all-to-all of equal splits whose result keeps the experts' rows together, so that they do
    not get fewer as ranks are added: x [E, C, M] of this rank's tokens -> [E / W, W * C, M] of this
    rank's experts; `back` the reverse.

    Raises:
        ValueError: experts (or rows, on the way back) that do not divide over the group.

    Source: arXiv 2206.03382, section 3.3 (Flexible all-to-all).
    """
    size, what = group.size, "rows" if back else "experts"
    if x.shape[1 if back else 0] % size:
        raise ValueError(
            f"the number of {what} ({x.shape[1 if back else 0]}) must be divisible by the size"
            f" ({size})"
        )
    if back:
        experts, rows, dim = x.shape
        x = x.view(experts, size, rows // size, dim).transpose(0, 1)  # [W, E_l, C, M]
        out = all_to_all(x.reshape(experts * rows, dim), group, None, algorithm, ranks_per_node)
        return out.view(size * experts, rows // size, dim)
    experts, capacity, dim = x.shape
    out = all_to_all(x.reshape(experts * capacity, dim), group, None, algorithm, ranks_per_node)
    return (
        out.view(size, experts // size, capacity, dim)
        .transpose(0, 1)
        .reshape(experts // size, -1, dim)
    )
