"""The files that one rank writes of a checkpoint: copies of tensors, and a thread that writes
them."""

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from moe_core.checkpoint import write_tensors
from moe_core.files import fsync_and_hash

_Kind = tuple[torch.Size, torch.dtype]


class StagingBuffers:
    """Memory for copies of tensors, at most `limit` bytes.

    Buffers are kept from save to save: allocating new pages takes longer than copying.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocated = 0  # bytes
        self.free: dict[_Kind, list[Tensor]] = defaultdict(list)
        self.on_gpu = False

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Copies on the CPU, valid after `synchronize`; None if they do not fit."""
        if self.allocated + self._missing_bytes(tensors) > self.limit:
            return None
        copies = {}
        for name, tensor in tensors.items():
            buffer = self._take(tensor)
            copies[name] = buffer.copy_(tensor.detach(), non_blocking=True)
            self.on_gpu |= tensor.is_cuda
        return copies

    def synchronize(self) -> None:
        """Wait for copies from a GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def give_back(self, copies: dict[str, Tensor]) -> None:
        """Return the buffers of `copies`, which are no longer needed."""
        for tensor in copies.values():
            self.free[_kind(tensor)].append(tensor)

    def _missing_bytes(self, tensors: dict[str, Tensor]) -> int:
        """Bytes of the buffers that copies of the tensors need beyond the free ones."""
        missing = 0
        for kind, count in Counter(map(_kind, tensors.values())).items():
            shape, dtype = kind
            num_new = max(0, count - len(self.free[kind]))
            missing += num_new * shape.numel() * dtype.itemsize
        return missing

    def _take(self, tensor: Tensor) -> Tensor:
        """A free buffer for a copy of the tensor, or a new one."""
        free = self.free[_kind(tensor)]
        if free:
            return free.pop()
        self.allocated += tensor.nbytes
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class SaveJob:
    """The files of one checkpoint that this rank writes below `directory`."""

    def __init__(self, directory: Path, staging: StagingBuffers) -> None:
        self.directory = directory
        self.staging = staging
        self.staged: dict[str, dict[str, Tensor]] = {}  # by file: copies to write
        self.written: list[str] = []
        self.bytes = 0
        self.error: str | None = None

    def add(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors, or write them at once if there is no memory for copies.

        An error is kept for `finish`: the other ranks may wait for this one to add its next file.
        """
        if self.error is not None:
            return
        copies = self.staging.copy(tensors)
        if copies is not None:
            self.staged[file] = copies
            return
        try:
            write_tensors(self.directory / file, tensors)
            self.written.append(file)
        except OSError as error:
            self.error = str(error)

    def finish(self) -> tuple[dict[str, dict], str | None]:
        """Write the copies and wait until every file is on the disk.

        Returns:
            The size and checksum of each file, and the error, if any.
        """
        records = {}
        try:
            if self.error is None:
                records = self._finish_files()
        except OSError as error:
            self.error = str(error)
        finally:
            for copies in self.staged.values():
                self.staging.give_back(copies)
        self.bytes = sum(record["bytes"] for record in records.values())
        return records, self.error

    def _finish_files(self) -> dict[str, dict]:
        files = list(self.staged) + self.written
        # Two threads: one waits for the disk while the other computes a checksum.
        with ThreadPoolExecutor(2, "checkpoint") as pool:
            records = pool.map(self._finish_file, files)
            return dict(zip(files, records, strict=True))

    def _finish_file(self, file: str) -> dict:
        if file in self.staged:
            write_tensors(self.directory / file, self.staged[file])
        return fsync_and_hash(self.directory / file)


def _kind(tensor: Tensor) -> _Kind:
    return tensor.shape, tensor.dtype
