"""Send files from nodes that have them to nodes that lack them, over a process group with one rank
per node.

N nodes
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from moe_core.files import open_regular
from moe_core.parallel import Ranks
from swinv2_moe.data.shards import ShardFile
from swinv2_moe.errors import UserError
from swinv2_moe.files import HashedFile, new_file

_CHUNK = 4 << 20  # bytes of a file per step
_MOST_FILES = 32  # maximum number of files sent at the same time; each needs 2 * 4 MiB of memory


class ShardExchange:
    """Sends files between the nodes. All nodes make the same calls in the same order. An error on
    one node is raised on all.

    Args:
        nodes: a gloo group with one rank per node.
    """

    def __init__(self, nodes: Ranks) -> None:
        self.nodes = nodes

    @property
    def node(self) -> int:
        return self.nodes.rank

    def gather(self, value: object) -> list:
        """The `value` of every node, which must be small and picklable."""
        return self.nodes.gather_objects(value, "gathering from all nodes")

    def agree(self, problem: UserError | None) -> None:
        """Raise the first problem of any node on all nodes. The message has the node's number,
        unless all nodes have a problem.

        Raises:
            UserError: a node has a problem.
        """
        problems = self.gather(None if problem is None else str(problem))
        for node, message in enumerate(problems):
            if message is not None:
                place = f" (node {node})" if None in problems else ""
                raise UserError(f"{message}{place}")

    def send(
        self,
        owners: dict[ShardFile, int],
        lacking: set[str],
        directory: str,
        wait_for: Callable[[ShardFile], None],
        count: Callable[[int], None],
    ) -> None:
        """Send files to the nodes that lack them. A file gets its name there if its checksum is
        right.

        Args:
            owners: the files in the order of sending, with the node that sends each file.
            lacking: names of the files that this node lacks.
            directory: directory of this node; the files' names are relative to it.
            wait_for: a function that returns when this node has the given file, which it owns; may
                raise UserError.
            count: called with the number of bytes of each received piece.

        Raises:
            UserError: a file cannot be read or written, or was damaged in transfer.
        """
        files = list(owners)
        at_once = min(self.nodes.size, _MOST_FILES)
        request = _Request(owners, lacking, directory, wait_for, count)
        with ThreadPoolExecutor(min(at_once, 8)) as pool:
            for start in range(0, len(files), at_once):
                problem = None
                try:
                    _Wave(self.nodes, files[start : start + at_once], request, pool).send()
                except _FailedElsewhere:
                    pass
                except UserError as error:
                    problem = error
                self.agree(problem)


class _Request(NamedTuple):
    """The arguments of `ShardExchange.send`."""

    owners: dict[ShardFile, int]
    lacking: set[str]
    directory: str
    wait_for: Callable[[ShardFile], None]
    add: Callable[[int], None]

    def path(self, file: ShardFile) -> str:
        return os.path.join(self.directory, file.name)


class _FailedElsewhere(Exception):
    """Another node has a problem, which the next `agree` reports."""


class _Wave:
    """A group of files that are sent at the same time, chunk by chunk.

    A step broadcasts one chunk of each file, while the chunks of the previous step are written.
    Every node takes part in every step. If a node has a problem, all nodes stop after that step.
    """

    def __init__(
        self,
        nodes: Ranks,
        files: list[ShardFile],
        request: _Request,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.nodes = nodes
        self.files = files
        self.request = request
        self.pool = pool
        self.sources: dict[ShardFile, BinaryIO] = {}
        self.copies: dict[ShardFile, HashedFile] = {}
        self.writing: list[Future] = []  # writes of the last step's chunks
        largest = max(file.bytes for file in files)
        self.num_steps = -(-largest // _CHUNK)
        self.buffers = torch.empty(2, len(files), min(_CHUNK, largest), dtype=torch.uint8)

    def send(self) -> None:
        """Send the files.

        Raises:
            UserError: this node has a problem.
            _FailedElsewhere: another node has a problem.
        """
        with ExitStack() as opened:
            problem = _problem_of(self._open, opened)
            opened.callback(wait, self.writing)  # before the files are closed
            for step in range(self.num_steps):
                chunks = self._chunks(step)
                if problem is None:
                    problem = _problem_of(self._read, chunks)
                some_failed = self._broadcast(chunks, problem is not None)
                if problem is not None:
                    raise problem
                if some_failed:
                    raise _FailedElsewhere
                problem = _problem_of(self._finish_writing)
                for file, chunk in chunks.items():
                    self.writing.append(self.pool.submit(self._write, file, chunk))
            if problem is not None:
                raise problem
            self._finish_writing()
            self._check()

    def _open(self, opened: ExitStack) -> None:
        for file in self.files:
            path = self.request.path(file)
            if self.request.owners[file] == self.nodes.rank:
                self.request.wait_for(file)
                try:
                    self.sources[file] = opened.enter_context(open_regular(path))
                except OSError as error:
                    raise UserError(f"{path}: cannot be read ({error.strerror})") from error
            elif file.name in self.request.lacking:
                self.copies[file] = opened.enter_context(new_file(path))

    def _chunks(self, step: int) -> dict[ShardFile, torch.Tensor]:
        """Views of the buffers for the step's chunks."""
        offset = step * _CHUNK
        chunks = {}
        for number, file in enumerate(self.files):
            size = min(_CHUNK, file.bytes - offset)
            if size > 0:
                chunks[file] = self.buffers[step % 2, number, :size]
        return chunks

    def _read(self, chunks: dict[ShardFile, torch.Tensor]) -> None:
        for file, source in self.sources.items():
            if file not in chunks:
                continue
            view = chunks[file].numpy().data
            try:
                content = source.read(len(view))
            except OSError as error:
                path = self.request.path(file)
                raise UserError(f"{path}: cannot be read ({error.strerror})") from error
            if len(content) != len(view):
                raise UserError(f"{self.request.path(file)}: has become shorter")
            view[:] = content

    def _broadcast(self, chunks: dict[ShardFile, torch.Tensor], has_failed: bool) -> bool:
        """Broadcast the chunks; returns whether any node has failed."""
        failed = torch.tensor(int(has_failed))
        group = self.nodes.process_group
        with self.nodes.named_errors("sending shards"):
            works = [dist.all_reduce(failed, dist.ReduceOp.MAX, group=group, async_op=True)]
            for file, chunk in chunks.items():
                owner = self.request.owners[file]
                works.append(dist.broadcast(chunk, group_src=owner, group=group, async_op=True))
            for work in works:
                work.wait()
        return bool(failed)

    def _write(self, file: ShardFile, chunk: torch.Tensor) -> None:
        if file not in self.copies:
            return
        try:
            self.copies[file].write(chunk.numpy().data)
        except OSError as error:
            path = self.request.path(file)
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        self.request.add(len(chunk))

    def _finish_writing(self) -> None:
        """Wait for the chunks of the last step; raises the first problem."""
        wait(self.writing)
        finished = self.writing.copy()
        self.writing.clear()
        for future in finished:
            future.result()

    def _check(self) -> None:
        """Raise UserError unless each received file has the size and checksum in index.json."""
        for file, copy in self.copies.items():
            if (copy.bytes, copy.sha256) != (file.bytes, file.sha256):
                owner = self.request.owners[file]
                raise UserError(
                    f"{file.name}: arrived damaged from node {owner}: its checksum is not the one"
                    " that index.json records"
                )


def _problem_of(work: Callable, *arguments: object) -> UserError | None:
    try:
        work(*arguments)
    except UserError as error:
        return error
    return None
