"""Collectives among the ranks of a process group, with errors that name the operation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

# Words in the error messages of gloo: the path of a source file, or the reason why an operation
# fails after an earlier timeout has closed its connection.
_WORDS_OF_GLOO = ("gloo", "timeout caused pair closure")


class CollectiveError(RuntimeError):
    """A collective failed or timed out; the message names the operation and the ranks.

    A timeout of NCCL raises no exception: torch's watchdog aborts the process. Its log names the
    operation and the description of the process group (purpose and ranks).
    """


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Ranks:
    """The ranks of one process group.

    Without torch.distributed there is one rank, and a collective returns its input.

    Args:
        process_group: None for one rank without torch.distributed.
        description: describes this rank in error messages, such as "rank 0 of 4".
        time_limit: describes the timeout in error messages.
    """

    process_group: dist.ProcessGroup | None
    description: str
    time_limit: str = "in time"

    @property
    def size(self) -> int:
        if self.process_group is None:
            return 1
        return self.process_group.size()

    @property
    def rank(self) -> int:
        """The rank of this process in the process group."""
        if self.process_group is None:
            return 0
        return self.process_group.rank()

    @property
    def device(self) -> torch.device:
        """The device that tensors of a collective must be on."""
        return device_of(self.process_group)

    def all_reduce(
        self,
        values: Tensor,
        operation: str,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> Tensor:
        """Reduce `values` over the ranks in place and return them."""
        if self.process_group is not None:
            with self.named_errors(operation):
                dist.all_reduce(values, op, group=self.process_group)
        return values

    def start_all_reduce(self, values: Tensor, operation: str) -> Callable[[], None]:
        """Start to sum `values` over the ranks in place; returns a function that waits for it."""
        if self.process_group is None:
            return lambda: None
        with self.named_errors(operation):
            work = dist.all_reduce(values, group=self.process_group, async_op=True)

        def wait() -> None:
            with self.named_errors(operation):
                work.wait()

        return wait

    def max(self, value: int, device: torch.device, operation: str = "maximum") -> int:
        """The largest `value` of all ranks."""
        if self.size == 1:
            return value
        largest = torch.full((), value, device=device)  # full() needs no copy from the host
        return int(self.all_reduce(largest, operation, dist.ReduceOp.MAX))

    def broadcast(self, values: Tensor, operation: str) -> Tensor:
        """Overwrite `values` with those of the first rank and return them."""
        if self.process_group is not None:
            with self.named_errors(operation):
                dist.broadcast(values, group_src=0, group=self.process_group)
        return values

    @torch.no_grad()
    def first_difference(self, tensors: Mapping[str, Tensor]) -> tuple[str, int] | None:
        """The name of the first tensor that is not equal on all ranks, and the first rank where it
        differs from rank 0; None if all are equal.

        Sums of the tensors' bits are compared. The host waits for the device.
        """
        if self.size == 1 or not tensors:
            return None
        checksums = bit_sums(tensors).to(self.device)
        bounds = torch.stack([checksums, ~checksums])
        largest, inverted_smallest = self.all_reduce(
            bounds, "comparison of replicated weights", dist.ReduceOp.MAX
        )
        if torch.equal(largest, ~inverted_smallest):
            return None
        of_ranks = self.gather_objects(checksums.tolist(), "comparison of replicated weights")
        for i, name in enumerate(tensors):
            for rank, own in enumerate(of_ranks):
                if own[i] != of_ranks[0][i]:
                    return name, rank
        return None

    def gather_objects(self, value: object, operation: str) -> list:
        """The `value` of every rank, on every rank. It must be small and picklable."""
        if self.process_group is None:
            return [value]
        values = [None] * self.size
        with self.named_errors(operation):
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def gather_to_first(self, rows: Tensor, operation: str) -> list[Tensor] | None:
        """The `rows` of every rank, all of one shape, on the first rank; None on other ranks."""
        if self.process_group is None:
            return [rows]
        parts = None
        if self.process_group.rank() == 0:
            parts = [torch.empty_like(rows) for _ in range(self.size)]
        with self.named_errors(operation):
            dist.gather(rows, parts, group_dst=0, group=self.process_group)
        return parts

    def barrier(self, device: torch.device) -> None:
        """Wait until every rank has called this.

        Args:
            device: the device of this rank, which NCCL requires.
        """
        if self.process_group is None:
            return
        device_ids = None
        if device.type == "cuda":
            device_ids = [device.index]
        with self.named_errors("barrier"):
            dist.barrier(group=self.process_group, device_ids=device_ids)

    @contextmanager
    def named_errors(self, operation: str) -> Iterator[None]:
        """Convert errors of collectives in the block to CollectiveError.

        The message names the operation and the ranks. Other errors pass unchanged.
        """
        try:
            yield
        except RuntimeError as error:
            from_gloo = any(words in str(error) for words in _WORDS_OF_GLOO)
            from_collective = isinstance(error, dist.DistError) or from_gloo
            if isinstance(error, CollectiveError) or not from_collective:
                raise
            raise CollectiveError(
                f"{operation} failed on {self.description}: another process may have ended, or not"
                f" joined {self.time_limit}; see its output{_way_out()} ({error})"
            ) from error


def _way_out() -> str:
    """What else helps inside of torch's Join, whose ranks may have ended with fewer batches."""
    parallel = DistributedDataParallel._get_active_ddp_module()
    if parallel is None or not parallel._join_config.enable:
        return ""
    return (
        ". A rank without batches cannot compute its experts' part, also in torch's Join: give all"
        " ranks equally many batches (DistributedSampler, drop_last=True), or end all ranks"
        " together with Join(..., throw_on_early_termination=True)"
    )


def bit_sums(tensors: Mapping[str, Tensor]) -> Tensor:
    """The sum of the bits of each tensor, taken as integers: int64. There is at least one."""
    sums = []
    for tensor in tensors.values():
        bits = tensor.detach().view(_INTEGERS[tensor.itemsize])
        sums.append(bits.sum(dtype=torch.int64))
    return torch.stack(sums)


def device_of(process_group: dist.ProcessGroup | None) -> torch.device:
    """The device that tensors for collectives of a process group must be on; None: the world."""
    if "nccl" in dist.get_backend(process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
