"""All-to-alls between the GPUs of one machine, through channels."""

# P ranks, C rows of a block

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from moe_core.comm.cuda import CudaMemoryGroup
from moe_core.ranks import Ranks

_BUFFER_BYTES = 2**26
_ALIGNMENT = 64


class CudaAllToAll:
    """All-to-alls of CUDA tensors on the current stream. The host reads nothing from the device.

    Blocks that are longer than a slot of the buffer are sent in several rounds. All ranks must pass
    blocks of the same length. After a failed wait, the next call or `synchronize` raises an error.

    Args:
        ranks: the ranks, all on one machine.
        timeout: the timeout of every wait.
        buffer_bytes: the size of each rank's buffer, which contains the slots of all ranks.

    Raises:
        ValueError, RuntimeError: as CudaMemoryGroup.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout: timedelta = default_pg_timeout,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self.slot_bytes = max(buffer_bytes // ranks.size // _ALIGNMENT, 1) * _ALIGNMENT
        self.group = CudaMemoryGroup(
            ranks, ranks.size * self.slot_bytes, timeout, "slots of an all-to-all"
        )

    def all_to_all(self, rows: Tensor) -> Tensor:
        """rows [P * n, ...] by destination -> [P * n, ...] by source.

        Raises:
            ValueError: the rows are on another device, or do not divide over the ranks.
            CollectiveError: an earlier call is known to have failed.
        """
        size = self.group.size
        if len(rows) % size:
            raise ValueError(f"the number of rows ({len(rows)}) must be a multiple of {size} ranks")
        rows = self._checked(rows)
        received = torch.empty_like(rows)
        self._exchange(rows, received, None, 1)
        return received

    def all_to_all_v(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """rows [P, C, ...] by destination, counts [P] -> rows [P, C, ...] by source, counts [P].

        Of each block only the first `counts` rows are sent. The other rows are received as zeros.
        The counts stay on the device. If a count is negative or above C, the rank that passed it
        raises CollectiveError in its next call, or in `synchronize`.

        Args:
            counts: int64 [P], on the device of the rows.

        Raises:
            ValueError: an argument has another shape, dtype or device.
            CollectiveError: an earlier call is known to have failed.
        """
        size = self.group.size
        if rows.dim() < 2 or len(rows) != size:
            raise ValueError(f"rows must be [{size}, C, ...], not {list(rows.shape)}")
        if counts.shape != (size,) or counts.dtype != torch.int64 or counts.device != rows.device:
            raise ValueError(
                f"counts must be int64 [{size}] on {rows.device}, not {counts.dtype}"
                f" {list(counts.shape)} on {counts.device}"
            )
        row_bytes = rows.shape[2:].numel() * rows.element_size()
        if not row_bytes or not rows.shape[1]:
            raise ValueError(f"rows of shape {list(rows.shape)} have no bytes to be sent")
        rows = self._checked(rows)
        received = torch.empty_like(rows)
        received_counts = torch.empty_like(counts)
        self._exchange(rows, received, (counts.contiguous(), received_counts), row_bytes)
        return received, received_counts

    def synchronize(self) -> None:
        """Wait, on the host, for the current stream.

        Raises:
            CollectiveError: a call has failed.
        """
        self.group.synchronize()

    def _exchange(
        self,
        rows: Tensor,
        received: Tensor,
        counts: tuple[Tensor, Tensor] | None,
        row_bytes: int,
    ) -> None:
        """Fill `received` and, if there are counts, the received counts."""
        group = self.group
        sent_counts = None
        if counts is not None:
            sent_counts = counts[0]
        everyone = range(group.size)
        block_bytes = rows.nbytes // group.size
        for first in range(0, block_bytes, self.slot_bytes):
            piece = (first, min(self.slot_bytes, block_bytes - first))
            own_slot = group.rank * self.slot_bytes
            group.put(rows, everyone, own_slot, piece, sent_counts, row_bytes)
            group.wait(everyone)
            group.read(received, self.slot_bytes, piece, counts is not None, row_bytes)
            if counts is not None:
                counts[1].copy_(group.received_counts)
            group.barrier()  # all ranks have read, so the next round may write

    def _checked(self, rows: Tensor) -> Tensor:
        device = self.group.buffer.device
        if rows.device != device:
            raise ValueError(
                f"channels through GPU memory need tensors on {device}, not {rows.device}"
            )
        return rows.detach().contiguous()
