"""Switch channel: sums and copies in the switch between the GPUs of one machine (NVLink SHARP).

A store to a multicast address reaches the memory of all ranks, and a load from it returns their
sum. The kernels are torch's (`torch.ops.symm_mem.multimem_*`).
"""

# P ranks

import torch
from torch import Tensor

from moe_core.comm.gpu_memory import share_gpu_memory
from moe_core.ranks import Ranks

_ALIGNMENT = 16  # bytes of the longest multimem access
_SUM_DTYPES = (torch.float32, torch.bfloat16)


class SwitchChannel:
    """All-reduce and all-gather through a multicast address, on the current stream.

    All ranks must make each call with the same shape. torch's kernels wait for other ranks without
    a timeout. Only memory channels report a rank that has ended.

    Args:
        ranks: the ranks, all on one machine, each on its current CUDA device.
        buffer_bytes: the size of each rank's buffer, which limits the size of a result.

    Raises:
        ValueError: the ranks are on several machines, or have different arguments.
        RuntimeError: there is no CUDA device, no symmetric memory or no multicast address.
        All of them are raised on every rank.
    """

    def __init__(self, ranks: Ranks, buffer_bytes: int) -> None:
        self.ranks = ranks
        self.buffer_bytes = -(-buffer_bytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = share_gpu_memory(ranks, self.buffer_bytes, "buffers of a switch channel")
        problem = ""
        if not self._memory.multicast:
            problem = device_name(self._memory.local)
        problems = ranks.gather_objects(problem, "comparison of multicast addresses")
        for rank, name in enumerate(problems):
            if name:
                raise RuntimeError(
                    f"a switch channel needs a multicast address, and rank {rank} of {ranks.size}"
                    f" ({name}) has none: it takes GPUs behind one NVLink switch (NVLS)"
                )
        assert ranks.process_group is not None, "one rank shares nothing"
        self._group_name = ranks.process_group.group_name

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of the ranks' `values`, of any shape, in the order of the switch.

        Raises:
            ValueError: the dtype is neither fp32 nor bf16; the number of bytes is not a multiple of
                16 or exceeds the buffer; the device is another one.
        """
        if values.dtype not in _SUM_DTYPES:
            raise ValueError(f"a switch channel adds float32 and bfloat16, not {values.dtype}")
        shared = self._view(values.dtype, values.shape, values.device)
        shared.copy_(values.detach())
        return torch.ops.symm_mem.multimem_one_shot_all_reduce(shared, "sum", self._group_name)

    def all_gather(self, rows: Tensor) -> Tensor:
        """rows [n, ...] of each rank -> [P * n, ...] on every rank.

        Raises:
            ValueError: the number of bytes is not a multiple of 16; the result exceeds the buffer;
                the device is another one.
        """
        rows = rows.detach().contiguous()
        if rows.nbytes % _ALIGNMENT:
            raise ValueError(f"rows of {rows.nbytes} bytes are no multiple of {_ALIGNMENT}")
        shape = (self.ranks.size * len(rows), *rows.shape[1:])
        gathered = self._view(rows.dtype, shape, rows.device)
        torch.ops.symm_mem.multimem_all_gather_out(rows, self._group_name, gathered)
        return gathered.clone()  # the next call overwrites the buffer

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The start of the buffer as a tensor of this shape."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes > self.buffer_bytes or num_bytes % _ALIGNMENT:
            raise ValueError(
                f"a tensor of {num_bytes} bytes does not fit a switch channel: it must be a"
                f" multiple of {_ALIGNMENT} bytes, and at most buffer_bytes ({self.buffer_bytes})"
            )
        if device != self._memory.local.device:
            raise ValueError(
                f"a switch channel needs tensors on {self._memory.local.device}, not {device}"
            )
        return self._memory.local[:num_bytes].view(dtype).view(shape)


def device_name(tensor: Tensor) -> str:
    """The name of a tensor's GPU."""
    if tensor.is_cuda:
        return torch.cuda.get_device_name(tensor.device)
    return str(tensor.device)
