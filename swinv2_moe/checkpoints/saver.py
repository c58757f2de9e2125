"""Writing checkpoints while training continues.

1. Rank 0 makes a directory, on which the ranks agree.
2. Each rank copies the tensors that it writes. Tensors that exceed STAGING_BYTES are written at
   once. Training continues.
3. A thread of each rank writes the copies, waits until they are on the disk, and gathers the
   records or the error of every rank.
4. Rank 0 writes meta.json, renames the directory, points `latest` (and `best`) at it and removes
   old checkpoints. If a rank failed, it removes the directory instead. Earlier checkpoints are not
   touched before step 4.
"""

import itertools
import os
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_core import expert_parameters
from moe_core.checkpoint import tensors_by_file, write_tensors
from moe_core.files import fsync_and_hash, publish_directory
from swinv2_moe.checkpoints.checkpoint import Checkpoint, checkpoints_below, order_of
from swinv2_moe.checkpoints.meta import write_meta
from swinv2_moe.errors import UserError
from swinv2_moe.files import replace_link
from swinv2_moe.ranks.parallelize import gather_shards
from swinv2_moe.ranks.world import World

# section -> tensors by parameter name; sections are "" (the model), "ema", "optimizer/exp_avg", ...
Sections = dict[str, dict[str, Tensor]]
_Kind = tuple[torch.Size, torch.dtype]

STAGING_BYTES = 4 << 30  # of host memory per rank, for saving while training continues


class Cost(NamedTuple):
    """The cost of a save on this rank."""

    step: int
    stall: float  # seconds that training waited
    seconds: float  # duration of the whole save
    bytes: int  # written


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


class Saver:
    """Writes the checkpoints of a run into `root`, one at a time.

    A save that fails is reported, and the run continues.

    Args:
        keep_last: checkpoints to keep besides the best (CHECKPOINT.KEEP_LAST).
        source: the checkpoint that the run resumes from, if any. Newer ones in `root` are renamed
            to set-aside-*.
        print_line: prints a line for the user; called from any thread.
        report: called with the cost of each save on this rank.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        keep_last: int,
        source: Checkpoint | None = None,
        print_line: Callable[[str], None] = print,
        report: Callable[[Cost], None] = lambda cost: None,
    ) -> None:
        self.root = root
        self.world = world
        self.keep_last = keep_last
        self.print_line = print_line
        self.report = report
        self.staging = StagingBuffers(STAGING_BYTES)
        # The thread has a process group of its own: collectives of two threads in one group could
        # be matched in different orders on different ranks.
        self.group: dist.ProcessGroup | None = None
        if world.size > 1:
            self.group = dist.new_group(backend="gloo", timeout=world.timeout)
        self.thread: threading.Thread | None = None
        self.error: str | None = None  # of the latest save
        self.previous: Checkpoint | None = None
        if source and source.directory.resolve() in checkpoints_below(root.resolve()):
            self.previous = source
        if world.is_main:
            self._tidy(source)

    @property
    def has_best(self) -> bool:
        """Whether there is a checkpoint `best`. Only rank 0 may rely on it."""
        _, best = self._links()
        return best.exists()

    def save(
        self,
        model: nn.Module,
        sections: Sections,
        meta: dict,
        is_best: bool = False,
    ) -> None:
        """Write `root/step-<meta["step"]>`. Every rank calls this. The tensors may change once it
        has returned.

        Args:
            meta: what `swinv2_moe.checkpoints.meta.describe` returns.

        Raises:
            UserError: on every rank, if weights that should be equal differ between ranks. Nothing
                is written, so that checkpoints from before the difference are kept.
        """
        started = time.perf_counter()
        self.wait()
        self.error = None
        self._check_equal_weights(model, meta["step"])
        temporary = self._begin(meta)
        if temporary is None:
            return
        job = SaveJob(temporary, self.staging)
        for i, (section, tensors) in enumerate(sections.items()):
            # every rank has the whole trunk: the ranks share the work of writing it
            writes_trunk = i % self.world.size == self.world.rank
            tensors = gather_shards(tensors, keep=writes_trunk)
            for file, content in tensors_by_file(model, tensors, writes_trunk):
                job.add(os.path.join(section, file), content)
        self.staging.synchronize()
        stall = time.perf_counter() - started
        arguments = (job, meta, is_best, started, stall)
        # A daemon: if ranks have died, its collective must not keep this process from ending.
        self.thread = threading.Thread(
            target=self._finish, args=arguments, name="checkpoint", daemon=True
        )
        self.thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the current save, if any, is complete or has failed.

        Args:
            seconds: maximum waiting time; None: no limit.
        """
        if self.thread is not None:
            self.thread.join(seconds)

    def close(self) -> None:
        """Wait for the current save. Every rank calls this at the end.

        Raises:
            UserError: the latest save failed, on any rank.
        """
        self.wait()
        errors = [error for error in self.world.gather(self.error) if error]
        if errors:
            raise UserError(f"the last checkpoint was not saved: {errors[0]}")

    def _check_equal_weights(self, model: nn.Module, step: int) -> None:
        experts = expert_parameters(model)
        trunk = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name not in experts and not isinstance(parameter, DTensor)
        }
        difference = self.world.ranks.first_difference(trunk)
        if difference is not None:
            name, rank = difference
            raise UserError(
                f"the checkpoint of step {step} is not saved: {name} of rank {rank} differs from"
                " that of rank 0, though every step updates all ranks equally. Check the memory of"
                " the machines and their versions, and resume from an earlier checkpoint"
                " (--resume auto)"
            )

    # Before a save, on rank 0

    def _begin(self, meta: dict) -> Path | None:
        """The new directory to write to, the same on every rank; None if nothing can be written in
        `root`."""
        temporary: Path | None = None
        if self.world.is_main:
            temporary = self.root / f".{_name(meta)}.tmp"
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            except OSError as error:
                self._failed(meta, str(error))
                temporary = None
        return self.world.agree(temporary)

    def _tidy(self, source: Checkpoint | None) -> None:
        """Remove the leftovers of a killed run, and set aside the checkpoints of steps that this
        run will repeat."""
        for leftover in self.root.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        step = 0
        if source:
            step = source.meta["step"]
        newest = (step, 0)
        if self.previous:
            newest = order_of(self.previous.directory.resolve())
        for path in checkpoints_below(self.root):
            if order_of(path) > newest:
                aside = _free_name(self.root / f"set-aside-{path.name}")
                path.rename(aside)
                self.print_line(f"this run continues from step {step}: {path} is now {aside.name}")
        for link in self._links():
            if link.is_symlink() and not link.exists():
                link.unlink()

    # In the thread

    def _finish(
        self, job: SaveJob, meta: dict, is_best: bool, started: float, stall: float
    ) -> None:
        try:
            files, error = self._gather_records(job.finish())
            if self.world.is_main and error is None:
                self._publish(job.directory, meta, files, is_best)
        except OSError as problem:
            error = str(problem)
        except Exception as problem:  # the run continues after any error
            error = f"{type(problem).__name__}: {problem}"
        if error is None:
            self.report(Cost(meta["step"], stall, time.perf_counter() - started, job.bytes))
            return
        if self.world.is_main:
            shutil.rmtree(job.directory, ignore_errors=True)
        self._failed(meta, error)

    def _gather_records(
        self, result: tuple[dict[str, dict], str | None]
    ) -> tuple[dict[str, dict], str | None]:
        """The records of every rank's files, and the first error."""
        if self.group is None:
            return result
        results: list = [None] * self.world.size
        dist.all_gather_object(results, result, group=self.group)
        files: dict[str, dict] = {}
        errors = []
        for records, error in results:
            files.update(records)
            if error:
                errors.append(error)
        if errors:
            return files, errors[0]
        return files, None

    def _publish(self, temporary: Path, meta: dict, files: dict, is_best: bool) -> None:
        """Complete the directory and give it its name."""
        for name, record in files.items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != record["bytes"]:
                raise OSError(f"{path} is not what a rank wrote; do all nodes share {self.root}?")
        meta = write_meta(temporary, meta | {"files": dict(sorted(files.items()))})
        final = _free_name(self.root / _name(meta))
        publish_directory(temporary, final)
        self.previous = Checkpoint(final, meta)
        try:
            self._point_and_prune(final, is_best)
        except OSError as error:
            self.print_line(
                f"{final.name} is saved, but its links or older checkpoints could not be updated:"
                f" {error}"
            )

    def _point_and_prune(self, newest: Path, is_best: bool) -> None:
        latest, best = self._links()
        replace_link(latest, newest.name)
        if is_best:
            replace_link(best, newest.name)
        used = {os.readlink(link) for link in (latest, best) if link.is_symlink()}
        for old in checkpoints_below(self.root)[self.keep_last :]:
            if old.name not in used:
                # Renamed first: a directory that is partly removed must not look complete.
                leftover = old.with_name(f".{old.name}.old.tmp")
                old.rename(leftover)
                shutil.rmtree(leftover, ignore_errors=True)

    def _links(self) -> tuple[Path, Path]:
        return self.root / "latest", self.root / "best"

    def _failed(self, meta: dict, error: str) -> None:
        self.error = error
        newest = "none"
        if self.previous:
            newest = self.previous.directory.name
        if self.world.is_main:
            self.print_line(
                f"the checkpoint of step {meta['step']} was not saved, the newest is {newest}:"
                f" {error}"
            )


def _name(meta: dict) -> str:
    return f"step-{meta['step']:08d}"


def _free_name(path: Path) -> Path:
    """`path`, or the first of path-1, path-2, ... that does not exist."""
    candidate = path
    for i in itertools.count(1):
        if not candidate.exists():
            break
        candidate = path.with_name(f"{path.name}-{i}")
    return candidate
