"""The all-to-all through memory that the processes of one machine share."""

# W ranks

import logging
from weakref import WeakKeyDictionary

from torch import Tensor

from moe_core.comm import Collectives
from moe_core.parallel.groups import ExpertGroup
from moe_core.parallel.linear import Linear
from moe_core.parallel.machine import ExchangeCost
from moe_core.parallel.rank_subset import RankSubset
from moe_core.parallel.ranks import CollectiveError
from moe_core.registry import register_all_to_all

_log = logging.getLogger("moe_core")
_collectives: WeakKeyDictionary[ExpertGroup, Collectives] = WeakKeyDictionary()


@register_all_to_all("channels")
class Channels(Linear):
    """The linear all-to-all of CPU tensors through shared memory, without torch.distributed.

    The first one of a group makes the memory, in a collective; the others share it.

    Raises:
        ValueError: ranks on several machines, or GPUs; on all ranks.
        RuntimeError: no C++ compiler, or too little memory; on all ranks.
    """

    through_memory = True

    def __init__(self, group: ExpertGroup, ranks_per_node: int | None = None) -> None:
        super().__init__(group, ranks_per_node)
        if group.size > 1:
            _check_one_node(group, ranks_per_node)
            self.ranks = _SharedMemoryRanks(group, _collectives_of(group))

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


def shares_memory(group: ExpertGroup) -> bool:
    """Whether `channels` can run in this group; the log says why not. A collective.

    Raises:
        CollectiveError: a rank has ended or did not come within the timeout.
    """
    if group.size == 1:
        return False
    try:
        _check_one_node(group, group.ranks_per_node())
        _collectives_of(group)
    except CollectiveError:
        raise
    except (ValueError, RuntimeError) as error:
        _log.info("no all-to-all through shared memory is tried: %s", error)
        return False
    return True


def _check_one_node(group: ExpertGroup, ranks_per_node: int | None) -> None:
    """Refuse what is known without asking the other ranks."""
    if group.ranks.device.type != "cpu":
        raise ValueError(
            f"all_to_all 'channels' exchanges CPU tensors, and the {group} communicates on"
            f" {group.ranks.device.type}"
        )
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
