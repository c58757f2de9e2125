"""Measure images/s of a configuration's model and of the same model without experts.

All run in interleaved rounds. Prints tables and writes throughput.csv.

    swinv2-moe throughput --cfg quickstart_digits --output output/throughput \\
        --batch-sizes 1 64
    swinv2-moe throughput --cfg FILE --output DIR --mode inference training \\
        --dtypes float32 bfloat16 --capacity-factors 1.25 0 --compile off on
    swinv2-moe throughput --cfg FILE --output DIR --batch-sizes 1 8 --dtypes bfloat16 --graph
    torchrun --nproc_per_node 8 -m swinv2_moe throughput --cfg FILE --output DIR --mode training \\
        --batch-sizes 128
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from swinv2_moe.commands.options import (
    CommandParser,
    add_config_argument,
    add_opts_argument,
    output_directory,
)
from swinv2_moe.measure.configurations import DTYPES, PASSES, SWITCH, SpeedOptions, combinations
from swinv2_moe.measure.spread import latencies, median_and_spread
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from swinv2_moe.measure.throughput import Row, Side

DEFAULT = SpeedOptions()


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_config_argument(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="for throughput.csv")
    parser.add_argument(
        "--mode", nargs="+", default=DEFAULT.mode, metavar="MODE", help=_choices(PASSES)
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=int,
        default=DEFAULT.batch_sizes,
        metavar="N",
        help="images per rank",
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=DEFAULT.dtypes, metavar="DTYPE", help=_choices(DTYPES)
    )
    parser.add_argument(
        "--capacity-factors",
        nargs="+",
        type=float,
        default=(),
        metavar="F",
        help="0: dropless (default: as configured)",
    )
    parser.add_argument(
        "--compile", nargs="+", default=DEFAULT.compile, metavar="SWITCH", help=_choices(SWITCH)
    )
    parser.add_setting("--rounds", DEFAULT.rounds, "measured rounds", "N")
    parser.add_setting("--warmup", DEFAULT.warmup, "unmeasured rounds first", "N")
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="replay CUDA graphs of passes and steps (default: on one GPU, where they can be)",
    )
    add_opts_argument(parser)
    return parser.parse_args()


def _choices(allowed: Iterable[str]) -> str:
    return f"one or more of {', '.join(allowed)}"


def speed_table(row: Row) -> Table:
    """Images/s of each model in one combination, in Markdown; at most 100 columns."""
    percentiles = "/".join(latencies(row.product))
    titles = ["", "images/s", "MFU", "experts / it", f"ms {percentiles}"]
    lines = []
    for name, side in row.sides().items():
        ratio = ""
        if side is not row.moe:
            ratio = median_and_spread(row.ratio(), 3)
        rate = _rate(row.images_per_second(side))
        mfu = f"{statistics.median(row.mfu(side)):.1%}"
        lines.append([name, rate, mfu, ratio, _latency(side)])
    return number_table(titles, lines, markdown=True)


def cost_table(rows: Sequence[Row]) -> Table:
    """Memory and the time of the first call of each model in every combination, in Markdown."""
    lines = []
    for row in rows:
        lines.append([str(row.combination), "", "", ""])
        for name, side in row.sides().items():
            peak, held = _mebibytes(side.peak_memory), _mebibytes(side.held)
            lines.append([f"  {name}", peak, held, f"{side.first_call:.1f}"])
    return number_table(["", "peak MiB", "held MiB", "first call, s"], lines, markdown=True)


def summary(row: Row) -> str:
    """The heading of a combination's table: how its tokens were routed."""
    as_graphs = ", CUDA graphs" if row.is_graph else ""
    load = f"{row.dropped:.1%} dropped, largest load {row.largest_load:.2f}"
    return f"{row.combination}{as_graphs}: {load}"


def _rate(values: Sequence[float]) -> str:
    return median_and_spread(values, _digits(max(values)))


def _mebibytes(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 2**20:,.1f}"


def _latency(side: Side) -> str:
    values = latencies(side.times).values()
    return " / ".join(f"{value:,.{_digits(value)}f}" for value in values)


def _digits(value: float) -> int:
    """Number of decimal places with which about three digits are shown."""
    if value >= 100:
        return 0
    if value >= 10:
        return 1
    return 2


def main() -> None:
    args = parse()
    options = SpeedOptions(
        tuple(args.mode),
        tuple(args.batch_sizes),
        tuple(args.dtypes),
        tuple(args.capacity_factors),
        tuple(args.compile),
        args.rounds,
        args.warmup,
        args.graph,
    )
    plan = combinations(args.cfg, args.opts, options)
    output = output_directory(args.output)
    from swinv2_moe.measure import throughput

    # wide enough that no row of a table wraps
    console = Console(width=500)
    rows: list[Row] = []
    for row in throughput.measure(plan, options.rounds, options.warmup, options.graph):
        if not rows:
            title = throughput.headline(plan, row.ranks)
            console.print(title, *throughput.protocol(row, options.warmup))
        rows.append(row)
        throughput.write_csv(rows, output / "throughput.csv")
        console.print(summary(row))
        console.print(speed_table(row))
    if rows:  # only on the main rank
        console.print(cost_table(rows))
        console.print(f"{output}/throughput.csv")
