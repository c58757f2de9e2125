"""The whole network, SwinV2-MoE beside its dense twin: images/s and MFU in inference and in
training.

    python benchmarks/model.py                     (about 4 minutes on two cores)
    python benchmarks/model.py --graph             (also as CUDA graphs)
    python benchmarks/model.py --timm              (the dense network beside timm's eager one)

It measures as `throughput` does (swinv2_moe.measure.throughput); this keeps the rows. A CPU
has no graphs: there --graph measures the usual passes alone. --timm measures one model, with its
own attention and with timm's forward pass of it; both compute the same, which is compared first.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from timm.models.swin_transformer_v2 import WindowAttention
from yacs.config import CfgNode

from swinv2_moe.commands.call import run_command
from swinv2_moe.config import all_sections
from swinv2_moe.measure.configurations import Combination, Plan, SpeedOptions, combinations
from swinv2_moe.measure.spread import Times, median_and_spread, ratios
from swinv2_moe.measure.throughput import (
    Row,
    Subject,
    headline,
    measure,
    prepare,
    prepared_for_inference,
)
from swinv2_moe.models.attention import FusedWindowAttention
from swinv2_moe.ranks.world import open_world

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
TOLERANCE = 1e-4  # of --timm in fp32, relative to the largest value
NETWORK = ["", "images/s, experts", "dense", "experts / dense", "MFU, experts", "MFU, dense"]
TRUNK = ["", "images/s", "timm", "to timm"]

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
    parser.set_defaults(graph=False)  # `plans` reads it; only main below has the option
    return parser


def plans(args: argparse.Namespace) -> Iterator[Plan]:
    """The combinations of each mode, with their configurations."""
    opts = [*args.opts, "DEVICE", args.device]
    for mode in args.modes:
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
        for is_graph in kinds:
            for row in measure(plan, args.rounds, WARM_UP, graph=is_graph):
                yield entry_of(row, is_graph)


def entry_of(row: Row, is_graph: bool) -> Entry:
    name = str(row.combination)
    if is_graph:
        name = f"{name}, CUDA graph"
    sides = (row.moe, row.dense)
    speeds = [median_and_spread(row.images_per_second(side), 2) for side in sides]
    mfu = [median_and_spread(row.mfu(side), 3) for side in sides]
    times = {"moe_ms": row.moe.times, "dense_ms": row.dense.times, "product_ms": row.product}
    data = row.combination._asdict() | {key: list(value) for key, value in times.items()}
    data |= {"moe_mfu": row.mfu(row.moe), "dense_mfu": row.mfu(row.dense), "graph": is_graph}
    data |= {"dropped": row.dropped, "largest_load": row.largest_load}
    return [name, *speeds, median_and_spread(row.ratio(), 3), *mfu], data


# The dense network beside timm's


def eager():
    """A context in which attention is computed by timm."""
    return mock.patch.object(FusedWindowAttention, "forward", WindowAttention.forward)


def run_by_timm(subject: Subject) -> None:
    with eager():
        subject.run()


@torch.no_grad()
def check(subject: Subject, config: CfgNode) -> None:
    """Compare the logits of both attentions. Raises SystemExit if they differ."""
    device = next(subject.model.parameters()).device
    size = config.DATA.IMG_SIZE
    images = torch.randn(2, config.DATA.CHANNELS, size, size, device=device)
    training = subject.model.training
    subject.model.eval()
    ours = subject.model(images)
    with eager():
        theirs = subject.model(images)
    subject.model.train(training)
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not error < TOLERANCE:
        raise SystemExit(f"the two differ by {error:.1e} of the largest value")


def trunks(args: argparse.Namespace) -> Iterator[Entry]:
    for plan in plans(args):
        for combination, _, config in plan:
            yield trunk(args, combination, config)


def trunk(args: argparse.Namespace, combination: Combination, config: CfgNode) -> Entry:
    with open_world(args.device, config.TIMEOUT) as world:
        subject = prepare(combination.mode, all_sections(config), world)
        check(subject, config)
        runs = {"ours": subject.run, "timm": partial(run_by_timm, subject)}
        with prepared_for_inference([subject]):
            times = timed(runs, args.rounds, args.device)
    name = f"{combination.mode}, batch {combination.batch_size}, {combination.dtype}"
    images = 1e3 * combination.batch_size
    speeds = {key: Times((images / ms for ms in t), t.run) for key, t in times.items()}
    cells = [median_and_spread(speeds["ours"], 2), median_and_spread(speeds["timm"], 2)]
    cells.append(median_and_spread(ratios(speeds["ours"], speeds["timm"]), 3))
    return [name, *cells], {"name": name, **{key: list(t) for key, t in times.items()}}


def main() -> None:
    parser = make_parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--graph", action="store_true", help="also as CUDA graphs")
    what.add_argument("--timm", action="store_true", help="the dense network beside timm's")
    args = parser.parse_args()
    rows: list[list[str]] = []
    data: list[dict] = []
    if args.timm:
        title, columns, notes = "The dense network beside timm's", TRUNK, [CALLS_NOTE]
        entries = trunks(args)
    else:
        title, columns = "The whole network", NETWORK
        notes = ["MFU: share of what a large product of the same dtype reached in the round"]
        notes.append("one pass of the whole network between two synchronisations")
        if args.graph:
            title = "The whole network as CUDA graphs"
        entries = networks(args, notes)
    command = shlex.join(["python", "benchmarks/model.py", *sys.argv[1:]])
    table = Table(title, command, columns, rows, notes, data)
    for row, numbers in entries:
        rows.append(row)
        data.append(numbers)
        print(" | ".join(row), file=sys.stderr, flush=True)
        keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    run_command(main)
