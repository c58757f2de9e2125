"""Copying shards to a local disk. Every checksum is compared with that in index.json."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple

from moe_core.files import open_regular, read_chunks, sha256
from swinv2_moe.data.prepare.transfer_bar import TransferBar
from swinv2_moe.data.shards import MAX_INDEX_BYTES, SPLITS, read_index
from swinv2_moe.errors import UserError
from swinv2_moe.files import make_directory, new_file, only_process, read_bounded, write_json

_CHUNK = 4 << 20  # bytes at a time


class Staged(NamedTuple):
    """The result of staging. TARGET/staging.json has the first three, for a run's event log."""

    started: float  # unix seconds
    seconds: float
    bytes: int  # copied now
    shards: int  # in all
    kept: int  # files that existed before


class _File(NamedTuple):
    name: str  # relative: "train/000012.tar"
    bytes: int
    sha256: str


def stage(source: str, target: str, workers: int = 4, trust: bool = False) -> Staged:
    """Copy the finished shards in `source` to the directory `target`, or continue an earlier start.

    index.json is written last: without it, `target` is not accepted as shards.

    Args:
        workers: threads; reading, hashing and writing release the interpreter's lock.
        trust: keep existing files of the right size without comparing their checksums.

    Raises:
        UserError: no finished shards, a damaged one, other shards in `target`, too little space, a
            disk that fills up.
    """
    started = time.time()
    clock = time.monotonic()
    index = read_index(source, "SHARDS")
    for split in SPLITS:
        make_directory(os.path.join(target, split))
    if os.path.samefile(source, target):
        raise UserError(f"LOCAL is {target!r}: that is SHARDS itself")
    with only_process(target):
        _refuse_other_shards(source, target)
        shards = [_file(split, record) for split in SPLITS for record in index[split]["shards"]]
        files = shards + [_file(split, index[split]["members"]) for split in SPLITS]
        _check_space(target, files)
        copied = _Copying(source, target, trust).run(files, workers)
        seconds, size = time.monotonic() - clock, sum(copied)
        if size or not os.path.exists(os.path.join(target, "staging.json")):
            record = {"started": started, "seconds": seconds, "bytes": size}
            write_json(os.path.join(target, "staging.json"), record)
        with new_file(os.path.join(target, "index.json")) as file:
            file.write(_read(os.path.join(source, "index.json")))
    return Staged(started, seconds, size, len(shards), copied.count(0))


def _file(split: str, record: dict) -> _File:
    return _File(f"{split}/{record['name']}", record["bytes"], record["sha256"])


def _refuse_other_shards(source: str, target: str) -> None:
    existing = os.path.join(target, "index.json")
    if os.path.exists(existing) and _read(existing) != _read(os.path.join(source, "index.json")):
        raise UserError(
            f"LOCAL is {target!r}: it holds other shards than {source!r}; remove it, or take"
            " another directory"
        )


def _read(path: str) -> bytes:
    try:
        return read_bounded(path, MAX_INDEX_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _check_space(target: str, files: list[_File]) -> None:
    needed = sum(file.bytes for file in files if not _has_size(target, file))
    free = shutil.disk_usage(target).free
    if needed > free:
        raise UserError(
            f"LOCAL is {target!r}: {needed / 1e6:,.0f} MB are needed there, {free / 1e6:,.0f} MB"
            " are free"
        )


def _has_size(target: str, file: _File) -> bool:
    path = os.path.join(target, file.name)
    return os.path.exists(path) and os.path.getsize(path) == file.bytes


class _Copying:
    """Threads that copy files until all are copied or one cannot be."""

    def __init__(self, source: str, target: str, trust: bool):
        self.source = source
        self.target = target
        self.trust = trust
        self.stopped = threading.Event()
        self.done = 0  # bytes read
        self.lock = threading.Lock()  # of `done`

    def run(self, files: list[_File], workers: int) -> list[int]:
        """Copy the files. Returns the number of bytes copied of each."""
        with (
            TransferBar("stage", sum(file.bytes for file in files), "bytes") as bar,
            ThreadPoolExecutor(workers) as pool,
        ):
            futures = [pool.submit(self._copy, file) for file in files]
            try:
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()  # raises the thread's error
                    bar.show(0, self.done)
            finally:
                self.stopped.set()
                pool.shutdown(cancel_futures=True)
        return [future.result() for future in futures]

    def _copy(self, file: _File) -> int:
        """Copy a file unless it exists. Returns the number of bytes copied."""
        source = os.path.join(self.source, file.name)
        target = os.path.join(self.target, file.name)
        has_size = _has_size(self.target, file)
        if has_size and (self.trust or sha256(self._chunks(target)) == file.sha256):
            return 0
        with new_file(target) as copy:
            for chunk in self._chunks(source):
                copy.write(chunk)
                if copy.bytes > file.bytes:
                    break
            if (copy.bytes, copy.sha256) != (file.bytes, file.sha256):
                raise UserError(
                    f"{source}: is damaged, it has not the size and the checksum that index.json"
                    " records"
                )
        return file.bytes

    def _chunks(self, path: str) -> Iterator[memoryview]:
        try:
            with open_regular(path) as file:
                for chunk in read_chunks(file, _CHUNK):
                    yield chunk
                    with self.lock:
                        self.done += len(chunk)
                    if self.stopped.is_set():
                        # Ends the thread. It is not shown: another error stopped the copying.
                        raise UserError("stopped")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
