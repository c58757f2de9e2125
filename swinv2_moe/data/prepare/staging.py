"""Copy shards to the disks of one or more nodes. Every file's checksum is compared with index.json.

With several nodes, one node reads a file from the source and sends it to the others.
"""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from moe_core.files import open_regular, read_chunks, remove_leftovers, sha256
from swinv2_moe.data.shards import (
    ARRIVING_INDEX,
    INDEX,
    MAX_INDEX_BYTES,
    SPLITS,
    ShardFile,
    StagingStopped,
    files_of,
    read_index,
)
from swinv2_moe.errors import UserError
from swinv2_moe.files import make_directory, new_file, read_bounded, write_json
from swinv2_moe.locks import lock
from swinv2_moe.tables import TransferBar

if TYPE_CHECKING:  # it imports torch
    from swinv2_moe.data.prepare.shard_exchange import ShardExchange

_CHUNK = 4 << 20  # bytes per read


class Staged(NamedTuple):
    """The result of staging on this node. TARGET/staging.json has the first four fields, and
    whether training read the files during staging."""

    started: float  # unix seconds
    seconds: float
    bytes: int  # bytes copied to this node by this call
    # the part of `bytes` that was read from the source; the rest came from other nodes
    source_bytes: int
    shards: int  # total number
    kept: int  # number of files that existed before


def stage(
    source: str,
    target: str,
    workers: int = 4,
    trust: bool = False,
    exchange: "ShardExchange | None" = None,
) -> Staged:
    """Copy the finished shards in `source` to the directory `target`, or continue an interrupted
    call.

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
    with Stager(source, target, workers, trust, exchange) as stager:
        with TransferBar("stage", stager.missing_bytes(), "bytes") as bar:
            stager.bar = bar
            stager.copy(stager.files)
        return stager.finish()


class Stager:
    """Copies shards to a directory of this node, which is locked until `finish` or the end of the
    `with` block.

    All nodes call the same methods with the same arguments, and raise the same errors.

    Args: see `stage`.
    """

    def __init__(
        self,
        source: str,
        target: str,
        workers: int = 4,
        trust: bool = False,
        exchange: "ShardExchange | None" = None,
    ) -> None:
        self.source = source
        self.target = target
        self.workers = workers
        self.trust = trust
        self.exchange = exchange
        self.bar: TransferBar | None = None
        self.stopped = threading.Event()  # set by another thread; `copy` then raises StagingStopped
        self.files: list[ShardFile] = []  # the same on all nodes; small files come first
        self._index = b""
        self._existing: list[set[str]] = []  # names of the files that each node has
        self._kept = 0  # files that this node had at the start
        self._sent: list[int] = []  # bytes that each node has been assigned to send
        self._lock = threading.Lock()  # protects the counters
        self._bytes = 0
        self._source_bytes = 0

    def __enter__(self) -> "Stager":
        """Check the source and the target, and find the files that the nodes have.

        Raises:
            UserError: see `stage`; also if nodes see different shards.
        """
        self._started = time.time()
        self._clock = time.monotonic()
        with ExitStack() as stack:
            self._on_each_node(partial(self._open, stack))
            self._compare_nodes()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def missing_bytes(self) -> int:
        """Bytes of the files that this node lacks."""
        return sum(file.bytes for file in self.files if self._is_missing(file))

    def copy(self, files: Sequence[ShardFile]) -> None:
        """Copy the files that any node lacks, in the given order.

        Raises:
            UserError: see `stage`.
            StagingStopped: `stopped` was set on a node.
        """
        owners = self._owners(files)
        files_of_node = []
        for file, owner in owners.items():
            if owner == self._node and self._is_missing(file):
                files_of_node.append(file)
        with _Reading(self, files_of_node) as reading:
            if self.exchange is None:
                for file in files_of_node:
                    reading.wait(file)
            else:
                lacking = {file.name for file in files if self._is_missing(file)}
                self.exchange.send(owners, lacking, self.target, reading.wait, self.count)
        for existing in self._existing:
            existing.update(file.name for file in files)

    def finish(self, overlapped: bool = False) -> Staged:
        """Write index.json, which makes `target` valid shards, unlock `target`, and return the
        result. All files must have been copied.

        Args:
            overlapped: whether training read the files during staging.
        """
        seconds = time.monotonic() - self._clock
        self._on_each_node(partial(self._write_record, seconds, overlapped))
        self._stack.close()  # other trainings on this node may use the directory now
        num_shards = sum(file.name.endswith(".tar") for file in self.files)
        return Staged(
            self._started,
            seconds,
            self._bytes,
            self._source_bytes,
            num_shards,
            self._kept,
        )

    def count(self, size: int, from_source: bool = False) -> None:
        """Count received bytes. Several threads call this."""
        with self._lock:
            self._bytes += size
            if from_source:
                self._source_bytes += size
            if self.bar is not None:
                self.bar.show(0, self._bytes)

    @property
    def _node(self) -> int:
        if self.exchange is None:
            return 0
        return self.exchange.node

    def _on_each_node(self, work: Callable[[], None]) -> None:
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

    def _open(self, stack: ExitStack) -> None:
        index = read_index(self.source, "SHARDS")
        self._index = _read(os.path.join(self.source, INDEX))
        self.files = files_of(index)
        for split in SPLITS:
            make_directory(os.path.join(self.target, split))
        if os.path.samefile(self.source, self.target):
            raise UserError(
                f"LOCAL (DATA.STAGE) is {self.target!r}: that is SHARDS itself; take another"
                " directory"
            )
        stack.enter_context(lock(self.target))
        has_index = False
        for name in (INDEX, ARRIVING_INDEX):
            existing = os.path.join(self.target, name)
            if not os.path.exists(existing):
                continue
            has_index = True
            if _read(existing) != self._index:
                raise UserError(
                    f"LOCAL (DATA.STAGE) is {self.target!r}: it holds other shards than"
                    f" {self.source!r}; remove it, or take another directory"
                )
        remove_leftovers(self.target)
        self._existing = [self._find_existing()]
        self._kept = len(self._existing[0])
        self._check_space()
        if not has_index:
            with new_file(os.path.join(self.target, ARRIVING_INDEX)) as file:
                file.write(self._index)

    def _find_existing(self) -> set[str]:
        """The names of the files in `target` that need not be copied."""
        candidates = [file for file in self.files if self._has_size(file)]
        intact = [True] * len(candidates)
        if not self.trust:
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
                f"LOCAL (DATA.STAGE) is {self.target!r}: {needed / 1e6:,.0f} MB are needed there,"
                f" {free / 1e6:,.0f} MB are free"
            )

    def _compare_nodes(self) -> None:
        """Find out which files the other nodes have.

        Raises:
            UserError: a node sees other shards.
        """
        self._sent = [0]
        if self.exchange is None:
            return
        digest = hashlib.sha256(self._index).hexdigest()
        by_node = self.exchange.gather((digest, self._existing[0]))
        self._existing = []
        for node, (other_digest, existing) in enumerate(by_node):
            if other_digest != by_node[0][0]:
                raise UserError(
                    f"SHARDS (DATA.PATH) is {self.source!r}: node {node} sees other shards there"
                    " than node 0"
                )
            self._existing.append(existing)
        self._sent = [0] * len(by_node)

    def _is_missing(self, file: ShardFile) -> bool:
        return file.name not in self._existing[self._node]

    def _owners(self, files: Sequence[ShardFile]) -> dict[ShardFile, int]:
        """The node that sends each file. Files that every node has are omitted.

        If nodes have the file, one of them sends it. Among the candidates, the node with the fewest
        bytes to send is chosen.
        """
        nodes = range(len(self._existing))
        owners = {}
        for file in files:
            having = [node for node in nodes if file.name in self._existing[node]]
            if len(having) == len(nodes):
                continue
            owner = min(having or nodes, key=self._sent.__getitem__)
            self._sent[owner] += file.bytes
            owners[file] = owner
        return owners

    def _write_record(self, seconds: float, overlapped: bool) -> None:
        record = os.path.join(self.target, "staging.json")
        if self._bytes or not os.path.exists(record):
            content = {
                "started": self._started,
                "seconds": seconds,
                "bytes": self._bytes,
                "source_bytes": self._source_bytes,
                "overlapped": overlapped,
            }
            write_json(record, content)
        arriving = os.path.join(self.target, ARRIVING_INDEX)
        if os.path.exists(arriving):
            os.replace(arriving, os.path.join(self.target, INDEX))


class _Reading:
    """Threads that copy files from the source, in order. The context ends them.

    The first error ends all threads.
    """

    def __init__(self, stager: Stager, files: Sequence[ShardFile]) -> None:
        self.stager = stager
        self.problem: UserError | None = None
        self.ended = threading.Event()
        self.pool = ThreadPoolExecutor(stager.workers)
        self.futures: dict[str, Future] = {}
        for file in files:
            self.futures[file.name] = self.pool.submit(self._copy, file)

    def __enter__(self) -> "_Reading":
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.pool.shutdown(cancel_futures=True)

    def wait(self, file: ShardFile) -> None:
        """Wait until this node has a file that it owns.

        Raises:
            UserError: this or another file could not be copied.
        """
        future = self.futures.get(file.name)
        if future is None:  # the file existed before
            return
        wait([future])
        if self.problem is not None:
            raise self.problem
        future.result()

    def _copy(self, file: ShardFile) -> None:
        try:
            self._copy_checked(file)
        except UserError as error:
            if self.problem is None:
                self.problem = error
            self.ended.set()
            raise

    def _copy_checked(self, file: ShardFile) -> None:
        source = os.path.join(self.stager.source, file.name)
        with new_file(os.path.join(self.stager.target, file.name)) as copy:
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
                    self.stager.count(len(chunk), from_source=True)
                    if self.ended.is_set() or self.stager.stopped.is_set():
                        raise StagingStopped("stopped")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _read(path: str) -> bytes:
    try:
        return read_bounded(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
