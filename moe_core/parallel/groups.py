"""The expert-parallel process group of a layer."""

import torch
import torch.distributed as dist


class ExpertGroup:
    """A process group with its size and this process's rank in it; a group of one needs no torch.distributed.

    Copies of a model (an averaged one, say) share it: a process group cannot be copied.

    Raises:
        ValueError: this process is not a member of the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is not None and process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not in the expert-parallel group that it was given")
        self.process_group = process_group
        self.size = 1 if process_group is None else process_group.size()
        self.rank = 0 if process_group is None else process_group.rank()

    def __deepcopy__(self, memo: dict) -> "ExpertGroup":
        return self

    def max(self, value: int, device: torch.device) -> int:
        """The largest `value` of the group."""
        if self.size == 1:
            return value
        largest = torch.tensor(value, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.process_group)
        return int(largest)
