"""Staging and training on 1, 2 and 4 nodes whose data are on a file server of their own.

    sudo .venv/bin/python benchmarks/time_to_solution.py --shards DIR --cfg FILE --target 10

Nodes are network namespaces (netns.py). A further one is the file server: each node mounts its
directory with sshfs, and its link is slower than the others', as that of a shared file system is to
each node of a large cluster. Bytes of the source are what the server has put on its link, headers
and encryption included, divided by the bytes of the shards.

stage: `swinv2-moe stage` under torchrun, and by each node for itself
train: with DATA.STAGE to a target accuracy: seconds by phase, and the bytes again
plan:  what the planner predicts from the run on the fewest nodes, with the machine's speed and
       links measured on two nodes. All nodes share the cores of this machine: from the share that
       telemetry saw in use on one node follows how many times longer work takes on more.
"""

# N nodes

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from netns import Cluster, require

from moe_core.parallel import Machine
from swinv2_moe.command import run_command
from swinv2_moe.errors import UserError
from swinv2_moe.machine_profile import load_profile
from swinv2_moe.time_plan import planner_of_run

ROOT = Path(__file__).parents[1]
PORT = 29500
SERVER_ADDRESS = "10.77.0.{}"


class FileServer:
    """A node of a cluster that serves a directory over sshfs."""

    def __init__(self, cluster: Cluster, node: int, directory: Path, work: Path) -> None:
        self.cluster = cluster
        self.node = node
        self.directory = directory
        self.key = work / "key"
        host_key = work / "host_key"
        for key in (self.key, host_key):
            if not key.exists():
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
                subprocess.run(command, check=True)
        authorized = work / "authorized"
        authorized.write_text(self.key.with_suffix(".pub").read_text())
        authorized.chmod(0o600)
        Path("/run/sshd").mkdir(exist_ok=True)
        options = {
            "AuthorizedKeysFile": authorized,
            "HostKey": host_key,
            "ListenAddress": "0.0.0.0",
            "PermitRootLogin": "yes",
            "PidFile": "none",
            "StrictModes": "no",
            "Subsystem": "sftp internal-sftp",
            "UsePAM": "no",
        }
        command = [*cluster.inside(node), "/usr/sbin/sshd", "-f", "/dev/null"]
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        subprocess.run(command, check=True)

    def mount(self, at: Path) -> str:
        """The shell command that mounts the directory on a node."""
        at.mkdir(parents=True, exist_ok=True)
        address = SERVER_ADDRESS.format(self.node + 1)
        options = f"IdentityFile={self.key},StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null"
        return f"sshfs -o {options},LogLevel=ERROR root@{address}:{self.directory} {at}"

    def bytes_sent(self) -> int:
        return self.cluster.bytes_sent()[self.node]


def run_on_nodes(cluster: Cluster, commands: list[str], seconds: float) -> float:
    """Run one shell command on each of the first nodes. Returns the seconds until the last command
    has ended.

    Raises:
        UserError: a command failed; the message has the last lines of its output.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": str(ROOT),
    }
    began = time.monotonic()
    running = []
    for node, command in enumerate(commands):
        words = [*cluster.inside(node), "bash", "-ec", command]
        running.append(
            subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        )
    try:
        for node, process in enumerate(running):
            left = seconds - (time.monotonic() - began)
            output, _ = process.communicate(timeout=max(left, 1))
            if process.returncode:
                lines = "\n".join(output.splitlines()[-15:])
                raise UserError(f"node {node}: {commands[node]}\n{lines}")
    finally:
        for process in running:
            process.kill()
    return time.monotonic() - began


def torchrun(node: int, num_nodes: int) -> str:
    """The words that start one process on a node."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    words += [f"--nnodes={num_nodes}", f"--node-rank={node}"]
    words += ["--master-addr=10.77.0.1", f"--master-port={PORT}", "-m", "swinv2_moe"]
    return shlex.join(words)


class Measurement:
    """All measurements with one number of nodes."""

    def __init__(self, args: argparse.Namespace, num_nodes: int, work: Path) -> None:
        self.args = args
        self.num_nodes = num_nodes
        self.work = work / f"{num_nodes}-nodes"
        self.work.mkdir()
        self.size = sum(path.stat().st_size for path in args.shards.rglob("*") if path.is_file())

    def run(self) -> dict:
        with Cluster(self.num_nodes + 1, 1, self.args.rate) as cluster:
            cluster.set_rate(self.args.source_rate, self.num_nodes)
            server = FileServer(cluster, self.num_nodes, self.args.shards, self.work)
            measured = {
                "stage": self._stage(cluster, server, alone=False),
                "stage, each node alone": self._stage(cluster, server, alone=True),
            }
            if self.args.cfg:
                measured["train"] = self._train(cluster, server)
        return measured

    def _directories(self, name: str) -> list[Path]:
        return [self.work / name / f"node{node}" for node in range(self.num_nodes)]

    def _stage(self, cluster: Cluster, server: FileServer, alone: bool) -> dict:
        """Stage the data. Returns the seconds from the start of the program, and how many copies of
        the data the server sent."""
        targets = self._directories(f"staged-{alone}")
        commands = []
        for node, target in enumerate(targets):
            source = self.work / f"source-{alone}-{node}"
            start = torchrun(node, self.num_nodes)
            if alone:
                start = f"{sys.executable} -m swinv2_moe"
            commands.append(f"{server.mount(source)}; {start} stage {source} {target}")
        before = server.bytes_sent()
        seconds = run_on_nodes(cluster, commands, 600)
        copies = (server.bytes_sent() - before) / self.size
        records = [json.loads((target / "staging.json").read_text()) for target in targets]
        for target in targets:
            shutil.rmtree(target)
        return {
            "copies": copies,
            "seconds": seconds,
            "staging_seconds": max(record["seconds"] for record in records),
        }

    def _train(self, cluster: Cluster, server: FileServer) -> dict:
        targets = self._directories("trained")
        output = self.work / "output"
        batch = self.args.global_batch // self.num_nodes
        commands = []
        for node, target in enumerate(targets):
            source = self.work / f"source-train-{node}"
            words = ["train", "--cfg", self.args.cfg, "--data", str(source)]
            words += ["--output", str(output), "--opts", "DATA.DATASET", "shards"]
            words += ["DATA.STAGE", str(target), "DATA.BATCH_SIZE", str(batch)]
            words += ["TRAIN.TARGET_TOP1", str(self.args.target), "EVENT_LOG", "True"]
            words += self.args.opts
            start = torchrun(node, self.num_nodes)
            commands.append(f"{server.mount(source)}; {start} {shlex.join(words)}")
        before = server.bytes_sent()
        seconds = run_on_nodes(cluster, commands, 3000)
        copies = (server.bytes_sent() - before) / self.size
        summary = json.loads((output / "summary.json").read_text())
        return {"copies": copies, "seconds": seconds, "summary": summary}


def measured_profile(args: argparse.Namespace, work: Path) -> Machine:
    """The speed of this machine and of the links between two nodes."""
    file = work / "profile.json"
    words = ["plan-cluster", "--nodes", "2", "--gpus-per-node", "1", "--cfg", args.cfg]
    words += ["--profile", "here", "--save-profile", str(file), "--output", str(work / "plan.png")]
    words += ["--opts", "DATA.PATH", str(args.shards)]
    with Cluster(2, 1, args.rate) as cluster:
        commands = [f"{torchrun(node, 2)} {shlex.join(words)}" for node in range(2)]
        run_on_nodes(cluster, commands, 600)
    return load_profile(file)


def report_predictions(by_nodes: dict[int, dict], first_run: Path, machine: Machine) -> None:
    times = planner_of_run(first_run, machine, 1)
    measured = times.measured
    use = measured.cpu or 1 / os.cpu_count()
    print(f"\n{times.factor:.3g} times the profile's time; {use:.0%} of the cores in use")
    print("\n| nodes | step, ms: predicted | measured | to the target, s: predicted | measured |")
    print("| --- | --- | --- | --- | --- |")
    for num_nodes, row in by_nodes.items():
        summary = row["train"]["summary"]
        reached = summary["phases_to_target"]
        if reached is None:
            continue
        crowding = max(1.0, use * num_nodes / measured.gpus) / max(1.0, use)
        plan = times.predict(num_nodes, crowding)
        step = 1e3 * reached["training"] / summary["target_step"]
        step_error = 1e3 * plan.step.step / step - 1
        total = sum(reached.values())
        error = plan.total / total - 1
        print(
            f"| {num_nodes} | {1e3 * plan.step.step:,.0f} ({step_error:+.0%}) | {step:,.0f}"
            f" | {plan.total:.1f} ({error:+.0%}) | {total:.1f} |"
        )


def report(by_nodes: dict[int, dict]) -> None:
    print("\n| nodes | staging | copies read from the source | seconds |")
    print("| --- | --- | --- | --- |")
    for num_nodes, measured in by_nodes.items():
        for name in ("stage", "stage, each node alone"):
            row = measured[name]
            print(f"| {num_nodes} | {name} | {row['copies']:.2f} | {row['staging_seconds']:.1f} |")
    if not all("train" in measured for measured in by_nodes.values()):
        return
    phases = list(by_nodes[1]["train"]["summary"]["phases"])
    print(f"\n| nodes | copies | staging | to the target | {' | '.join(phases)} | known |")
    print("| --- | --- | --- | --- |" + " --- |" * (len(phases) + 1))
    for num_nodes, measured in by_nodes.items():
        summary = measured["train"]["summary"]
        cells = [str(num_nodes), f"{measured['train']['copies']:.2f}"]
        cells.append(f"{summary['staging_seconds']:.1f}")
        reached = summary["phases_to_target"]
        if reached is None:
            print(f"| {' | '.join(cells)} | target not reached |")
            continue
        total = sum(reached.values())
        cells.append(f"{total:.1f}")
        cells += [f"{reached[phase]:.1f}" for phase in phases]
        cells.append(f"{1 - reached['other'] / total:.1%}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=Path, required=True, help="made by make-shards")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s of a node's link")
    parser.add_argument("--source-rate", type=float, default=40, help="of the file server's")
    parser.add_argument("--cfg", help="also train this configuration")
    parser.add_argument("--target", type=float, default=10.0, help="top-1, percent")
    parser.add_argument("--global-batch", type=int, default=128, help="images of a step")
    parser.add_argument("--opts", nargs="*", default=[], help="any configuration keys")
    parser.add_argument("--json", type=Path, help="where to write every number")
    args = parser.parse_args()
    require()
    for tool in ("sshfs", "/usr/sbin/sshd", "ssh-keygen"):
        if shutil.which(tool) is None:
            raise UserError(f"{tool} is not here: apt install sshfs openssh-server")
    args.shards = args.shards.resolve()
    by_nodes = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for num_nodes in args.nodes:
            by_nodes[num_nodes] = Measurement(args, num_nodes, work).run()
            if args.json:
                args.json.write_text(json.dumps(by_nodes, indent=1) + "\n")
        report(by_nodes)
        if args.cfg:
            first_run = work / f"{args.nodes[0]}-nodes" / "output"
            report_predictions(by_nodes, first_run, measured_profile(args, work))


if __name__ == "__main__":
    run_command(main)
