"""The whole network, SwinV2-MoE beside its dense twin: images/s and MFU in inference and in
training.

    python benchmarks/model.py                     (about 4 minutes on two cores)
    python benchmarks/model.py --graph             (also as CUDA graphs)
    python benchmarks/model.py --experts 32 4      (each number of experts)

It measures as `throughput` does (swinv2_moe.measure.throughput); this keeps the rows. A CPU
has no graphs: there --graph measures the usual passes alone.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from results_file import Table, keep, publish

from swinv2_moe.commands.call import run_command
from swinv2_moe.measure.configurations import Plan, SpeedOptions, combinations
from swinv2_moe.measure.spread import median_and_spread
from swinv2_moe.measure.throughput import (
    Row,
    headline,
    measure,
)

CONFIG = Path(__file__).parent.parent / "configs/in22k"
CONFIGS = {  # the V2 form of the published recipes
    "cpu": CONFIG / "swin_moe_small_window12_192_8expert.yaml",
    "cuda": CONFIG / "swin_moe_base_window12_192_32expert.yaml",
}
BATCHES = {
    "cpu": {"inference": [1, 8], "training": [8]},
    "cuda": {"inference": [1, 128], "training": [128]},
}
SMALL_BATCHES = [1, 8]  # of inference with --graph
WARM_UP = 2
NETWORK = ["", "images/s, experts", "dense", "experts / dense", "MFU, experts", "MFU, dense"]

Entry = tuple[list[str], dict]  # a row of the table, and the numbers behind it


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=CONFIGS, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--cfg", type=Path)
    parser.add_argument(
        "--modes", nargs="+", choices=["inference", "training"], default=["inference", "training"]
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="of both modes")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--opts", nargs="+", default=["MODEL.TYPE", "swinv2_moe"], metavar="KEY VALUE"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    parser.add_argument("--experts", nargs="+", type=int, help="in place of NUM_EXPERTS")
    parser.set_defaults(graph=False)  # `plans` reads it; only main below has the option
    return parser


def plans(args: argparse.Namespace) -> Iterator[Plan]:
    """The combinations of each mode and number of experts, with their configurations."""
    for mode, experts in itertools.product(args.modes, args.experts or [0]):
        opts = [*args.opts, "DEVICE", args.device]
        if experts:
            opts += ["MODEL.MOE.NUM_EXPERTS", str(experts)]
        batches = BATCHES[args.device][mode]
        if args.graph and mode == "inference":
            batches = SMALL_BATCHES
        sizes = tuple(args.batch_sizes or batches)
        options = SpeedOptions((mode,), sizes, tuple(args.dtypes), rounds=args.rounds)
        yield combinations(args.cfg or CONFIGS[args.device], opts, options)


def networks(args: argparse.Namespace, notes: list[str]) -> Iterator[Entry]:
    """Both models in every combination; with --graph on a GPU, once more as CUDA graphs."""
    kinds = [False]
    if args.graph and args.device == "cuda":
        kinds.append(True)
    for plan in plans(args):
        title = headline(plan, 1)
        if title not in notes:
            notes.insert(0, title)
        experts = plan[0][1].MODEL.MOE.NUM_EXPERTS
        for is_graph in kinds:
            for row in measure(plan, args.rounds, WARM_UP, graph=is_graph):
                yield entry_of(row, experts, is_graph)


def entry_of(row: Row, experts: int, is_graph: bool) -> Entry:
    name = f"E = {experts}, {row.combination}"
    if is_graph:
        name = f"{name}, CUDA graph"
    sides = (row.moe, row.dense)
    speeds = [median_and_spread(row.images_per_second(side), 2) for side in sides]
    mfu = [median_and_spread(row.mfu(side), 3) for side in sides]
    times = {"moe_ms": row.moe.times, "dense_ms": row.dense.times, "product_ms": row.product}
    data = row.combination._asdict() | {key: list(value) for key, value in times.items()}
    data |= {"moe_mfu": row.mfu(row.moe), "dense_mfu": row.mfu(row.dense), "graph": is_graph}
    data |= {"experts": experts, "dropped": row.dropped, "largest_load": row.largest_load}
    return [name, *speeds, median_and_spread(row.ratio(), 3), *mfu], data


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--graph", action="store_true", help="also as CUDA graphs")
    args = parser.parse_args()
    rows: list[list[str]] = []
    data: list[dict] = []
    title = "The whole network"
    notes = ["MFU: share of what a large product of the same dtype reached in the round"]
    notes.append("one pass of the whole network between two synchronisations")
    if args.graph:
        title = "The whole network as CUDA graphs"
    command = shlex.join(["python", "benchmarks/model.py", *sys.argv[1:]])
    table = Table(title, command, NETWORK, rows, notes, data)
    for row, numbers in networks(args, notes):
        rows.append(row)
        data.append(numbers)
        print(" | ".join(row), file=sys.stderr, flush=True)
        keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    run_command(main)
