"""Functions in a forked process with bounds of time and memory, and how they ended."""

import hashlib
import json
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from swinv2_moe.errors import UserError

_HARD_LIMIT = 6 << 30  # bytes of address space beyond the parent's: what protects the machine


class Outcome(NamedTuple):
    """How a call ended."""

    # "returned", "refused" (UserError), "crashed" (another exception), "killed" (by a signal),
    # "late"
    kind: str
    text: str  # what it returned, or the message
    seconds: float
    bytes: int  # its largest resident set less the one that it started with


def digest(*parts: bytes) -> str:
    """One checksum of all parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()


def isolated(call: Callable[[], str], seconds: float) -> Outcome:
    """`call()` in a forked process, which is killed after so many seconds of its processor, or ten
    times as many."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _report(call, writer, seconds)
        os._exit(0)
    os.close(writer)
    answer = _read_until_end(reader, started + 10 * seconds)
    os.close(reader)
    if answer is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    elapsed = time.monotonic() - started
    if answer is None:
        return Outcome("late", f"still ran after {10 * seconds:g} s", elapsed, 0)
    if not answer:
        return Outcome("killed", f"by signal {os.waitstatus_to_exitcode(status)}", elapsed, 0)
    kind, text, grown = json.loads(answer)
    return Outcome(kind, text, elapsed, grown)


def _report(call: Callable[[], str], writer: int, seconds: float) -> None:
    """In the child: write the outcome as JSON. Nothing may leave this function, or there would be
    two parents."""
    try:
        _limit_memory()
        most = time.process_time() + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(most), math.ceil(most)))
        before = _resident("VmRSS")
        kind, text = _outcome(call)
        content = json.dumps([kind, text, max(_resident("VmHWM") - before, 0)]).encode()
        while content:
            content = content[os.write(writer, content) :]
    finally:
        os._exit(0)


def _outcome(call: Callable[[], str]) -> tuple[str, str]:
    try:
        return "returned", call()
    except UserError as error:
        return "refused", str(error)
    except BaseException as error:
        return "crashed", f"{type(error).__name__}: {error}"[:2000]


def _limit_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew: proc_pid_clear_refs(5)
    most = _resident("VmSize") + _HARD_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)  # progress bars
    os.dup2(devnull, 2)


def _resident(name: str) -> int:
    """Bytes that /proc/self/status gives under this name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {name}")


def _read_until_end(reader: int, deadline: float) -> bytes | None:
    """What the child wrote until it closed its end; None where that was not before `deadline`."""
    content = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            return content
        content += part
