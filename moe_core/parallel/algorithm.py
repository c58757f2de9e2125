"""The interface of an all-to-all algorithm."""

# W ranks, M model dim, n columns of a table of counts

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.machine import ExchangeCost
from moe_core.parallel.rank_subset import RankSubset


@dataclass(frozen=True)
class RowCounts:
    """How many rows one all-to-all sends; on the host."""

    send: Tensor  # [W] rows from this rank to every rank
    receive: Tensor  # [W] rows from every rank to this one
    # rows that pass through this rank, in the form that the algorithm chooses; None: no rows do
    relayed: Tensor | None = None

    def reversed(self) -> "RowCounts":
        """The counts of an all-to-all that takes the rows back."""
        return RowCounts(self.receive, self.send, self.relayed)


@dataclass(frozen=True)
class ExchangeStep:
    """A part of an exchange that communicates over one process group, that of `ranks`."""

    ranks: RankSubset
    run: Callable[..., tuple[Tensor, ...]]  # takes what the step before it returned


class AllToAll(ABC):
    """An all-to-all algorithm on one group. Every method is called by all ranks of the group.

    A new algorithm is a subclass in a file of its own:

    >>> from moe_core import register_all_to_all
    >>> from moe_core.parallel import AllToAll
    >>> @register_all_to_all("mine")
    ... class Mine(AllToAll):
    ...     def send(self, rows, counts): ...
    ...     @staticmethod
    ...     def cost(elements, group_size, ranks_per_node): ...

    From then on `ParallelStrategy(all_to_all="mine")` is valid, and tuners try it.

    `exchange_counts`, `send` and `send_back` run on the group's communication stream, which may be
    a thread beside the caller's. They communicate over `self.ranks` and make no process group. An
    algorithm that communicates over other subsets of the group overrides `count_steps` and
    `row_steps`, with a step for each.

    Args:
        group: the ranks.
        ranks_per_node: as the strategy says; None: `group.ranks_per_node()` may know.

    Attributes:
        by_node: whether messages inside a node and between nodes differ. Such an algorithm is tried
            where there are several nodes of several ranks.
        through_memory: whether rows pass through memory that the ranks share. Such an algorithm is
            tried where the ranks are CPU processes of one machine.
        ranks: all ranks of the group, for collectives.

    Raises:
        ValueError: the algorithm does not support the group; raised on all ranks.
    """

    by_node = False
    through_memory = False

    def __init__(self, group: ExpertGroup, ranks_per_node: int | None = None) -> None:
        self.group = group
        self.ranks = group.all_ranks()

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tell every rank how many rows it will get.

        Args:
            counts: [W, n] rows from this rank to every rank, in n columns of their own.

        Returns:
            [W, n] rows from every rank to this one, and [..., n] the rows that pass through this
            rank; None where none do. Each of these rows [n] is a copy of one rank's counts for
            another, not a sum. Their sums over columns are `RowCounts.relayed`.
        """
        return self.ranks.all_to_all(counts), None

    def equal_counts(self, num_rows: int) -> RowCounts:
        """The counts where every rank sends `num_rows` to every rank.

        An algorithm that relays rows overrides this together with `exchange_counts`.
        """
        each = torch.full((self.group.size,), num_rows, device="cpu")
        return RowCounts(each, each)

    @abstractmethod
    def send(self, rows: Tensor, counts: RowCounts) -> Tensor:
        """rows [sum(send), M] by destination -> [sum(receive), M] by source, a new tensor."""

    def send_back(self, rows: Tensor, counts: RowCounts) -> Tensor:
        """The inverse of `send`: rows [sum(receive), M] by source -> [sum(send), M] by destination.

        An algorithm that relays rows overrides this.
        """
        return self.send(rows, counts.reversed())

    def count_steps(self) -> list[ExchangeStep]:
        """`exchange_counts` in steps. The last one returns what passes through this rank as a
        second tensor, where anything does."""

        def run(counts: Tensor) -> tuple[Tensor, ...]:
            received, relayed = self.exchange_counts(counts)
            if relayed is None:
                return (received,)
            return (received, relayed)

        return [ExchangeStep(self.ranks, run)]

    def row_steps(self, counts: RowCounts, back: bool) -> list[ExchangeStep]:
        """`send`, or `send_back`, in steps. Steps of several exchanges run at the same time."""
        send = self.send_back if back else self.send
        return [ExchangeStep(self.ranks, lambda rows: (send(rows, counts),))]

    @staticmethod
    @abstractmethod
    def cost(elements: float, group_size: int, ranks_per_node: int) -> ExchangeCost:
        """What one rank does for one exchange, with rows balanced over the ranks.

        Args:
            elements: in the rows that one rank sends, including rows for itself.
            ranks_per_node: divides group_size.
        """
