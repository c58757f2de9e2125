"""All-to-all, pipelining and the tuner on a cluster of network namespaces (netns.py); needs root,
Linux and iproute2.

    sudo .venv/bin/python benchmarks/cluster.py          (everything, 15 minutes on 2 idle cores)
    sudo .venv/bin/python benchmarks/cluster.py exchange --layouts 4x4 --rates 100
    sudo .venv/bin/python benchmarks/cluster.py pipeline tuner --rounds 5

exchange: linear against 2DH and channels: milliseconds, bytes and messages that cross nodes.
pipeline: one layer, forward and backward, by pipeline degree; overlap is `(t(1) - t(d)) /
          min(exchange, work)`, where work is the time of the same rows without a network, and
          exchange is t(1) - work. In brackets: the same where t(d) cannot be less than the
          processor time of work and exchange together, all ranks', over the cores.
tuner:    its choice and every fixed strategy in the same interleaved rounds, on three workloads.

All ranks share the machine's cores, so only rates well below what these can push show a network;
see docs/results.md.
"""

# N nodes of g ranks, W = N g; T tokens of a rank, E experts, M model dim, H hidden dim

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from netns import Cluster, node_bytes_sent, require

from moe_core import MoEConfig, MoELayer
from moe_core.parallel import (
    ParallelStrategy,
    Tuner,
    all_to_all,
    count_traffic,
    make_expert_groups,
)
from moe_core.parallel.cost_model import candidates
from swinv2_moe.measure.rounds import interleaved, machine
from swinv2_moe.measure.spread import Times, median_and_spread, ratios
from swinv2_moe.train.distributed import World

FLOATS = 2**20 // 4  # floats in one MiB
# floats that each rank sends, including those to itself
SIZES = {"64 KiB": FLOATS // 16, "1 MiB": FLOATS, "4 MiB": 4 * FLOATS}
DEGREES = (1, 2, 4, 8)
PIPELINE = {"tokens": 4096, "model_dim": 256, "num_experts": 4}
HIDDEN_DIMS = (1024, 2048)
WORKLOADS = {  # capacity factors of successive steps
    "small": ({"tokens": 256, "model_dim": 64, "hidden_dim": 128, "num_experts": 2}, (2.0,)),
    "large": ({"tokens": 4096, "model_dim": 256, "hidden_dim": 1024, "num_experts": 2}, (2.0,)),
    "fluctuating": (
        {"tokens": 4096, "model_dim": 256, "hidden_dim": 512, "num_experts": 4},
        (0.05, 1.0, 0.2),
    ),
}


def slowest(seconds: float) -> float:
    """The largest value over all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def timed(function: Callable[[], object]) -> float:
    """Milliseconds from a common start until the last rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    function()
    return 1e3 * slowest(time.perf_counter() - start)


def cpu_milliseconds(function: Callable[[], object]) -> float:
    """CPU time of all threads of all ranks, divided by the number of cores: a lower bound for any
    schedule."""
    dist.barrier()
    start = time.process_time()
    function()
    used = torch.tensor(time.process_time() - start, dtype=torch.float64)
    dist.all_reduce(used)
    return 1e3 * used.item() / os.cpu_count()


def interleaved_over_ranks(
    alternatives: dict[str, Callable[[], object]], rounds: int, device: str = "cpu"
) -> dict[str, Times]:
    """`interleaved` over the default group, with one warm-up round."""
    world = World(
        dist.get_rank(), dist.get_world_size(), torch.device(device), group=dist.group.WORLD
    )
    return interleaved(alternatives, rounds, warmup=1, world=world)


# On a rank


def exchange(rank: int, world_size: int, per_node: int, rounds: int) -> dict:
    """Measure every size and algorithm: times, bytes that this node sent to other nodes, and
    messages that this rank sent to other nodes."""
    group = make_expert_groups(world_size, ranks_per_node=per_node)
    measured = {}
    for size, floats in SIZES.items():
        rows = torch.arange(floats, dtype=torch.float32).view(world_size, -1) + rank
        ways = {}
        for name in ("linear", "2dh", "channels"):
            ways[name] = partial(all_to_all, rows, group, algorithm=name, ranks_per_node=per_node)
            assert torch.equal(ways[name](), ways["linear"]())
        times = interleaved_over_ranks(ways, rounds)
        for name, way in ways.items():
            before = node_bytes_sent()
            dist.barrier()
            with count_traffic(group) as traffic:
                way()
            dist.barrier()
            far = sum(
                n for other, n in traffic.messages.items() if other // per_node != rank // per_node
            )
            measured[f"{size}, {name}"] = {
                "ms": times[name],
                "bytes": node_bytes_sent() - before,
                "messages": far,
            }
    return measured


class Step:
    """Forward and backward of one layer on this rank's tokens."""

    def __init__(
        self, group, strategy, tokens: int, factors: tuple[float, ...] = (0.0,), **dims
    ) -> None:
        torch.manual_seed(0)
        self.layer = MoELayer(
            MoEConfig(**dims, capacity_factor=0.0, gate_noise=0.0), group, strategy=strategy
        )
        self.x = torch.randn(tokens, dims["model_dim"]).requires_grad_()
        self.factors = factors

    def __call__(self) -> None:
        """Run a step with each of the capacity factors."""
        for factor in self.factors:
            y, aux_loss = self.layer(self.x, capacity_factor=factor)
            (y.sum() + aux_loss).backward()


def pipeline(rank: int, world_size: int, per_node: int, hidden_dim: int, rounds: int) -> dict:
    """Milliseconds of a step for each degree; of the same work without an exchange of rows
    ("work"); and of CPU time per core in a step with d = 1 ("cores")."""
    group = make_expert_groups(world_size, ranks_per_node=per_node)
    shape = PIPELINE | {"hidden_dim": hidden_dim}
    steps = {f"d={d}": Step(group, ParallelStrategy(1, d), **shape) for d in DEGREES}
    steps["work"] = Step(
        None, ParallelStrategy(), **shape | {"num_experts": shape["num_experts"] // world_size}
    )
    times = interleaved_over_ranks(steps, rounds)
    return times | {"cores": [cpu_milliseconds(steps["d=1"]) for _ in range(rounds)]}


def tuner(rank: int, world_size: int, per_node: int, workload: str, rounds: int) -> dict:
    """Milliseconds of the tuner's steps until its decision, then of the tuned layer and of every
    fixed strategy."""
    group = make_expert_groups(world_size, ranks_per_node=per_node)
    dims, factors = WORKLOADS[workload]
    for _ in range(2):  # start-up costs of any run do not belong to the tuner's cost
        Step(make_expert_groups(world_size), ParallelStrategy(), factors=factors, **dims)()
    tuned = Step(group, "auto", factors=factors, **dims)
    first = []
    tuner_of_group = Tuner.of(group)
    while len(tuner_of_group.decisions()) < len(factors) and len(first) < 200:
        first.append(timed(tuned))
    fixed = candidates(dims["num_experts"], world_size, world_size // per_node)
    steps = {"tuner": tuned} | {str(s): Step(group, s, factors=factors, **dims) for s in fixed}
    times = interleaved_over_ranks(steps, rounds)
    decisions = {
        f"capacity <= {2**key.bucket}": str(s) for key, s in tuner_of_group.decisions().items()
    }
    return {
        "exploring_ms": first,
        "ms": times,
        "decisions": decisions,
        "trials": tuner_of_group.trials,
    }


# In the command


def clusters(layouts: list[tuple[int, int]], rates: list[float]) -> Iterator[tuple[Cluster, str]]:
    """Yield a cluster for each layout and rate, and the first cells of its rows."""
    for nodes, per_node in layouts:
        with Cluster(nodes, per_node) as cluster:
            for rate in rates:
                cluster.set_rate(rate)
                yield cluster, f"| {nodes} x {per_node} | {rate:g} |"


def report_exchange(layouts: list[tuple[int, int]], rates: list[float], rounds: int) -> dict:
    print(
        "\n| nodes x ranks | Mbit/s | a rank sends | | ms (quartiles) | to linear | a node's bytes"
        " | messages |"
    )
    print("|---|---|---|---|---|---|---|---|")
    records = {}
    for cluster, where in clusters(layouts, rates):
        by_rank = cluster.run(exchange, cluster.ranks_per_node, rounds, timeout=600)
        measured = records[where] = by_rank[0]
        for name, values in measured.items():
            size, algorithm = name.split(", ")
            ratio = median_and_spread(ratios(values["ms"], measured[f"{size}, linear"]["ms"]), 2)
            print(
                f"{where} {size} | {algorithm} | {median_and_spread(values['ms'])} | {ratio} |"
                f" {values['bytes']:,}"
                f" | {values['messages']} |"
            )
    return records


def report_pipeline(layouts: list[tuple[int, int]], rates: list[float], rounds: int) -> dict:
    print(
        "\n| nodes x ranks | Mbit/s | H | exchange's share at d = 1 |",
        " | ".join(f"d = {d}" for d in DEGREES),
        "|",
    )
    print("|---|---|---|---|" + "---|" * len(DEGREES))
    records = {}
    for cluster, where in clusters(layouts, rates):
        for hidden_dim in HIDDEN_DIMS:
            times = cluster.run(pipeline, cluster.ranks_per_node, hidden_dim, rounds, timeout=600)[
                0
            ]
            records[f"{where} {hidden_dim} |"] = times
            print(f"{where} {hidden_dim} | {_pipeline_cells(times)}")
    return records


def _pipeline_cells(times: dict[str, list[float]]) -> str:
    share = statistics.median(
        1 - work / one for work, one in zip(times["work"], times["d=1"], strict=True)
    )
    cells = []
    for d in DEGREES:
        hidden, allowed = (
            statistics.median(
                (one - t) / (one - max(work, one - work, cores))
                for t, one, work, cores in zip(
                    times[f"d={d}"], times["d=1"], times["work"], limit, strict=True
                )
            )
            for limit in ([0.0] * len(times["work"]), times["cores"])
        )
        overlap = "" if d == 1 else f", {100 * hidden:.0f}% ({100 * allowed:.0f}%)"
        cells.append(f"{median_and_spread(times[f'd={d}'], 0)} ms{overlap}")
    return f"{100 * share:.0f}% | {' | '.join(cells)} |"


def report_tuner(layouts: list[tuple[int, int]], rates: list[float], rounds: int) -> dict:
    print(
        "\n| nodes x ranks | Mbit/s | workload | tuner's | to the best fixed | worst to it |"
        " explored | decided |"
    )
    print("|---|---|---|---|---|---|---|---|")
    records = {}
    for cluster, where in clusters(layouts, rates):
        for workload in WORKLOADS:
            measured = cluster.run(tuner, cluster.ranks_per_node, workload, rounds, timeout=600)[0]
            records[f"{where} {workload} |"] = measured
            print(f"{where} {workload} | {_tuner_cells(measured)}")
    return records


def _tuner_cells(measured: dict) -> str:
    medians = {name: statistics.median(times) for name, times in measured["ms"].items()}
    tuned = medians.pop("tuner")
    best, worst = min(medians, key=medians.get), max(medians, key=medians.get)
    lost = sum(measured["exploring_ms"]) / tuned - len(measured["exploring_ms"])  # steps
    return (
        f"{median_and_spread(measured['ms']['tuner'])} ms"
        f" | {tuned / medians[best]:.3f} ({best}) | {medians[worst] / tuned:.2f} ({worst})"
        f" | {len(measured['exploring_ms'])} steps, {lost:.1f} lost: {lost / 10:.1f}% of 1,000"
        f" | {'; '.join(f'{key}: {value}' for key, value in measured['decisions'].items())} |"
    )


PARTS = {"exchange": report_exchange, "pipeline": report_pipeline, "tuner": report_tuner}
DEFAULTS = {  # nodes x ranks, Mbit/s
    "exchange": ([(2, 2), (2, 4), (4, 4)], [100.0, 1000.0]),
    "pipeline": ([(2, 2)], [150.0, 300.0]),
    "tuner": ([(2, 2)], [200.0]),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--layouts", nargs="+", metavar="NxG", help="nodes x ranks per node")
    parser.add_argument(
        "--rates", nargs="+", type=float, metavar="MBIT", help="of each node's link"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every number")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    require()
    torch.set_num_threads(1)
    print(machine("cpu"))
    records = {}
    for part in args.parts or PARTS:
        layouts, rates = DEFAULTS[part]
        if args.layouts:
            layouts = [tuple(map(int, layout.split("x"))) for layout in args.layouts]
        records[part] = PARTS[part](layouts, args.rates or rates, args.rounds)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), **records}) + "\n")


if __name__ == "__main__":
    main()
