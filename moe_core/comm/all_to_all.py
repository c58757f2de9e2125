"""The all-to-all through the shared memory of one machine."""

# W ranks

import logging
from weakref import WeakKeyDictionary

from torch import Tensor

from moe_core.comm.collectives import Collectives
from moe_core.parallel.algorithm import Linear
from moe_core.parallel.groups import ExpertGroup, RankSubset
from moe_core.parallel.machine import ExchangeCost
from moe_core.ranks import CollectiveError
from moe_core.registry import register_all_to_all

_log = logging.getLogger("moe_core")
_collectives: WeakKeyDictionary[ExpertGroup, Collectives] = WeakKeyDictionary()


@register_all_to_all("channels")
class Channels(Linear):
    """The all-to-all of CPU processes of one machine through channels (moe_core.comm).

    The first instance of a group allocates the memory, in a collective. Later instances share it.

    Raises:
        ValueError: the ranks are on several machines or run on GPUs. It is raised on all ranks.
        RuntimeError: there is no C++ compiler or too little memory. It is raised on all ranks.
    """

    through_memory = True

    def __init__(self, group: ExpertGroup, ranks_per_node: int | None = None) -> None:
        super().__init__(group, ranks_per_node)
        if group.size == 1:
            return
        if group.ranks.device.type != "cpu":
            raise ValueError("all_to_all 'channels' is for ranks on CPUs; on GPUs use 'linear'")
        if ranks_per_node is not None and ranks_per_node < group.size:
            raise ValueError(
                f"all_to_all 'channels' is for ranks of one machine, not for {group.size} with"
                f" ranks_per_node ({ranks_per_node}); use 'linear'"
            )
        self.ranks = _ChannelRanks(group, _collectives_of(group))

    @classmethod
    def is_available(cls, group: ExpertGroup) -> bool:
        """Whether the ranks of this group are CPU processes of one node that can share memory.

        If sharing memory fails, the log gives the reason.
        """
        if group.size == 1 or group.ranks.device.type != "cpu":
            return False
        try:
            if group.ranks_per_node() < group.size:
                return False
            _collectives_of(group)
        except CollectiveError:
            raise
        except (ValueError, RuntimeError) as error:
            _log.info("all-to-all through shared memory is not tried: %s", error)
            return False
        return True

    @staticmethod
    def cost(elements: float, group_size: int, ranks_per_node: int) -> ExchangeCost:
        """The sender copies the rows into slots, and the receiver copies them out. The single copy
        of a rank's rows for itself is neglected."""
        return ExchangeCost(copies=2)


class _ChannelRanks(RankSubset):
    """All ranks of a group. Their collectives use channels."""

    def __init__(self, group: ExpertGroup, collectives: Collectives) -> None:
        super().__init__(group, range(group.size), group.process_group)
        self._collectives = collectives

    def all_to_all(
        self, rows: Tensor, send: Tensor | None = None, receive: Tensor | None = None
    ) -> Tensor:
        if send is None or receive is None:
            return self._collectives.all_to_all(rows)
        return self._collectives.exchange(rows, send.tolist(), receive.tolist())

    def gather(self, shard: Tensor) -> Tensor:
        return self._collectives.all_gather(shard)

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        return self._collectives.reduce_scatter(rows)


def _collectives_of(group: ExpertGroup) -> Collectives:
    """The group's collectives, ready for all-to-alls. The first call (by all ranks) makes them."""
    if group not in _collectives:
        collectives = Collectives(group.ranks, group.timeout)
        collectives.prepare_all_to_all()
        _collectives[group] = collectives
    return _collectives[group]
