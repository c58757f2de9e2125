"""A cluster on one machine. Each node is a Linux network namespace with its own link; each rank is
a gloo process.

    with Cluster(nodes=2, ranks_per_node=4, rate_mbit=1000, delay_ms=0.2) as cluster:
        # function(rank, world_size, argument) on every rank
        results = cluster.run(function, argument, timeout=60)
        cluster.set_rate(100)
        cluster.set_delay(1)

Ranks of one node communicate over its loopback device, at memory speed. Ranks of different nodes
communicate over veth pairs and a bridge. A token bucket (tc tbf) at each end of a pair limits the
rates at which its node sends and receives. With a delay, a program in user space (delay_switch.py)
replaces the bridge. The bridge is also in a namespace, so the cluster does not appear among the
machine's own links. Deleting the namespaces deletes the whole cluster.

Linux only, as root, with iproute2.
"""

# N nodes, g ranks of a node, W = N g ranks

import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.forkserver
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from delay_switch import DelaySwitch

NAMESPACES = Path("/var/run/netns")
PREFIX = "moe-cluster"
UPLINK = "eth0"  # network interface of every node; its other end is port<node> of the switch
STORE_PORT = 29500  # the same in every cluster: ports belong to a namespace
CLONE_NEWNET = 0x40000000
# bytes; if a bucket cannot hold TCP's 64 KB packets, tbf splits them, which is 3 times slower
LEAST_BURST = 128 * 1024
# timers fire some tens of microseconds late; with a smaller bucket this would reduce the rate
BURST_SECONDS = 2e-4
# the other ranks fail because of the first failure, and the sockets of a killed rank close before
# its pipe
LATE_SECONDS = 1
# bytes; nothing is dropped, as in a lossless fabric; with 2 MiB a third of the rate was lost
MOST_QUEUED = 64 * 2**20


class Cluster:
    """A cluster of N nodes with g ranks each; a context manager that removes the cluster at its
    end.

    Args:
        nodes: N. Node i has the address 10.77.0.(i + 1).
        ranks_per_node: g. Node i has the ranks g i to g (i + 1) - 1.
        rate_mbit: rate of each node's link in each direction, in 10^6 bit/s, including all headers;
            None: no limit.
        delay_ms: delay of every frame between nodes in one direction, in milliseconds; None: only
            the kernel's delay of a few tens of microseconds. With 0, frames are not held but pass
            through the program in user space, as with other delays. 0 is therefore the baseline for
            other delays.

    Raises:
        ValueError: sizes, a rate or a delay out of range.
        RuntimeError: `ip` or `tc` failed; see `unavailable`.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        rate_mbit: float | None = None,
        delay_ms: float | None = None,
    ) -> None:
        if not 1 <= nodes <= 250 or ranks_per_node < 1:
            raise ValueError(
                f"nodes ({nodes}) must be 1 to 250 and ranks_per_node ({ranks_per_node}) at least 1"
            )
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.rate_mbit, self.delay_ms = rate_mbit, delay_ms
        self._delay_switch: DelaySwitch | None = None
        # the process id shows whether the owner still runs
        name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self._switch = f"{name}-switch"
        self._namespaces = [f"{name}-node{node}" for node in range(nodes)]
        self._ports = [f"port{node}" for node in range(nodes)]  # ports of the switch

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __enter__(self) -> "Cluster":
        remove_abandoned()
        _start_server()
        try:
            self._build()
            self.set_rate(self.rate_mbit)
            self.set_delay(self.delay_ms)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes in the namespaces, and delete the namespaces with all links."""
        self._end_delay_switch()
        for name in [self._switch, *self._namespaces]:
            _remove(name)

    def _build(self) -> None:
        _command("ip", "netns", "add", self._switch)
        _command("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
        for node, (name, port) in enumerate(zip(self._namespaces, self._ports, strict=True)):
            _command("ip", "netns", "add", name)
            _command("ip", "-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", port, "netns", self._switch)
            _command("ip", "-n", name, "link", "add", UPLINK, "type", "veth", *peer)
            _command("ip", "-n", name, "address", "add", f"{_address(node)}/24", "dev", UPLINK)
            _command("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _command("ip", "-n", name, "link", "set", UPLINK, "up")

    def set_rate(self, rate_mbit: float | None, node: int | None = None) -> None:
        """Change the rate of all links, or of one node's link. This also works while ranks run."""
        qdisc = ["noqueue"]
        if rate_mbit is not None:
            if not 0.1 <= rate_mbit <= 1e5:
                raise ValueError(f"rate_mbit ({rate_mbit}) must be from 0.1 to 100000, or None")
            burst = max(LEAST_BURST, int(rate_mbit * 1e6 / 8 * BURST_SECONDS))
            qdisc = [
                "tbf",
                "rate",
                f"{round(rate_mbit * 1e6)}bit",
                "burst",
                str(burst),
                "limit",
                str(MOST_QUEUED),
            ]
        links = list(zip(self._namespaces, self._ports, strict=True))
        if node is not None:
            links = [links[node]]
        for name, port in links:
            for namespace, device in ((name, UPLINK), (self._switch, port)):
                _command("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *qdisc)
        if node is None:
            self.rate_mbit = rate_mbit

    def set_delay(self, delay_ms: float | None) -> None:
        """Change the delay of frames between nodes. Changing one number to another also works while
        ranks run."""
        if delay_ms is not None and not 0 <= delay_ms <= 1000:
            raise ValueError(f"delay_ms ({delay_ms}) must be from 0 to 1000, or None")
        if delay_ms is None and self._delay_switch is not None:
            self._end_delay_switch()
            self._set_master("master", "bridge")
        if delay_ms is not None:
            if self._delay_switch is None:
                self._set_master("nomaster")
                self._delay_switch = DelaySwitch(self._switch, self._ports)
            self._delay_switch.set_delay(delay_ms)
        self.delay_ms = delay_ms

    def _set_master(self, *words: str) -> None:
        for port in self._ports:
            _command("ip", "-n", self._switch, "link", "set", port, *words)

    def _end_delay_switch(self) -> None:
        if self._delay_switch is not None:
            self._delay_switch.close()
            self._delay_switch = None

    def inside(self, node: int) -> list[str]:
        """The words to put before a command so that it runs on a node, with separate mounts."""
        return ["ip", "netns", "exec", self._namespaces[node]]

    def bytes_sent(self) -> list[int]:
        """Bytes that each node has sent over its link so far, including headers [N]. Ranks use
        `node_bytes_sent`."""
        links = json.loads(_command("ip", "-n", self._switch, "-s", "-j", "link", "show"))
        received = {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in links}
        return [received[port] for port in self._ports]

    def run(self, function: Callable, *args, timeout: float = 60) -> list:
        """Run `function(rank, world_size, *args)` on every rank, in a gloo process group with
        torchrun's environment variables.

        The function must be importable (at the top level of a module). Its result may contain only
        numbers, strings, lists and dictionaries. torch has one thread on each rank.

        Returns:
            The results of the ranks, in their order [W].

        Raises:
            RuntimeError: a rank failed. The message has the traceback of the first failure; the
                other ranks are ended.
            TimeoutError: ranks still run after `timeout` seconds; they are ended.
        """
        deadline = time.monotonic() + timeout
        started = []
        try:
            for rank in range(self.world_size):
                started.append(self._start(rank, function, args, timeout))
            return _collect([pipe for _, pipe in started], deadline)
        finally:
            for process, _ in started:
                process.kill()
                process.join()

    def _start(
        self, rank: int, function: Callable, args: tuple, timeout: float
    ) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("forkserver")
        pipe, childs_end = context.Pipe(duplex=False)
        namespace = self._namespaces[rank // self.ranks_per_node]
        arguments = (namespace, self._variables(rank), function, args, timeout, childs_end)
        process = context.Process(target=_run_rank, args=arguments)
        process.start()
        childs_end.close()  # otherwise the pipe of a rank that died would stay open
        return process, pipe

    def _variables(self, rank: int) -> dict[str, str]:
        node, local_rank = divmod(rank, self.ranks_per_node)
        variables = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
        variables |= {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.ranks_per_node}
        variables |= {
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": STORE_PORT,
            "GLOO_SOCKET_IFNAME": UPLINK,
        }
        return {name: str(value) for name, value in variables.items()}


def unavailable() -> str | None:
    """The reason why a cluster cannot be made here, in one line; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with Cluster(1, 1, rate_mbit=100):
            return None
    # in a container without the rights, or with a kernel without veth, bridge or tbf
    except RuntimeError as error:
        return str(error)


def require() -> None:
    """If no cluster can be made, end the script with a message of one line and exit code 2."""
    reason = unavailable()
    if reason is not None:
        print(f"cannot make a cluster on this machine: {reason}", file=sys.stderr)
        raise SystemExit(2)


def remove_abandoned() -> None:
    """Remove the namespaces of clusters whose process was killed, and kill the processes in
    them."""
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        owner = path.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if not Path("/proc", owner).exists():
            _remove(path.name)


def node_bytes_sent() -> int:
    """Bytes that the node of the calling rank has sent over its link so far, including headers.

    To measure an operation, read the value before a barrier, and again after a barrier behind the
    operation. After the first barrier, other ranks of the node may already have sent bytes.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == UPLINK:
            return int(counters.split()[8])
    raise RuntimeError(f"this process is not a rank of a cluster: it has no {UPLINK}")


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _command(*words: str) -> str:
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {' '.join(result.stderr.split())}")
    return result.stdout


def _remove(namespace: str) -> None:
    if not (NAMESPACES / namespace).exists():
        return
    for pid in _command("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _command("ip", "netns", "delete", namespace)


def _collect(pipes: list[Connection], deadline: float) -> list:
    """The results that the ranks sent, in their order. Raises the first failure, if any."""
    results, failures, waiting = {}, [], {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            moment, error, results[rank] = _receive(pipe)
            if error is not None:
                failures.append((moment, f"rank {rank} of {len(pipes)} failed: {error}"))
                deadline = min(deadline, time.monotonic() + LATE_SECONDS)
    if failures:
        raise RuntimeError(min(failures)[1])
    if waiting:
        raise TimeoutError(
            f"ranks {sorted(waiting.values())} of {len(pipes)} still run: out of time"
        )
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection) -> tuple[float, str | None, object]:
    try:
        return pipe.recv()
    except EOFError:
        return (
            0.0,
            "its process ended without a result (killed? out of memory? stderr may tell)",
            None,
        )


def _run_rank(
    namespace: str, variables: dict[str, str], function: Callable, args: tuple, timeout: float, pipe
) -> None:
    # all processes receive Ctrl-C; the parent ends its ranks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _enter(namespace)
        os.environ.update(variables)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        result = function(dist.get_rank(), dist.get_world_size(), *args)
        dist.barrier()  # no rank leaves while another one still needs rank 0's store
        dist.destroy_process_group()
        pipe.send((time.monotonic(), None, result))
    except Exception:
        pipe.send((time.monotonic(), traceback.format_exc(), None))


def _start_server() -> None:
    """Start a process that imports torch once and forks the ranks: 16 ranks start in half a second.

    Its C++ log omits warnings that the nodes' addresses have no host names.
    """
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "moe_core"])
    with mock.patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _enter(namespace: str) -> None:
    """Move this thread, and the threads that it will start, to a network namespace. (os.setns
    exists from Python 3.12 on.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(NAMESPACES / namespace) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
