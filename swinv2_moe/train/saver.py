"""Writing checkpoints while training goes on.

1. Rank 0 decides where the save goes and which experts it holds anew; the ranks agree on it.
2. Each rank copies what it has to write; what exceeds `SavePolicy.staging_mb` it writes at once.
   Training goes on.
3. In a thread it writes the copies, waits until all is on the disk, and tells the others what it
   wrote, or what failed.
4. Rank 0 writes meta.json, gives the directory its name, points `latest` (and `best`) at it and
   prunes. If anything failed on any rank it removes the directory instead: until step 4 the earlier
   checkpoints are all there is.
"""

import os
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core import moe_layers
from moe_core.checkpoint import expert_file, tensors_by_file, write_tensors
from moe_core.files import fsync, fsync_and_hash
from swinv2_moe.config import CheckpointConfig
from swinv2_moe.errors import UserError
from swinv2_moe.files import publish_directory, replace_link
from swinv2_moe.train.checkpoint import (
    Checkpoint,
    checkpoints_below,
    free_name,
    order_of,
    write_meta,
)
from swinv2_moe.train.distributed import World
from swinv2_moe.train.parallelize import whole_tensors

# "" (the model), "ema", "optimizer/exp_avg", ... -> named like the parameters
Sections = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class SavePolicy:
    """Which checkpoints stay and what a save may hold back. The configuration's CHECKPOINT."""

    keep_last: int = 2  # newest checkpoints that stay, besides `best`
    experts: int = 0  # experts of each layer that a partial save holds anew; 0: all
    staging_mb: int = 4096  # MiB of copies; larger states are written while training waits


def save_policy(config: CheckpointConfig) -> SavePolicy:
    """The policy of a configuration."""
    return SavePolicy(config.keep_last, config.experts, config.staging_mb)


class Plan(NamedTuple):
    """What the ranks agree on before a save."""

    temporary: Path
    only: frozenset[str] | None = None  # the expert files that every section holds anew; None: all
    borrowed: tuple[str, ...] = ()  # the other experts' files, which the checkpoint before has


class Cost(NamedTuple):
    """What a save cost this rank: seconds that training stood still, seconds until it was done,
    bytes written."""

    step: int
    stall: float
    seconds: float
    bytes: int


class Saver:
    """Writes the checkpoints of a run into `root`, one at a time; a failed one is said and costs
    nothing else.

    Args:
        policy: which checkpoints stay and what a save may hold back.
        source: the checkpoint that the run goes on from, if any. Newer ones in `root` are set aside
            (renamed).
        say: tells the user something, from whichever thread.
        report: is told what each save cost this rank.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        policy: SavePolicy,
        source: Checkpoint | None = None,
        say: Callable[[str], None] = print,
        report: Callable[[Cost], None] = lambda cost: None,
    ) -> None:
        self.root, self.world, self.say, self.report = root, world, say, report
        self.policy = policy
        self.staging = Staging(policy.staging_mb * 2**20)
        # The thread's own group: one group used from two threads would match collectives in
        # different orders.
        self.group = (
            dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None
        )
        self.thread: threading.Thread | None = None
        self.error: str | None = None  # of the latest save
        mine = source is not None and source.directory.resolve() in checkpoints_below(
            root.resolve()
        )
        self.previous = source if mine else None
        if world.is_main:
            self._tidy(source)

    def save(
        self,
        model: nn.Module,
        sections: Sections,
        meta: dict,
        is_best: bool = False,
        whole: bool = True,
    ) -> None:
        """Write `root/step-<meta["step"]>`; every rank calls this, and may go on training when it
        returns.

        Args:
            meta: what `swinv2_moe.train.checkpoint.describe` gives.
            whole: False lets it hold `policy.experts` experts of each layer anew, those whose
                copies are oldest; the others are links to the copies in the checkpoint before
                (arXiv 2408.04307, MoC-System, saves in turn).
        """
        started = time.perf_counter()
        self.wait()
        self.error = None
        plan = self._plan(model, list(sections), meta, whole)
        if plan is None:
            return
        job = _Job(plan.temporary, self.staging)
        for i, (section, tensors) in enumerate(sections.items()):
            writes_trunk = i % self.world.size == self.world.rank  # all have it: they take turns
            tensors = whole_tensors(tensors, keep=writes_trunk)
            for file, content in tensors_by_file(model, tensors, writes_trunk, plan.only):
                job.add(_in(section, file), content)
        self.staging.synchronize()
        stall = time.perf_counter() - started
        # A daemon: where ranks have died, its collective must not keep this process from ending.
        arguments = (job, plan, meta, is_best, started, stall)
        self.thread = threading.Thread(
            target=self._finish, args=arguments, name="checkpoint", daemon=True
        )
        self.thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Until the save under way, if any, is on the disk or has failed; at most so many
        seconds."""
        if self.thread is not None:
            self.thread.join(seconds)

    def close(self) -> None:
        """`wait`; every rank calls this at the end.

        Raises:
            UserError: the latest save failed, on whichever rank.
        """
        self.wait()
        error = next(filter(None, self.world.gather(self.error)), None)
        if error:
            raise UserError(f"the last checkpoint was not saved: {error}")

    # Before a save, on rank 0

    def _plan(
        self, model: nn.Module, sections: Collection[str], meta: dict, whole: bool
    ) -> Plan | None:
        """None if nothing can be written in `root`."""
        plan = None
        if self.world.is_main:
            temporary = self.root / f".{_name(meta)}.tmp"
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                plan = Plan(temporary, *(() if whole else self._oldest_experts(model, sections)))
            except OSError as error:
                self._failed(meta, str(error))
        return self.world.agree(plan)

    def _oldest_experts(self, model: nn.Module, sections: Collection[str]) -> tuple:
        """`only` and `borrowed` of the plan: the turn of `policy.experts` experts of each layer;
        () where the checkpoint before cannot lend the others."""
        if not self.policy.experts or self.previous is None or not self.previous.directory.is_dir():
            return ()
        meta, layers, only, others = self.previous.meta, moe_layers(model), set(), []
        for i, (name, layer) in enumerate(layers.items()):
            number, steps = layer.config.num_experts, meta["experts"].get(name, [])
            if len(steps) != number:
                return ()
            # Layers begin their turns at different experts, so that the ranks have equally much to
            # write.
            turns = [
                (steps[e], (e - i * number // len(layers)) % number, expert_file(name, e))
                for e in range(number)
            ]
            files = [file for *_, file in sorted(turns)]
            only.update(files[: self.policy.experts])
            others += files[self.policy.experts :]
        borrowed = tuple(_in(section, file) for section in sections for file in others)
        if all(file in meta["files"] for file in borrowed):
            return (frozenset(only), borrowed)
        return ()

    def _tidy(self, source: Checkpoint | None) -> None:
        """Remove what a killed run left, and set aside the checkpoints of steps that are about to
        be done again."""
        for leftover in self.root.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        step = 0
        if source:
            step = source.meta["step"]
        mine = order_of(self.previous.directory.resolve()) if self.previous else (step, 0)
        for path in checkpoints_below(self.root):
            if order_of(path) > mine:
                aside = free_name(self.root / f"set-aside-{path.name}")
                path.rename(aside)
                self.say(f"this run goes on from step {step}: {path} is now {aside.name}")
        for link in (self.root / "latest", self.root / "best"):
            if link.is_symlink() and not link.exists():
                link.unlink()

    # In the thread

    def _finish(
        self, job: "_Job", plan: Plan, meta: dict, is_best: bool, started: float, stall: float
    ) -> None:
        try:
            files, error = job.finish()
            if self.group is not None:
                everyone: list = [None] * self.world.size
                dist.all_gather_object(everyone, (files, error), group=self.group)
                files = {name: record for part, _ in everyone for name, record in part.items()}
                error = next((problem for _, problem in everyone if problem), None)
            if self.world.is_main and error is None:
                self._publish(plan, meta, files, is_best)
        except Exception as problem:  # whatever it is, the run goes on
            error = (
                str(problem)
                if isinstance(problem, OSError)
                else f"{type(problem).__name__}: {problem}"
            )
        if error is None:
            self.report(Cost(meta["step"], stall, time.perf_counter() - started, job.bytes))
            return
        if self.world.is_main:
            shutil.rmtree(plan.temporary, ignore_errors=True)
        self._failed(meta, error)

    def _publish(self, plan: Plan, meta: dict, files: dict, is_best: bool) -> None:
        for name, record in files.items():
            path = plan.temporary / name
            if not path.is_file() or path.stat().st_size != record["bytes"]:
                raise OSError(f"{path} is not what a rank wrote; do all nodes share {self.root}?")
        if plan.only is not None:
            meta = meta | {"experts": self._borrow(plan, meta, files)}
        meta = write_meta(plan.temporary, meta | {"files": dict(sorted(files.items()))})
        final = free_name(self.root / _name(meta))
        publish_directory(plan.temporary, final)
        self.previous = Checkpoint(final, meta)
        try:
            self._point_and_prune(final, is_best)
        except OSError as error:
            self.say(
                f"{final.name} is saved, but what lies beside it could not be put in order: {error}"
            )

    def _point_and_prune(self, newest: Path, is_best: bool) -> None:
        replace_link(self.root / "latest", newest.name)
        if is_best:
            replace_link(self.root / "best", newest.name)
        used = {
            os.readlink(link)
            for link in (self.root / "latest", self.root / "best")
            if link.is_symlink()
        }
        for old in checkpoints_below(self.root)[self.policy.keep_last :]:
            if old.name not in used:
                leftover = old.with_name(f".{old.name}.old.tmp")
                old.rename(leftover)  # first: a name that it keeps must not stand for a half of it
                shutil.rmtree(leftover, ignore_errors=True)

    def _borrow(self, plan: Plan, meta: dict, files: dict) -> dict[str, list[int]]:
        """Link the experts that were not written to their copies in the checkpoint before; the step
        of each copy."""
        before = self.previous
        for name in plan.borrowed:
            (plan.temporary / name).parent.mkdir(parents=True, exist_ok=True)
            _link(before.directory / name, plan.temporary / name)
            files[name] = before.meta["files"][name]
        return {
            layer: [
                meta["step"] if expert_file(layer, e) in plan.only else step
                for e, step in enumerate(steps)
            ]
            for layer, steps in before.meta["experts"].items()
        }

    def _failed(self, meta: dict, error: str) -> None:
        self.error = error
        newest = "none"
        if self.previous:
            newest = self.previous.directory.name
        if self.world.is_main:
            self.say(
                f"the checkpoint of step {meta['step']} was not saved, the newest is {newest}:"
                f" {error}"
            )


class Staging:
    """Memory for copies, at most `limit` bytes, kept from save to save: fresh pages cost more than
    the copying."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0
        self.free: dict[tuple, list[Tensor]] = defaultdict(list)
        self.on_gpu = False

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Copies on the CPU, valid after `synchronize`; None if they do not fit."""
        kinds = Counter(map(_kind, tensors.values()))
        fresh = sum(
            max(0, n - len(self.free[k])) * k[0].numel() * k[1].itemsize for k, n in kinds.items()
        )
        if self.taken + fresh > self.limit:
            return None
        copies = {}
        for name, tensor in tensors.items():
            free = self.free[_kind(tensor)]
            if not free:
                free.append(
                    torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                )
                self.taken += tensor.nbytes
            copies[name] = free.pop().copy_(tensor.detach(), non_blocking=True)
            self.on_gpu |= tensor.is_cuda
        return copies

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def give_back(self, copies: dict[str, Tensor]) -> None:
        for tensor in copies.values():
            self.free[_kind(tensor)].append(tensor)


class _Job:
    """What one rank has to write of one checkpoint."""

    def __init__(self, directory: Path, staging: Staging) -> None:
        self.directory, self.staging = directory, staging
        self.staged: dict[str, dict[str, Tensor]] = {}
        self.written: list[str] = []
        self.bytes, self.error = 0, None

    def add(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors, or write them if there is no room; an error waits for `finish`, since
        the ranks' other files may need each other."""
        copies = None
        if self.error is None:
            copies = self.staging.copy(tensors)
        if copies is not None:
            self.staged[file] = copies
        elif self.error is None:
            try:
                write_tensors(self.directory / file, tensors)
                self.written.append(file)
            except OSError as error:
                self.error = str(error)

    def finish(self) -> tuple[dict[str, dict], str | None]:
        """Write the copies and wait for the disk; the record of each file, and what went wrong."""
        records, files = {}, [*self.staged, *self.written] if self.error is None else []
        try:
            with ThreadPoolExecutor(
                2, "checkpoint"
            ) as pool:  # while one waits for the disk, the other computes a checksum
                records = dict(zip(files, pool.map(self._finish_file, files), strict=True))
        except OSError as error:
            self.error = str(error)
        finally:
            for copies in self.staged.values():
                self.staging.give_back(copies)
        self.bytes = sum(record["bytes"] for record in records.values())
        return records, self.error

    def _finish_file(self, file: str) -> dict:
        if file in self.staged:
            write_tensors(self.directory / file, self.staged[file])
        return fsync_and_hash(self.directory / file)


def _name(meta: dict) -> str:
    return f"step-{meta['step']:08d}"


def _in(section: str, file: str) -> str:
    if section:
        return f"{section}/{file}"
    return file


def _kind(tensor: Tensor) -> tuple:
    return (tensor.shape, tensor.dtype)


def _link(source: Path, target: Path) -> None:
    """A second name for a file, or a copy where the file system has only one name for each."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
        fsync(target)
