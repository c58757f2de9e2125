"""torchrun agents that come and go: the others go on from the newest checkpoint with the losses of
one process.

Launchers of several nodes need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for that (torch 2.11). Without
it an agent keeps the address that its first round agreed on: one that joins later waits for it in
vain, and one that becomes the first fails an assertion.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gloo_processes import free_port
from kill_and_resume import ROOT, SMALL, steps, uninterrupted, write_digits

from swinv2_moe.checkpoints.checkpoint import checkpoints_below, open_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, LATE = 150, 300  # of a run; of one that another agent is to join, which takes a while
# A small learning rate: rounding errors, which depend on the number of ranks, must not grow over so
# many steps.
KEYS = f"{SMALL} TRAIN.BASE_LR 2e-3 CHECKPOINT.STEPS 10 SAVE_FREQ 1000 PRINT_FREQ 1"


class Agents:
    """torchrun on several "nodes" of this machine, each with one rank."""

    def __init__(self, data: Path, output: Path, last: int, nodes: str = "1:2") -> None:
        self.run, self.port, self.nodes = output / "run", free_port(), nodes
        self.logs: list[Path] = []
        self.agents: list[subprocess.Popen] = []
        words = "tools/train.py --cfg configs/quickstart_digits.yaml --resume auto --data"
        self.program = [*words.split(), str(data), "--output", str(self.run)]
        self.program += ["--opts", *KEYS.split(), "TRAIN.MAX_STEPS", str(last)]

    def start(self, *more: str, is_host: bool = False) -> subprocess.Popen:
        """One more agent; `is_host`: the rendezvous lives in it."""
        settings = (
            f"is_host={int(is_host)},join_timeout=60,last_call_timeout=2,keep_alive_interval=1"
        )
        launcher = (
            f"-m torch.distributed.run --nnodes {self.nodes} --nproc_per_node 1 --rdzv-id test"
            f" --rdzv-backend c10d --rdzv-endpoint localhost:{self.port} --rdzv-conf {settings}"
            " --max-restarts 3"
        )
        self.logs.append(self.run.parent / f"agent-{len(self.agents)}.log")
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self.logs[-1].open("w") as log:
            agent = subprocess.Popen(
                [sys.executable, *launcher.split(), *more, *self.program],
                cwd=ROOT,
                env=os.environ | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)
        return agent

    def wait_for(self, step: int, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while max(dict(steps(self.run)), default=0) < step:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def wait(self, seconds: float = 300) -> list[int]:
        deadline = time.monotonic() + seconds
        return [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents]

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs)

    def end(self) -> None:
        for agent in self.agents:
            kill_node(agent)
            agent.wait()


def kill_node(agent: subprocess.Popen) -> None:
    """SIGKILL to an agent and its worker."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    for pid in (agent.pid, *map(int, workers)):
        if agent.poll() is None or pid != agent.pid:
            with contextlib.suppress(ProcessLookupError):  # a worker whose agent has just ended
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The losses of one process that nothing interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    return dict(steps(uninterrupted(1, data, output, LATE, KEYS.removeprefix(SMALL))))


@pytest.fixture
def agents(data, tmp_path):
    made = []

    def make(last: int, nodes: str = "1:2") -> Agents:
        made.append(Agents(data, tmp_path, last, nodes))
        return made[-1]

    yield make
    for one in made:
        one.end()


def assert_whole(run: Path, last: int, whole: dict[int, float]) -> None:
    found = steps(run)
    assert [step for step, _ in found] == list(range(1, last + 1))
    expected = [whole[step] for step in range(1, last + 1)]
    assert [loss for _, loss in found] == pytest.approx(expected, rel=1e-4)  # test_ranks.py
    assert open_checkpoint(checkpoints_below(run / "checkpoints")[0]).meta["step"] == last


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_dies(lost, data, whole, agents):
    """Agents are ranked by their process ids; the rendezvous lives in the one that stays."""
    world = agents(STEPS)
    world.start(is_host=lost == 1)
    world.start(is_host=lost == 0)
    world.wait_for(25)
    kill_node(world.agents[lost])
    status = world.wait()
    assert status[1 - lost] == 0, world.said()
    said = world.logs[1 - lost].read_text()
    assert "error: " in said
    assert "resuming from" in said
    assert "1 process on cpu" in said
    assert_whole(world.run, STEPS, whole)


@pytest.mark.parametrize("rendezvous", ["--master-port {port}", "--standalone"])
def test_a_rank_that_dies_on_one_node(rendezvous, data, whole, tmp_path):
    """torchrun restarts both ranks. They meet in the store of its agent, which has outlived the
    ranks before."""
    run = tmp_path / "run"
    words = f"-m torch.distributed.run --nproc_per_node 2 --max-restarts 2 {rendezvous}"
    words += (
        f" -m swinv2_moe train --cfg configs/quickstart_digits.yaml --resume auto --data {data}"
    )
    words += f" --output {run} --opts {KEYS} TRAIN.MAX_STEPS {STEPS} TIMEOUT 60"
    variables = {"OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        [sys.executable, *words.format(port=free_port()).split()],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not checkpoints_below(run / "checkpoints") and launcher.poll() is None:
        time.sleep(0.02)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert "resuming from" in said
    assert_whole(run, STEPS, whole)


def test_a_node_that_joins(data, whole, agents):
    """The agent that was alone stops its rank, which saves, and both start anew."""
    world = agents(LATE)
    world.start(is_host=True)
    world.wait_for(3)
    world.start()
    assert world.wait() == [0, 0], world.said()
    said = world.said()
    assert "SIGTERM: stopped after step" in said
    assert "2 processes on cpu" in said
    assert_whole(world.run, LATE, whole)


def test_a_node_that_is_told_to_leave(data, whole, agents):
    """SIGTERM to one of two agents, as before its machine is taken away: nothing is lost, and the
    other one goes on."""
    world = agents(STEPS)
    world.start(is_host=True)
    world.start()
    world.wait_for(25)
    world.agents[1].terminate()
    status = world.wait()
    said = world.logs[0].read_text()
    assert status[0] == 0, world.said()
    (stopped,) = re.findall(r"SIGTERM: stopped after step (\d+)", world.said())
    assert f"step {stopped} (epoch" in said
    assert "1 process on cpu" in said
    assert_whole(world.run, STEPS, whole)
