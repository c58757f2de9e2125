"""Measure images/s of a configuration's model and of the same model without experts.

All run in interleaved rounds. Prints tables and writes throughput.csv and throughput.png.

    python tools/throughput.py --cfg configs/quickstart_digits.yaml --output output/throughput \\
        --batch-sizes 1 64
    python tools/throughput.py --cfg FILE --output DIR --mode inference training \\
        --dtypes float32 bfloat16 --capacity-factors 1.25 0 --compile off on
    python tools/throughput.py --cfg FILE --output DIR --mode inference training \\
        --dtypes float32 float16 --baseline einsum
    python tools/throughput.py --cfg FILE --output DIR --batch-sizes 1 8 --dtypes bfloat16 --graph
    torchrun --nproc_per_node 8 tools/throughput.py --cfg FILE --output DIR --mode training \\
        --batch-sizes 128
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from swinv2_moe.command import (
    CommandParser,
    add_config_argument,
    add_opts_argument,
    output_directory,
)
from swinv2_moe.measure.spread import latencies, median_and_spread
from swinv2_moe.measure.throughput_options import DTYPES, PASSES, SWITCH, Options
from swinv2_moe.tables import number_table

if TYPE_CHECKING:
    from swinv2_moe.measure.throughput import Row, Side

DEFAULT = Options()


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_config_argument(parser)
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="for throughput.csv and throughput.png"
    )
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
    parser.add_argument(
        "--rounds", type=int, default=DEFAULT.rounds, metavar="N", help="measured rounds"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=DEFAULT.warmup,
        metavar="N",
        help="unmeasured rounds first",
    )
    parser.add_argument(
        "--baseline",
        default=DEFAULT.baseline,
        metavar="MODEL",
        help="dense; einsum: also the same model with fairseq's einsum dispatch",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="replay CUDA graphs: inference on one GPU, for small batches",
    )
    add_opts_argument(parser)
    return parser.parse_args()


def _choices(allowed: Sequence[str]) -> str:
    return f"one or more of {', '.join(allowed)}"


def table_of(
    rows: Sequence[Row],
    per_model: dict[str, Callable[[Row, Side], str]],
    per_row: dict[str, Callable[[Row], str]],
) -> Table:
    """A table in Markdown with a line for each row.

    Args:
        per_model: cells by title; each title has a column for each model.
        per_row: cells by title; each title has one column.
    """
    titles = [""]
    for title in per_model:
        titles += [f"{title}, {name}" for name in rows[0].sides()]
    titles += list(per_row)
    lines = []
    for row in rows:
        cells = [str(row.combination)]
        for cell in per_model.values():
            cells += [cell(row, side) for side in row.sides().values()]
        for cell in per_row.values():
            cells.append(cell(row))
        lines.append(cells)
    return number_table(titles, lines, markdown=True)


SPEED = (
    {
        "images/s": lambda row, side: _rate(row.images_per_second(side)),
        "MFU": lambda row, side: _share(row.mfu(side)),
    },
    {"experts / dense": lambda row: median_and_spread(row.ratio(), 3)},
)
COST = (
    {
        "peak MiB": lambda row, side: _mebibytes(side.peak_memory),
        "held MiB": lambda row, side: _mebibytes(side.held),
    },
    {
        "dropped": lambda row: f"{row.dropped:.1%}",
        "largest load": lambda row: f"{row.largest_load:.2f}",
    },
)
COMPILATION = {"first call, s": lambda row, side: f"{side.first_call:.1f}"}


def _over_einsum(row: Row) -> str:
    from swinv2_moe.measure.einsum_baseline import PUBLISHED_RATIO

    assert row.einsum is not None
    published = PUBLISHED_RATIO[row.combination.mode]
    return f"{median_and_spread(row.ratio(row.einsum), 3)}; published {published}"


def _rate(values: Sequence[float]) -> str:

    digits = 0 if min(values) >= 100 else 2
    return median_and_spread(values, digits)


def _mebibytes(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 2**20:,.1f}"


def _share(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%}"


def _latency(side: Side) -> str:
    return " / ".join(f"{value:,.1f}" for value in latencies(side.times).values())


def main() -> None:
    args = parse()
    from swinv2_moe.measure.throughput_plan import combinations

    options = Options(
        tuple(args.mode),
        tuple(args.batch_sizes),
        tuple(args.dtypes),
        tuple(args.capacity_factors),
        tuple(args.compile),
        args.rounds,
        args.warmup,
        args.baseline,
        args.graph,
    )
    plan = combinations(args.cfg, args.opts, options)
    output = output_directory(args.output)
    from swinv2_moe.measure import throughput, throughput_report

    # wide enough that no row of a table wraps
    console = Console(width=500, highlight=False, markup=False)
    rows: list[Row] = []
    measured = throughput.measure(
        plan, options.rounds, options.warmup, options.baseline, options.graph
    )
    for row in measured:
        if not rows:
            title = throughput_report.headline(plan, row.ranks)
            if options.graph:
                title += ", CUDA graphs"
            console.print(f"{title}\n{throughput_report.protocol(row, options.warmup)}")
        rows.append(row)
        throughput_report.write_csv(rows, output / "throughput.csv")
        console.print(f"{row.combination}: experts / dense {median_and_spread(row.ratio(), 3)}")
    if rows:  # only on the main rank
        throughput_report.draw(rows, title, output / "throughput.png")
        speed_per_model, speed_per_row = SPEED
        if rows[0].einsum is not None:
            speed_per_row = speed_per_row | {"experts / einsum": _over_einsum}
        console.print(table_of(rows, speed_per_model, speed_per_row))
        cost_per_model, cost_per_row = COST
        percentiles = "/".join(latencies(rows[0].product))
        cost_per_model = {f"ms {percentiles}": lambda row, side: _latency(side)} | cost_per_model
        if "on" in args.compile:
            cost_per_model |= COMPILATION
        console.print(table_of(rows, cost_per_model, cost_per_row))
        console.print(f"{output}/throughput.csv, throughput.png")
