"""examples/slurm under a real Slurm of two nodes on this machine: a signal before the time limit,
preemption, a node that dies, and another number of nodes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.gloo_processes import ROOT, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or os.geteuid() != 0,
        reason="needs Slurm (Debian's slurm-wlm), and root to start it",
    ),
]
EPOCHS = 15
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MpiDefault=none
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=localhost Port={port1} CPUs=2
NodeName=n2 NodeHostname=localhost Port={port2} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=25
PartitionName=urgent Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """Slurm's controller and two node daemons, with their own munge."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        munge = self._start_munge()
        ports = {name: free_port() for name in ("port", "port1", "port2")}
        (root / "slurm.conf").write_text(CONFIG.format(root=root, munge=munge, **ports))
        (root / "state").mkdir()
        self.environment = os.environ | {
            "SLURM_CONF": str(root / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        self.daemons = {"controller": self._start("slurmctld", "-D", "-i")}
        for node in ("n1", "n2"):
            self.daemons[node] = self._start("slurmd", "-D", "-N", node)
        self.wait_for(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 4)

    def _start_munge(self) -> Path:
        """Munge wants directories and a key of one owner that nobody else writes to."""
        home = Path("/run") / f"munge-of-a-test-{os.getpid()}"
        home.mkdir(mode=0o755)
        key = home / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = ("--socket", home / "socket", "--pid-file", home / "pid", "--key-file", key)
        files += ("--log-file", home / "log", "--seed-file", home / "seed")
        subprocess.run(["munged", "--force", *map(str, files)], check=True)
        self.munge = home
        return home / "socket"

    def _start(self, *command: str) -> subprocess.Popen:
        log = (self.root / f"{'-'.join(command)}.out").open("w")
        return subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    def submit(self, output: Path, *options: str, epochs: int) -> str:
        """The id of a job of train.sbatch."""
        settings = {"PROCESSES": "1", "MASTER": "localhost", "PYTHON": sys.executable}
        command = ["sbatch", "--parsable", "--time", "30", "--output", f"{output}-%j.log"]
        command += [*options, str(ROOT / "examples" / "slurm" / "train.sbatch")]
        command += ["--cfg", "quickstart_digits", "--opts", f"TRAIN.EPOCHS={epochs}"]
        command += ["DATA.NUM_WORKERS=0", "DATA.GLOBAL_BATCH_SIZE=64", "CHECKPOINT.STEPS=5"]
        command += ["MODEL.MOE.GLOBAL_BALANCE=True"]
        environment = self.environment | settings | {"OUTPUT": str(output)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-j", job, "-o", "%T %D %r").strip()

    def restarts(self, job: str) -> int:
        shown = self.ask("scontrol", "show", "job", job)
        return int(shown.split("Restarts=")[1].split()[0])

    @staticmethod
    def wait_for(condition, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            time.sleep(0.2)

    def kill_node(self, node: str) -> None:
        """SIGKILL to the node's daemon, to its steps and to what they have started."""
        victims = [psutil.Process(self.daemons[node].pid)]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    victims.append(process)
                    if process.parent().name() == "slurmstepd":
                        victims.append(process.parent())
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def stop(self) -> None:
        self.ask("scancel", "--user", "root")
        time.sleep(2)
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()
        os.kill(int((self.munge / "pid").read_text()), signal.SIGTERM)
        shutil.rmtree(self.munge, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    yield cluster
    cluster.stop()


def steps_of(run: Path) -> int:
    """The last logged step."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return 0
    steps = [0]
    for line in file.read_text().splitlines():
        steps.append(json.loads(line)["step"])
    return max(steps)


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def test_a_job_survives_all_that_happens_to_it(cluster, tmp_path, capsys):
    whole = tmp_path / "whole"
    cluster.submit(whole, "--nodes", "2", epochs=EPOCHS)
    cluster.wait_for((whole / "summary.json").exists, 400)

    run = tmp_path / "run"
    job = cluster.submit(run, "--nodes", "2", epochs=EPOCHS)
    log = Path(f"{run}-{job}.log")
    cluster.wait_for(lambda: steps_of(run) >= 20)
    cluster.ask("scancel", "--signal", "USR1", "--batch", job)  # as before the time limit
    cluster.wait_for(lambda: cluster.restarts(job) == 1)
    assert "SIGUSR1: stopped after step" in log.read_text()

    stopped = steps_of(run)
    cluster.wait_for(lambda: steps_of(run) > stopped + 20)
    urgent = ("--partition", "urgent", "--nodes", "2", "--exclusive", "--wrap", "sleep 3")
    cluster.ask("sbatch", "--output", "/dev/null", *urgent)
    cluster.wait_for(lambda: cluster.restarts(job) == 2)
    assert "SIGTERM: stopped after step" in log.read_text()

    stopped = steps_of(run)
    cluster.wait_for(lambda: steps_of(run) > stopped + 20)
    cluster.kill_node("n2")
    cluster.wait_for(lambda: cluster.restarts(job) == 3)
    cluster.wait_for(lambda: cluster.state(job).startswith("PENDING"))
    smaller = ("NumNodes=1", "NumTasks=1", "NumCPUs=1")
    cluster.ask("scontrol", "update", f"JobId={job}", *smaller)
    cluster.wait_for((run / "summary.json").exists, 400)

    text = log.read_text()
    print(text)
    assert text.count("resuming from") == 3
    assert "1 process on cpu" in text  # the second node is gone
    first, second = summary(whole), summary(run)
    assert second["epochs"] == first["epochs"] == EPOCHS
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert abs(second["val_top1"] - first["val_top1"]) < 3
    print("uninterrupted", first["val_top1"], "interrupted", second["val_top1"])
