"""All-to-all of rows: differentiable, and asynchronous. Every algorithm gives the same result."""

# W ranks, M model dim, n columns of a table of counts

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_core.parallel.algorithm import AllToAll, ExchangeStep, RowCounts
from moe_core.parallel.calls import LayerCall
from moe_core.parallel.comm_stream import PendingWork, Wait, Work
from moe_core.parallel.groups import ExpertGroup, RankSubset
from moe_core.registry import ALL_TO_ALLS


class RowExchange:
    """Runs an all-to-all algorithm on the communication stream of a group, in order.

    Args:
        name: the registered name of the algorithm.
        ranks_per_node: ranks of the group on each node; None: the group's value, if needed.

    Raises:
        ValueError: the name is not registered, or the algorithm does not support the group.
    """

    def __init__(self, group: ExpertGroup, name: str, ranks_per_node: int | None = None) -> None:
        self.group = group
        self.name = name
        self.algorithm: AllToAll = ALL_TO_ALLS[name](group, ranks_per_node)

    def gathering_ranks(self) -> RankSubset:
        """All ranks of the group, with the collectives that gather weights."""
        if self.algorithm.through_memory:
            return self.algorithm.ranks
        return self.group.owners(self.group.size)

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """counts [W, n] for every rank -> those [W, n] from every rank, and the relayed [..., n].

        The relayed counts are None if this rank relays no rows.
        """

        tables = self._wait(self._submit(self.algorithm.count_steps(), counts))
        received = tables[0]
        if received.shape != counts.shape:
            raise ValueError(
                f"all_to_all {self.name!r} returned counts of shape {list(received.shape)}, not"
                f" {list(counts.shape)}"
            )
        return received, tables[1] if len(tables) > 1 else None

    def start(self, rows: Tensor, counts: RowCounts, back: bool = False) -> Callable[[], Tensor]:
        """Start sending rows [sum(send), M].

        Args:
            back: return rows [sum(receive), M] to the ranks that they came from.

        Returns:
            A function that waits for the rows [sum(receive), M] (with `back`, [sum(send), M]). It
            raises ValueError, with the algorithm's name, if another number of rows arrives.
        """
        expected = counts.send if back else counts.receive
        shape = [int(expected.sum()), *rows.shape[1:]]
        wait = self._submit(self.algorithm.row_steps(counts, back), rows)

        def finish() -> Tensor:
            (received,) = self._wait(wait)
            if list(received.shape) != shape:
                raise ValueError(
                    f"all_to_all {self.name!r} returned rows of shape {list(received.shape)}, not"
                    f" {shape}"
                )
            return received

        return finish

    def _submit(self, steps: Sequence[ExchangeStep], tensor: Tensor) -> Wait:
        """Start the steps. Each runs on its process group's stream, after the previous step."""
        tensor = tensor.contiguous()
        run = steps[0].run
        wait = self.group.comm_stream.submit(
            run, tensor, process_group=steps[0].ranks.process_group
        )
        for step in steps[1:]:
            run = _after(wait, step.run)
            wait = self.group.comm_stream.submit(
                run, tensor, process_group=step.ranks.process_group
            )
        return wait

    def _wait(self, wait: Wait) -> tuple[Tensor, ...]:
        with self.group.ranks.named_errors(f"{self.name} all-to-all"):
            return wait()


def _after(wait: Wait, run: Work) -> Work:
    """A function that waits for the results of the previous step and calls `run` on them."""

    def run_after(_: Tensor) -> tuple[Tensor, ...]:
        return run(*wait())

    return run_after


class PendingExchange(PendingWork):
    """An asynchronous exchange of rows. The gradient is sent in the opposite direction.

    Args:
        back: whether the rows return to the ranks that they came from.
        call: records that the backward pass starts.
    """

    def __init__(
        self,
        exchange: RowExchange,
        counts: RowCounts,
        back: bool = False,
        call: LayerCall | None = None,
    ) -> None:
        self._exchange = exchange
        self._counts = counts
        self._back = back
        self._call = call
        self._wait: Callable[[], Tensor] | None = None

    def start(self, tensors: tuple[Tensor, ...], gradient: bool) -> None:
        if gradient and self._call is not None:
            self._call.begin(backward=True)
        self._wait = self._exchange.start(tensors[0], self._counts, self._back != gradient)

    def finish(self, gradient: bool) -> tuple[Tensor, ...]:
        wait, self._wait = self._wait, None
        assert wait is not None, "rows arrive once"
        return (wait(),)


def all_to_all(
    rows: Tensor,
    group: ExpertGroup,
    send: Sequence[int] | None = None,
    algorithm: str = "linear",
    ranks_per_node: int | None = None,
) -> Tensor:
    """rows [N, ...] by destination rank -> rows by source rank; differentiable.

    Args:
        send: the number of rows for each rank; None: equally many for each.
        algorithm: a registered name (moe_core.register_all_to_all).

    Raises:
        ValueError: the rows do not divide over the ranks, or their number is not the sum of `send`;
            ranks_per_node does not divide the group; the algorithm is not registered.
    """
    exchange = RowExchange(group, algorithm, ranks_per_node)
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
    if send is None:
        counts = exchange.algorithm.equal_counts(len(rows) // group.size)
    else:
        counts = _exchange_counts(exchange, send, rows.device)
    pending = PendingExchange(exchange, counts)
    return pending.arrive(pending.depart(rows))[0]


def _exchange_counts(exchange: RowExchange, send: Sequence[int], device: torch.device) -> RowCounts:
    column = torch.tensor(send, device=device).unsqueeze(1)  # [W, 1]
    received, relayed = exchange.exchange_counts(column)
    if relayed is not None:
        relayed = relayed[..., 0].cpu()
    return RowCounts(torch.tensor(send, device="cpu"), received[:, 0].cpu(), relayed)
