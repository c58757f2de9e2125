"""One MoE layer as the paper's features are added one after the other, on a cluster of network
namespaces (netns.py); needs root, Linux and iproute2.

sudo .venv/bin/python benchmarks/staircase.py                 (everything, about 20 minutes on 2
                                                              idle cores)
sudo .venv/bin/python benchmarks/staircase.py layer --layouts 2x2 --delays 0 1
sudo .venv/bin/python benchmarks/staircase.py --quick         (tiny shapes: does it run?)
torchrun --nproc-per-node 8 benchmarks/staircase.py --device cuda    (NCCL, the layer alone)

layer:    forward and backward of the einsum layer of GShard and fairseq, then with kernels, the 2DH
          all-to-all, the flexible layout with a static exchange, the strategy without chunks that
          the cost model ranks first (adaptive r), and the one with chunks (pipelining). Outputs and
          gradients of the input are compared. Predictions use the machine as `calibrate` measures
          it, in the same processes.
exchange: the linear and the 2DH all-to-all by size, predicted and measured.
overlap:  the part of min(exchange, work) that d chunks hide, between two ranks, in runs of their
          own; see cluster.py.

Shapes: sections 5.2 and table 2 of arXiv 2206.03382 (Tutel), with two experts per rank, K = 2 and
f = 1; M and H are divided by 16, tokens by 16 and 128. At 1 Gbit/s a rank of 2 cores then has about
as many FLOPs per byte of the link as an A100 with HDR has at the original shapes.
"""

# N nodes of g ranks, W = N g; T tokens of a rank, E experts, K top-k, M model dim, H hidden dim

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from cluster import DEGREES, interleaved_over_ranks, pipeline
from netns import Cluster, require
from torch import Tensor

from moe_core import MoEConfig, MoELayer, use_einsum
from moe_core.parallel import (
    ExpertGroup,
    Machine,
    ParallelStrategy,
    all_to_all,
    calibrate,
    make_expert_groups,
)
from moe_core.parallel.cost_model import LayerShape, layer_time, ranked
from swinv2_moe.measure.rounds import machine
from swinv2_moe.measure.spread import median_and_spread, quartiles

TOP_K = 2
LOCAL_EXPERTS = 2
SHAPES = {  # M = H, T
    "section 5.2": (128, 1024),
    "table 2": (256, 512),
}
QUICK_SHAPES = {"quick": (16, 32)}
SIZES = (2**14, 2**18, 2**22)  # bytes that a rank sends, including those to itself
QUICK_SIZES = (2**14,)
ROW = 64  # floats per row in the exchange
LAYOUTS = [(2, 1), (2, 2), (2, 4), (4, 4)]
DELAYS = (0.0, 0.2, 1.0)  # ms, in one direction
RATE = 1000.0  # Mbit/s of each node's link
# Rates at which the exchange is 30 to 60% of a step with these hidden dims
OVERLAP = ((2048, 600.0), (6144, 200.0))
QUICK_OVERLAP = ((16, 1000.0),)
OVERLAP_RUNS = 5
CLOSE = 1e-4  # tolerance, relative to the largest value of a result
# on GPUs: the shapes
GPU_SHAPES = {"section 5.2": (2048, 16384), "table 2": (4096, 65536)}


# On a rank


def calibrated(per_node: int, device: torch.device) -> Machine:
    """The measured machine. If ranks share cores, each has a part of a core's speed. `calibrate`
    itself takes the fastest run, in which the rank had a core for itself."""
    measured = calibrate(dist.group.WORLD, per_node, device)
    if device.type == "cuda":
        return measured
    ranks_per_core = max(dist.get_world_size() / len(os.sched_getaffinity(0)), 1)
    return measured.slowed(ranks_per_core)


class Staircase:
    """The steps of one layer on this rank, by name, with their predicted seconds."""

    def __init__(
        self, group: ExpertGroup, per_node: int, dim: int, tokens: int, device: torch.device
    ) -> None:
        config = MoEConfig(dim, dim, LOCAL_EXPERTS * group.size, top_k=TOP_K, capacity_factor=1.0)
        torch.manual_seed(0)
        self.layer = MoELayer(config, group, device=device)
        self.einsum_layer = MoELayer(replace(config, kernels="torch"), group, device=device)
        self.einsum_layer.load_state_dict(self.layer.state_dict())
        use_einsum(self.einsum_layer)
        torch.manual_seed(1 + group.rank)
        self.x = torch.randn(tokens, dim, device=device).requires_grad_()
        self.machine = calibrated(per_node, device)
        self.shape = LayerShape.of(config, tokens, element_size=self.x.element_size())
        self.strategies = _strategies(self.machine, self.shape, group.size, per_node)
        self.group_size = group.size

    def run(self, name: str) -> tuple[Tensor, Tensor]:
        """Run a step. Returns its output and the gradient of its input."""
        layer, options = self.layer, {"strategy": self.strategies[name]}
        if name == "einsum":
            layer, options = self.einsum_layer, {}
        self.x.grad = None
        layer.zero_grad(set_to_none=True)
        y, aux_loss = layer(self.x, **options)
        (y.square().sum() + aux_loss).backward()
        assert self.x.grad is not None
        return y.detach(), self.x.grad

    def predicted(self, name: str) -> float:
        """Predicted seconds of a step."""
        strategy = self.strategies[name]
        seconds = layer_time(self.machine, self.shape, self.group_size, strategy).total
        if name == "einsum":
            # Dispatch and combine are products with a mask [T, E C]: two forward, three backward.
            slots = self.shape.num_experts * self.shape.rows_per_expert
            products = 5 * 2 * self.shape.tokens * slots * self.shape.model_dim
            seconds += products / self.machine.flops_fp32
        return seconds

    def largest_difference(self) -> float:
        """The largest difference between the results of any step and of the einsum layer, relative
        to their largest value."""
        expected = self.run("einsum")
        largest = 0.0
        for name in self.strategies:
            for result, reference in zip(self.run(name), expected, strict=True):
                difference = (result - reference).abs().max() / reference.abs().max()
                largest = max(largest, difference.item())
        return largest


def _strategies(
    machine: Machine, shape: LayerShape, group_size: int, per_node: int
) -> dict[str, ParallelStrategy]:
    """The strategy of each step. 2DH is omitted with one rank per node, and with one node."""
    linear = ParallelStrategy(1, 1, "linear", per_node)
    strategies = {"einsum": replace(linear, exchange="static"), "kernels": linear}
    algorithm = "linear"
    if 1 < per_node < group_size:
        algorithm = "2dh"
        strategies["2dh"] = replace(linear, all_to_all=algorithm)
    strategies["flexible"] = replace(linear, all_to_all=algorithm, exchange="static")
    strategies["adaptive r"] = ranked(machine, shape, group_size, per_node, degrees=(1,))[0][0]
    strategies["pipelining"] = ranked(machine, shape, group_size, per_node, DEGREES)[0][0]
    return strategies


def run_layer(
    rank: int,
    world_size: int,
    per_node: int,
    dim: int,
    tokens: int,
    rounds: int,
    device: str = "cpu",
) -> dict[str, dict]:
    """For each step, its strategy and its predicted and measured milliseconds.

    Raises:
        RuntimeError: the steps have different results.
    """
    group = make_expert_groups(world_size, ranks_per_node=per_node)
    steps = Staircase(group, per_node, dim, tokens, torch.device(device))
    difference = steps.largest_difference()
    if not difference <= CLOSE:
        raise RuntimeError(f"the steps' results differ by {difference:.1e} of the largest value")
    names = list(steps.strategies)
    times = interleaved_over_ranks(
        {name: partial(steps.run, name) for name in names}, rounds, device
    )
    results = {}
    for name in names:
        results[name] = {
            "strategy": str(steps.strategies[name]),
            "predicted": 1e3 * steps.predicted(name),
            "measured": list(times[name]),
            "difference": difference,
        }
    return results


def run_exchange(
    rank: int, world_size: int, per_node: int, sizes: tuple[int, ...], rounds: int
) -> dict[str, dict]:
    """For each size and algorithm, the predicted and measured milliseconds of one direction."""
    group = make_expert_groups(world_size, ranks_per_node=per_node)
    machine = calibrated(per_node, torch.device("cpu"))
    results = {}
    for size in sizes:
        rows_to_each = size // 4 // ROW // world_size
        rows = torch.randn(world_size * rows_to_each, ROW)
        shape = LayerShape(
            1, ROW, 1, world_size, 1, rows_to_each, 4, training=False, counts_first=False
        )
        exchanges = {
            name: partial(all_to_all, rows, group, algorithm=name, ranks_per_node=per_node)
            for name in ("linear", "2dh")
        }
        times = interleaved_over_ranks(exchanges, rounds)
        for name in exchanges:
            strategy = ParallelStrategy(1, 1, name, per_node)
            both_directions = layer_time(machine, shape, world_size, strategy).exchange
            results[f"{size} {name}"] = {
                "predicted": 1e3 * both_directions / 2,
                "measured": list(times[name]),
            }
    return results


# In the command


def clusters(args: argparse.Namespace, layouts: list) -> Iterator[tuple[Cluster, str]]:
    """Yield a cluster for each layout and delay, and the first cells of its rows."""
    for nodes, per_node in layouts:
        with Cluster(nodes, per_node, args.rate) as cluster:
            for delay in args.delays:
                cluster.set_delay(delay)
                yield cluster, f"| {nodes} x {per_node} | {args.rate:g} | {delay:g} |"


def report_layer(args: argparse.Namespace) -> dict:
    print(
        "\n| nodes x ranks | Mbit/s | delay, ms | shape | step | strategy | predicted, ms |"
        " measured, ms (quartiles) | error | speed to einsum |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    shapes = QUICK_SHAPES if args.quick else SHAPES
    records = {}
    for cluster, where in clusters(args, args.layouts):
        for shape, (dim, tokens) in shapes.items():
            steps = cluster.run(
                run_layer, cluster.ranks_per_node, dim, tokens, args.rounds, timeout=600
            )[0]
            records[f"{where} {shape}"] = steps
            print_steps(f"{where} {shape}", steps)
    return records


def print_steps(where: str, steps: dict[str, dict]) -> None:
    baseline = steps["einsum"]["measured"]
    for name, step in steps.items():
        speed = [base / time for base, time in zip(baseline, step["measured"], strict=True)]
        print(
            f"{where} | {name} | {step['strategy']} | {predicted_and_measured(step)}"
            f" | {median_and_spread(speed, 2)} |",
            flush=True,
        )


def predicted_and_measured(step: dict) -> str:
    """Cells with predicted and measured time, and the error of the prediction."""
    median = statistics.median(step["measured"])
    error = step["predicted"] / median - 1
    return f"{step['predicted']:.1f} | {median_and_spread(step['measured'])} | {100 * error:+.0f}%"


def report_exchange(args: argparse.Namespace) -> dict:
    print(
        "\n| nodes x ranks | Mbit/s | delay, ms | a rank sends, KiB | linear: predicted, ms |"
        " measured, ms | error | 2DH: predicted | measured | error | 2DH to linear: predicted |"
        " measured |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    sizes = QUICK_SIZES if args.quick else SIZES
    layouts = [(nodes, per_node) for nodes, per_node in args.layouts if min(nodes, per_node) > 1]
    records = {}
    for cluster, where in clusters(args, layouts):
        by_rank = cluster.run(run_exchange, cluster.ranks_per_node, sizes, args.rounds, timeout=600)
        records[where] = times = by_rank[0]
        for size in sizes:
            linear, hierarchical = times[f"{size} linear"], times[f"{size} 2dh"]
            pairs = zip(hierarchical["measured"], linear["measured"], strict=True)
            measured = [a / b for a, b in pairs]
            print(
                f"{where} {size // 1024} | {predicted_and_measured(linear)}"
                f" | {predicted_and_measured(hierarchical)}"
                f" | {hierarchical['predicted'] / linear['predicted']:.2f}"
                f" | {median_and_spread(measured, 2)} |",
                flush=True,
            )
    return records


def report_overlap(args: argparse.Namespace) -> dict:
    print("\n| H | Mbit/s | run | d = 1, ms | exchange's share |", end="")
    print("".join(f" d = {d} hides |" for d in DEGREES[1:]))
    print("|---|---|---|---|---|" + "---|" * len(DEGREES[1:]))
    records = {}
    with Cluster(2, 1) as cluster:
        for hidden_dim, rate in QUICK_OVERLAP if args.quick else OVERLAP:
            cluster.set_rate(rate)
            for run in range(1 if args.quick else OVERLAP_RUNS):
                times = cluster.run(pipeline, 1, hidden_dim, args.rounds, timeout=600)[0]
                where = f"| {hidden_dim} | {rate:g} | {run + 1} |"
                records[where] = times
                print(f"{where} {overlap_cells(times)}", flush=True)
    return records


def overlap_cells(times: dict[str, list[float]]) -> str:
    """Cells with the times without overlap, the exchange's share of these times, and the hidden
    parts."""
    plain, work = times["d=1"], times["work"]
    exchange = [t - w for t, w in zip(plain, work, strict=True)]
    shares = [e / t for e, t in zip(exchange, plain, strict=True)]
    cells = [median_and_spread(plain, 0), f"{100 * statistics.median(shares):.0f}%"]
    for d in DEGREES[1:]:
        hidden = []
        for t1, td, e, w in zip(plain, times[f"d={d}"], exchange, work, strict=True):
            hidden.append(100 * (t1 - td) / min(e, w))
        low, middle, high = quartiles(hidden)
        cells.append(f"{middle:.0f}% ({low:.0f} - {high:.0f})")
    return " | ".join(cells) + " |"


def run_under_torchrun(args: argparse.Namespace) -> None:
    """Measure the layer with NCCL, on the GPUs of torchrun's ranks."""
    if not torch.cuda.is_available() or "RANK" not in os.environ:
        print("NCCL: not measured; --device cuda needs GPUs and torchrun")
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    for shape, (dim, tokens) in (QUICK_SHAPES if args.quick else GPU_SHAPES).items():
        steps = run_layer(rank, size, per_node, dim, tokens, args.rounds, str(device))
        if rank == 0:
            print_steps(f"| {size // per_node} x {per_node} | NCCL | {shape}", steps)
    dist.destroy_process_group()


PARTS = {"layer": report_layer, "exchange": report_exchange, "overlap": report_overlap}


def layout(text: str) -> tuple[int, int]:
    nodes, per_node = text.split("x")
    return int(nodes), int(per_node)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument(
        "--layouts", nargs="+", type=layout, metavar="NxG", help="nodes x ranks per node"
    )
    parser.add_argument("--rate", type=float, default=RATE, help="Mbit/s of each node's link")
    parser.add_argument("--delays", nargs="+", type=float, help="ms of each link, one way")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, 2 x 2 ranks, one round")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every number")
    args = parser.parse_args()
    args.layouts = args.layouts or ([(2, 2)] if args.quick else LAYOUTS)
    args.delays = args.delays or ((0.2,) if args.quick else DELAYS)
    args.rounds = args.rounds or (1 if args.quick else 9)
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    if args.device == "cuda":
        run_under_torchrun(args)
        return
    require()
    print(machine("cpu"))
    records = {part: PARTS[part](args) for part in args.parts or PARTS}
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), **records}) + "\n")


if __name__ == "__main__":
    main()
