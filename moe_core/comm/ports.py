"""Ports: the messages of channels between machines, sent with a process group's sends and receives.

A port keeps puts until the next signal, and sends both as one message: a head with the number of
puts and of bytes, then a table of the puts and their contents. gloo's threads send the message in
the background, so neither a put nor a signal waits for the other rank. The receiver writes the puts
into its buffer when it waits for the signal. It first checks that they fit, because a message is
not trusted.
"""

# n puts of a message

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.ranks import Ranks

_PUTS, _SIGNAL, _BARRIER = range(3)  # the purpose of a message
_HEAD = 3  # int64: purpose, number of puts, bytes of all puts
_MOST_PUTS = 4096  # puts in one message
_FIRST_TAG = 7919  # tags of messages start here; other sends of the process group have tag 0
_numbers_of_ports: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass
class _Peer:
    """A rank on another machine."""

    # offsets and contents of puts since the last signal
    offsets: list[int] = field(default_factory=list)
    contents: list[Tensor] = field(default_factory=list)
    # messages that are being sent, with their tensors, which must exist until they are sent
    sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    signals: int = 0  # received signals that no wait has used yet

    @property
    def num_bytes(self) -> int:
        return sum(len(contents) for contents in self.contents)


class Ports:
    """The connections of a rank to the ranks of other machines.

    Args:
        ranks: the ranks of the ChannelGroup.
        buffer: this rank's buffer (bytes), into which other ranks put.
        timeout: the timeout of every wait.
        fail: raises an error with a given message, now and in all later operations of the group.
    """

    def __init__(
        self, ranks: Ranks, buffer: Tensor, timeout: timedelta, fail: Callable[[str], NoReturn]
    ) -> None:
        assert ranks.process_group is not None, "several machines have a process group"
        self._ranks, self._buffer, self._timeout, self._fail = ranks, buffer, timeout, fail
        self._process_group = ranks.process_group
        # All ranks create groups in the same order, so their numbers agree.
        number = _numbers_of_ports.get(self._process_group, 0)
        _numbers_of_ports[self._process_group] = number + 1
        self._tag = _FIRST_TAG + number
        self._peers: dict[int, _Peer] = {}

    def put(self, peer: int, offset: int, contents: Tensor) -> None:
        """Write `contents` into the peer's buffer with the next signal.

        Args:
            contents: bytes, which must not change later.
        """
        state = self._peer(peer)
        num_bytes = state.num_bytes + len(contents)
        if num_bytes > len(self._buffer) or len(state.offsets) == _MOST_PUTS:
            self._send(peer, _PUTS)
        state.offsets.append(offset)
        state.contents.append(contents)

    def signal(self, peer: int) -> None:
        """Send the puts since the last signal, together with a signal."""
        self._send(peer, _SIGNAL)

    def wait(self, peer: int) -> None:
        """Wait for the peer's next signal and write the puts before it.

        Raises:
            CollectiveError: no signal came within the timeout, or a put does not fit into the
                buffer.
        """
        state = self._peer(peer)
        if not state.signals:
            self._receive(peer, _SIGNAL)
        state.signals -= 1

    def barrier(self, peers: list[int]) -> None:
        """Wait until all peers have called this, and write all their earlier puts.

        `peers` of every peer must contain this rank.
        """
        for peer in peers:
            self._send(peer, _BARRIER)
        for peer in peers:
            self._receive(peer, _BARRIER)

    def flush(self, peer: int) -> None:
        """Wait until all messages to the peer are sent. The peer has to receive them.

        Raises:
            CollectiveError: the peer does not receive them within the timeout.
        """
        sending = self._peer(peer).sending
        while sending:
            work, _ = sending.popleft()
            with self._named_errors(f"rank {self._ranks.rank} could not send to rank {peer}"):
                work.wait(self._timeout)

    def flush_all(self) -> None:
        """`flush` for every peer."""
        for peer in self._peers:
            self.flush(peer)

    def _peer(self, peer: int) -> _Peer:
        if peer not in self._peers:
            self._peers[peer] = _Peer()
        return self._peers[peer]

    def _send(self, peer: int, purpose: int) -> None:
        state = self._peer(peer)
        sizes = [len(contents) for contents in state.contents]
        self._start(peer, torch.tensor([purpose, len(sizes), sum(sizes)]))
        if sizes:
            table = torch.tensor([state.offsets, sizes]).view(torch.uint8).flatten()
            self._start(peer, torch.cat([table, *state.contents]))
        state.offsets, state.contents = [], []

    def _start(self, peer: int, message: Tensor) -> None:
        """Send a tensor in the background."""
        sending = self._peer(peer).sending
        while sending and sending[0][0].is_completed():
            sending.popleft()
        with self._named_errors(f"the message from rank {self._ranks.rank} to rank {peer}"):
            work = dist.isend(message, group=self._process_group, tag=self._tag, group_dst=peer)
        assert work is not None, "both ranks are in the group"
        sending.append((work, message))

    def _receive(self, peer: int, until: int) -> None:
        """Receive messages until one with the purpose `until` has come."""
        state, purpose = self._peer(peer), -1
        while purpose != until:
            head = self._receive_tensor(peer, torch.empty(_HEAD, dtype=torch.int64))
            purpose, num_puts, num_bytes = head.tolist()
            self._check_head(peer, purpose, num_puts, num_bytes)
            if num_puts:
                body = torch.empty(16 * num_puts + num_bytes, dtype=torch.uint8)
                self._write(peer, num_puts, self._receive_tensor(peer, body))
            if purpose == _SIGNAL:
                state.signals += 1

    def _receive_tensor(self, peer: int, tensor: Tensor) -> Tensor:
        rank = self._ranks.rank
        with self._named_errors(f"wait: rank {rank} got no signal from rank {peer}"):
            work = dist.irecv(tensor, group=self._process_group, tag=self._tag, group_src=peer)
            assert work is not None, "both ranks are in the group"
            work.wait(self._timeout)
        return tensor

    def _check_head(self, peer: int, purpose: int, num_puts: int, num_bytes: int) -> None:
        """Fail if the head of a message is not valid, before memory is allocated for its body."""
        fits = 0 <= num_puts <= _MOST_PUTS and 0 <= num_bytes <= len(self._buffer)
        if purpose not in (_PUTS, _SIGNAL, _BARRIER) or not fits:
            self._fail(
                f"rank {peer} sent a message of purpose {purpose}, {num_puts} puts and"
                f" {num_bytes} bytes to a buffer of {len(self._buffer)}"
            )

    def _write(self, peer: int, num_puts: int, body: Tensor) -> None:
        """Write the puts of a message into the buffer."""
        table = body[: 16 * num_puts].view(torch.int64).view(2, num_puts)
        begin = 16 * num_puts
        for offset, size in table.T.tolist():
            end = begin + size
            if offset < 0 or size < 0 or offset + size > len(self._buffer) or end > len(body):
                self._fail(
                    f"rank {peer} puts bytes {offset} to {offset + size} into the buffer of rank"
                    f" {self._ranks.rank} ({len(self._buffer)} bytes)"
                )
            self._buffer[offset : offset + size] = body[begin:end]
            begin = end

    @contextmanager
    def _named_errors(self, operation: str) -> Iterator[None]:
        """Convert an error of the transport to an error of the group."""
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            self._fail(f"{operation}; has it ended? ({first_line})")
