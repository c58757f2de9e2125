"""The all-to-all through memory that the processes, or the GPUs, of one machine share."""

# W ranks

import logging
from weakref import WeakKeyDictionary

from torch import Tensor

from moe_core.comm import Collectives
from moe_core.comm.cuda_collectives import CudaAllToAll
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.linear import Linear
from moe_core.parallel.machine import ExchangeCost
from moe_core.parallel.rank_subset import RankSubset
from moe_core.parallel.ranks import CollectiveError
from moe_core.registry import register_all_to_all

_log = logging.getLogger("moe_core")
_ONLY_STATIC = "all_to_all 'channels' between GPUs needs equal splits (MODEL.MOE.EXCHANGE static)"
_collectives: WeakKeyDictionary[ExpertGroup, Collectives] = WeakKeyDictionary()
_gpu_all_to_alls: WeakKeyDictionary[ExpertGroup, CudaAllToAll] = WeakKeyDictionary()


@register_all_to_all("channels")
class Channels(Linear):
    """The linear all-to-all through shared memory, without torch.distributed.

    The first one of a group makes the memory, in a collective; the others share it. Between GPUs it
    sends equally many rows to each rank, as the static exchange does.

    Raises:
        ValueError: ranks on several machines; on all ranks. Between GPUs, in a call: numbers of
            rows that differ.
        RuntimeError: no C++ compiler, or too little memory; between GPUs, no Triton or symmetric
            memory; on all ranks.
    """

    through_memory = True

    def __init__(self, group: ExpertGroup, ranks_per_node: int | None = None) -> None:
        super().__init__(group, ranks_per_node)
        if group.size == 1:
            return
        _check_one_node(group, ranks_per_node)
        if _between_gpus(group):
            self.ranks = GpuRanks(group, _gpu_all_to_all_of(group))
        else:
            self.ranks = _SharedMemoryRanks(group, _collectives_of(group))

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.ranks, GpuRanks):
            raise ValueError(f"{_ONLY_STATIC}: it does not exchange counts")
        return super().exchange_counts(counts)

    @staticmethod
    def cost(elements: float, group_size: int, ranks_per_node: int) -> ExchangeCost:
        """Nothing passes a link: the sender copies the rows into slots, the receiver out of them.

        A rank's rows for itself are copied once, which is not taken into account.
        """
        return ExchangeCost(copies=2)


class _SharedMemoryRanks(RankSubset):
    """All ranks of a group, whose all-to-alls go through shared memory."""

    def __init__(self, group: ExpertGroup, collectives: Collectives) -> None:
        super().__init__(group, range(group.size), group.process_group)
        self._collectives = collectives

    def all_to_all(
        self, rows: Tensor, send: Tensor | None = None, receive: Tensor | None = None
    ) -> Tensor:
        if send is None or receive is None:
            self._record("all_to_all", rows, [len(rows) // self.size] * self.size)
            return self._collectives.all_to_all(rows)
        self._record("all_to_all", rows, send.tolist(), (send, receive))
        return self._collectives.exchange(rows, send.tolist(), receive.tolist())


class GpuRanks(RankSubset):
    """All ranks of a group, whose all-to-alls of equal splits go through GPU memory."""

    def __init__(self, group: ExpertGroup, exchange: CudaAllToAll) -> None:
        super().__init__(group, range(group.size), group.process_group)
        self._exchange = exchange

    def all_to_all(
        self, rows: Tensor, send: Tensor | None = None, receive: Tensor | None = None
    ) -> Tensor:
        numbers = [len(rows) // self.size] * self.size
        sizes = tuple(counts for counts in (send, receive) if counts is not None)
        for counts in sizes:
            if counts.tolist() != numbers:
                raise ValueError(f"{_ONLY_STATIC}: rows by rank are {counts.tolist()}")
        self._record("all_to_all", rows, numbers, sizes)
        return self._exchange.all_to_all(rows)


def shares_memory(group: ExpertGroup) -> bool:
    """Whether `channels` can run in this group; the log says why not. A collective.

    Raises:
        CollectiveError: a rank has ended or did not come within the timeout.
    """
    if group.size == 1:
        return False
    try:
        if _between_gpus(group):
            raise ValueError(f"{_ONLY_STATIC}, which no tuner tries")
        _check_one_node(group, group.ranks_per_node())
        _collectives_of(group)
    except CollectiveError:
        raise
    except (ValueError, RuntimeError) as error:
        _log.info("no all-to-all through shared memory is tried: %s", error)
        return False
    return True


def _between_gpus(group: ExpertGroup) -> bool:
    return group.ranks.device.type == "cuda"


def _check_one_node(group: ExpertGroup, ranks_per_node: int | None) -> None:
    """Refuse what is known without asking the other ranks."""
    if ranks_per_node is not None and ranks_per_node < group.size:
        raise ValueError(
            f"all_to_all 'channels' needs all ranks on one machine, and ranks_per_node is"
            f" {ranks_per_node} for the {group}"
        )


def _collectives_of(group: ExpertGroup) -> Collectives:
    """Those of the group, ready for all-to-alls; made when first asked for, by all ranks."""
    if group not in _collectives:
        made = Collectives(group.ranks, group.timeout)
        made.prepare_all_to_all()
        _collectives[group] = made
    return _collectives[group]


def _gpu_all_to_all_of(group: ExpertGroup) -> CudaAllToAll:
    """That of the group; made when first asked for, by all ranks."""
    if group not in _gpu_all_to_alls:
        _gpu_all_to_alls[group] = CudaAllToAll(group.ranks, group.timeout)
    return _gpu_all_to_alls[group]
