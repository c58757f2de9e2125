"""The interface of an all-to-all algorithm, and the linear one."""

# W ranks, M model dim, n columns of a table of counts

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.parallel.groups import ExpertGroup, RankSubset
from moe_core.parallel.machine import ExchangeCost, LinkTraffic
from moe_core.registry import register_all_to_all


@dataclass(frozen=True)
class RowCounts:
    """The numbers of rows of one all-to-all, on the host."""

    send: Tensor  # [W] rows from this rank to every rank
    receive: Tensor  # [W] rows from every rank to this one
    # rows that this rank relays, in a form that the algorithm defines; None: it relays none
    relayed: Tensor | None = None

    def reversed(self) -> "RowCounts":
        """The counts of the all-to-all that returns the rows."""
        return RowCounts(self.receive, self.send, self.relayed)


@dataclass(frozen=True)
class ExchangeStep:
    """A part of an exchange that communicates over one process group, the group of `ranks`."""

    ranks: RankSubset
    run: Callable[..., tuple[Tensor, ...]]  # its arguments are the results of the previous step


class AllToAll(ABC):
    """An all-to-all algorithm for one group. Every method is called by all ranks of the group.

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
    another thread than the caller's. They communicate over `self.ranks` and create no process
    group. An algorithm that communicates over other subsets of the group overrides `count_steps`
    and `row_steps`, with one step for each subset.

    Args:
        group: the ranks.
        ranks_per_node: the value of the strategy. None: use `group.ranks_per_node()` if needed.

    Attributes:
        by_node: whether messages inside a node and between nodes differ. The tuner tries such an
            algorithm only with several nodes of several ranks.
        through_memory: whether rows pass through memory that the ranks share.
        ranks: all ranks of the group, for collectives.

    Raises:
        ValueError: the algorithm does not support the group; raised on all ranks.
    """

    by_node = False
    through_memory = False

    def __init__(self, group: ExpertGroup, ranks_per_node: int | None = None) -> None:
        self.group = group
        self.ranks = group.all_ranks()

    @classmethod
    def is_available(cls, group: ExpertGroup) -> bool:
        """Whether tuners may try the algorithm over this group. It is the same on all ranks.

        An algorithm that needs more than a process group overrides this. It may communicate: all
        ranks of the group call it, before their first trial.

        Raises:
            CollectiveError: a rank has ended or did not come within the timeout.
        """
        return True

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tell every rank how many rows it will receive.

        Args:
            counts: [W, n], the rows from this rank to every rank, as n separate numbers.

        Returns:
            The rows from every rank to this one [W, n], and the relayed counts [..., n], or None if
            this rank relays no rows. A relayed entry [n] is a copy of the counts of one rank for
            another, not a sum. `RowCounts.relayed` are their sums over n.
        """
        return self.ranks.all_to_all(counts), None

    def equal_counts(self, num_rows: int) -> RowCounts:
        """The counts of an all-to-all in which every rank sends `num_rows` rows to every rank.

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
        """`exchange_counts` in steps. If this rank relays rows, the last step returns the relayed
        counts as a second tensor."""

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
        """The work of one rank in one exchange, with rows balanced over the ranks.

        Args:
            elements: the elements of the rows that one rank sends, including rows for itself.
            ranks_per_node: divides group_size.
        """


@register_all_to_all("linear")
class Linear(AllToAll):
    """Every rank sends one message to every other rank."""

    def send(self, rows: Tensor, counts: RowCounts) -> Tensor:
        return self.ranks.all_to_all(rows, counts.send, counts.receive)

    @staticmethod
    def cost(elements: float, group_size: int, ranks_per_node: int) -> ExchangeCost:
        to_each = elements / group_size
        near = ranks_per_node - 1
        far = group_size - ranks_per_node
        return ExchangeCost((LinkTraffic(to_each * near, to_each * far, near, far),))
