"""Copy shards to the disks of one or more nodes. Every file's checksum is compared with index.json.

With several nodes, one node reads a file from the source and sends it to the others.
"""

import hashlib
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moe_core.files import open_regular, read_chunks, remove_leftovers, sha256
from swinv2_moe.data.shards import (
    INDEX,
    MAX_INDEX_BYTES,
    SPLITS,
    ShardFile,
    files_of,
    read_index,
)
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import make_directory, new_file, read_bounded, read_json, write_json
from swinv2_moe.locks import lock
from swinv2_moe.tables import TransferBar

if TYPE_CHECKING:  # it imports torch
    from swinv2_moe.data.prepare.shard_exchange import ShardExchange

_RECORD = "staging.json"
_MAX_RECORD_BYTES = 4096
_ARRIVING_INDEX = "arriving.json"  # index.json of shards that are not complete yet
_CHUNK = 4 << 20  # bytes per read


class Staged(NamedTuple):
    """The result of staging on this node. TARGET/staging.json has the first four fields."""

    started: float  # unix seconds
    seconds: float
    bytes: int  # bytes copied to this node by this call
    # the part of `bytes` that was read from the source; the rest came from other nodes
    source_bytes: int
    shards: int  # total number
    kept: int  # number of files that existed before


class Staging(NamedTuple):
    """What staging.json says: when the data were copied to this disk."""

    started: float  # seconds since 1970
    seconds: float
    bytes: int

    @property
    def rate(self) -> float | None:
        """Bytes/s; None if the duration was measured as zero."""
        return self.bytes / self.seconds if self.seconds else None


def read_staging(data_path: str) -> Staging | None:
    """The record of staging in the data's directory; None if there is none, or if a training read
    the data meanwhile, as in earlier versions.

    Raises:
        UserError: the record cannot be read.
    """
    if not data_path:
        return None
    path = Path(data_path).expanduser() / _RECORD
    try:
        content = read_json(path, _MAX_RECORD_BYTES)
        staging = Staging(
            float(content["started"]), float(content["seconds"]), int(content["bytes"])
        )
        if not all(math.isfinite(number) and number >= 0 for number in staging):
            raise ValueError(short(content))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} is not what `swinv2-moe stage` writes ({type(error).__name__}: {error})"
        ) from error
    return None if content.get("overlapped") else staging


def stage(
    source: str,
    target: str,
    workers: int = 4,
    trust: bool = False,
    exchange: "ShardExchange | None" = None,
) -> Staged:
    """Copy the finished shards in `source` to the directory `target`, or continue an interrupted
    call. `target` is locked meanwhile.

    index.json is written last: without it, `target` is not accepted as shards.

    Args:
        workers: number of threads; reading, hashing and writing release the interpreter's lock.
        trust: keep existing files of the right size without comparing their checksums.
        exchange: the connection to the other nodes that stage the same shards at the same time.
            Each node calls this function.

    Raises:
        UserError: the shards are unfinished or damaged, `target` has other shards, or the disk has
            too little space. An error on one node is raised on all.
    """
    started, clock = time.time(), time.monotonic()
    with ExitStack() as stack:
        stager = _Stager(source, target, workers, exchange)
        stager.on_each_node(partial(stager.open, stack, trust))
        stager.compare_nodes()
        kept = len(stager.existing[stager.node])
        with TransferBar("stage", sum(map(stager.missing_bytes, stager.files)), "bytes") as bar:
            stager.copy(bar)
        seconds = time.monotonic() - clock
        stager.on_each_node(partial(stager.finish, started, seconds))
    num_shards = sum(file.name.endswith(".tar") for file in stager.files)
    return Staged(started, seconds, stager.bytes, stager.source_bytes, num_shards, kept)


class _Stager:
    """The work of `stage`. All nodes call the same methods, and raise the same errors."""

    def __init__(
        self, source: str, target: str, workers: int, exchange: "ShardExchange | None"
    ) -> None:
        self.source = source
        self.target = target
        self.workers = workers
        self.exchange = exchange
        self.node = exchange.node if exchange else 0
        self.files: list[ShardFile] = []  # the same on all nodes; small files come first
        self.index = b""
        self.existing: list[set[str]] = []  # names of the files that each node has
        self.bytes = 0  # received
        self.source_bytes = 0  # those of them that were read from the source
        self.ended = threading.Event()  # an error ends the threads
        self._lock = threading.Lock()  # protects the counters
        self._bar: TransferBar | None = None

    def on_each_node(self, work: Callable[[], None]) -> None:
        """Call `work` on all nodes. If it raises on one node, all nodes raise the same error."""
        problem = None
        try:
            work()
        except UserError as error:
            problem = error
        if self.exchange is not None:
            self.exchange.agree(problem)
        elif problem is not None:
            raise problem

    def open(self, stack: ExitStack, trust: bool) -> None:
        """Check the source and the target, lock the target, and find the files that it has."""
        index = read_index(self.source, "SHARDS")
        self.index = _read(os.path.join(self.source, INDEX))
        self.files = files_of(index)
        for split in SPLITS:
            make_directory(os.path.join(self.target, split))
        if os.path.samefile(self.source, self.target):
            raise UserError(
                f"LOCAL is {self.target!r}: that is SHARDS itself; take another directory"
            )
        stack.enter_context(lock(self.target))
        has_index = False
        for name in (INDEX, _ARRIVING_INDEX):
            existing = os.path.join(self.target, name)
            if not os.path.exists(existing):
                continue
            has_index = True
            if _read(existing) != self.index:
                raise UserError(
                    f"LOCAL is {self.target!r}: it holds other shards than {self.source!r}; remove"
                    " it, or take another directory"
                )
        remove_leftovers(self.target)
        self.existing = [self._find_existing(trust)]
        self._check_space()
        if not has_index:
            with new_file(os.path.join(self.target, _ARRIVING_INDEX)) as file:
                file.write(self.index)

    def _find_existing(self, trust: bool) -> set[str]:
        """The names of the files in `target` that need not be copied."""
        candidates = [file for file in self.files if self._has_size(file)]
        if trust:
            return {file.name for file in candidates}
        with ThreadPoolExecutor(self.workers) as pool:
            intact = list(pool.map(self._is_intact, candidates))
        return {file.name for file, is_intact in zip(candidates, intact, strict=True) if is_intact}

    def _has_size(self, file: ShardFile) -> bool:
        path = os.path.join(self.target, file.name)
        return os.path.exists(path) and os.path.getsize(path) == file.bytes

    def _is_intact(self, file: ShardFile) -> bool:
        path = os.path.join(self.target, file.name)
        try:
            with open_regular(path) as opened:
                return sha256(read_chunks(opened, _CHUNK)) == file.sha256
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error

    def _check_space(self) -> None:
        needed = sum(file.bytes for file in self.files if not self._has_size(file))
        free = shutil.disk_usage(self.target).free
        if needed > free:
            raise UserError(
                f"LOCAL is {self.target!r}: {needed / 1e6:,.0f} MB are needed there,"
                f" {free / 1e6:,.0f} MB are free"
            )

    def compare_nodes(self) -> None:
        """Find out which files the other nodes have.

        Raises:
            UserError: a node sees other shards.
        """
        if self.exchange is None:
            return
        digest = hashlib.sha256(self.index).hexdigest()
        by_node = self.exchange.gather((digest, self.existing[0]))
        for node, (other_digest, _) in enumerate(by_node):
            if other_digest != by_node[0][0]:
                raise UserError(
                    f"SHARDS is {self.source!r}: node {node} sees other shards there than node 0"
                )
        self.existing = [existing for _, existing in by_node]

    def missing_bytes(self, file: ShardFile) -> int:
        """Its size if this node lacks the file, otherwise 0."""
        return 0 if file.name in self.existing[self.node] else file.bytes

    def copy(self, bar: TransferBar) -> None:
        """Copy the files that any node lacks."""
        self._bar = bar
        owners = self._owners()
        here = self.existing[self.node]
        own = [file for file, owner in owners.items() if owner == self.node]
        pool = ThreadPoolExecutor(self.workers)
        futures: dict[str, Future] = {
            file.name: pool.submit(self._copy, file) for file in own if file.name not in here
        }

        def wait_for(file: ShardFile) -> None:
            if file.name in futures:  # otherwise it was there before
                futures[file.name].result()

        try:
            if self.exchange is None:
                for file in own:
                    wait_for(file)
            else:
                lacking = {file.name for file in self.files if file.name not in here}
                self.exchange.send(owners, lacking, self.target, wait_for, self._count)
        finally:
            self.ended.set()
            pool.shutdown(cancel_futures=True)

    def _owners(self) -> dict[ShardFile, int]:
        """The node that sends each file. Files that every node has are omitted.

        If nodes have the file, one of them sends it. Among the candidates, the node with the fewest
        bytes to send is chosen.
        """
        nodes: Sequence[int] = range(len(self.existing))
        sent = [0] * len(nodes)
        owners = {}
        for file in self.files:
            having = [node for node in nodes if file.name in self.existing[node]]
            if len(having) == len(nodes):
                continue
            owner = min(having or nodes, key=sent.__getitem__)
            sent[owner] += file.bytes
            owners[file] = owner
        return owners

    def _copy(self, file: ShardFile) -> None:
        source = os.path.join(self.source, file.name)
        with new_file(os.path.join(self.target, file.name)) as copy:
            for chunk in self._chunks(source):
                copy.write(chunk)
                if copy.bytes > file.bytes:
                    break
            if (copy.bytes, copy.sha256) != (file.bytes, file.sha256):
                raise UserError(
                    f"{source}: is damaged: its size or checksum is not the one that index.json"
                    " records"
                )

    def _chunks(self, path: str) -> Iterator[memoryview]:
        try:
            with open_regular(path) as file:
                for chunk in read_chunks(file, _CHUNK):
                    yield chunk
                    self._count(len(chunk), from_source=True)
                    if self.ended.is_set():
                        raise UserError(f"{path}: another file could not be copied")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error

    def _count(self, size: int, from_source: bool = False) -> None:
        """Count received bytes. Several threads call this."""
        with self._lock:
            self.bytes += size
            self.source_bytes += size * from_source
            assert self._bar is not None
            self._bar.show(0, self.bytes)

    def finish(self, started: float, seconds: float) -> None:
        """Record the times, and make `target` valid shards."""
        record = os.path.join(self.target, _RECORD)
        if self.bytes or not os.path.exists(record):
            content = {"started": started, "seconds": seconds, "bytes": self.bytes}
            write_json(record, content | {"source_bytes": self.source_bytes})
        arriving = os.path.join(self.target, _ARRIVING_INDEX)
        if os.path.exists(arriving):
            os.replace(arriving, os.path.join(self.target, INDEX))


def _read(path: str) -> bytes:
    try:
        return read_bounded(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
