"""Compare each phase of a training step with this machine's measured peaks.

Prints a table and writes roofline.json and roofline.png.

    swinv2-moe roofline --cfg quickstart_digits --output output/roofline
    swinv2-moe roofline --cfg imagenette_96 --data DIR --batch-size 64 \\
        --output output/roofline
    torchrun --nproc_per_node 2 -m swinv2_moe roofline --cfg quickstart_digits \\
        --output output/roofline2

The disk that is measured is that of --output. --opts DATA.DATASET digits needs no data set.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from swinv2_moe.commands.options import (
    CommandParser,
    add_config_argument,
    add_opts_argument,
    output_directory,
    write_results,
)
from swinv2_moe.measure.configurations import repeatable_step
from swinv2_moe.measure.spread import check_rounds, median_and_spread
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from swinv2_moe.measure.roofline import Roofline


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_config_argument(parser)
    parser.add_argument(
        "--data", metavar="DIR", help="the data set (DATA.PATH); a folder with train/ and val/"
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="directory for the results; its disk is measured",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="images per rank; default: as configured"
    )
    parser.add_setting("--rounds", 10, "measured rounds", "N")
    parser.add_setting("--warmup", 2, "unmeasured rounds first", "N")
    add_opts_argument(parser)
    return parser.parse_args()


def table_of(result: Roofline) -> Table:
    from swinv2_moe.measure.phases import PHASES

    titles = [
        "phase",
        "ms (quartiles)",
        "of the step",
        "GFLOP",
        "memory MB",
        "sent MB",
        "disk MB",
        "GFLOP/s",
        "memory GB/s",
        "bound by",
        "of its roof",
    ]
    rows = []
    for name in PHASES:
        if name not in result.phases:
            rows.append([name] + ["-"] * (len(titles) - 1))
            continue
        phase, share = result.phases[name], result.share_of_step(name)
        work, (bound, of_roof) = phase.work, phase.bound()
        amounts = [work.flops / 1e9, work.memory / 1e6, work.exchange / 1e6, work.disk / 1e6]
        amounts += [phase.rate("flops") / 1e9, phase.rate("memory") / 1e9]
        row = [name, median_and_spread(phase.times, 2)]
        row.append("-" if share is None else f"{share:.1%}")
        row += [f"{amount:,.3g}" if amount else "-" for amount in amounts]
        if not bound:
            row += ["-", "-"]
        else:
            row += [bound, f"{of_roof:.1%}"]
        rows.append(row)
    return number_table(titles, rows, text_columns=["phase", "bound by"], markdown=True)


def show(result: Roofline) -> None:
    # wide enough that no row of the table wraps
    console = Console(width=500)
    console.print(
        f"{result.title}, without mixup, accumulation or averaged weights",
        f"{result.machine}; medians of {len(result.step)} rounds after {result.warmup} to warm up",
    )
    for peak in result.peaks.values():
        unit = "B/s"
        if peak is result.peaks["flops"]:
            unit = "FLOP/s"
        console.print(f"peak: {peak.rate / 1e9:,.2f} G{unit}, {peak.what}")
    console.print(table_of(result))
    exchange = ""
    if "exchange" in result.phases:
        exchange = (
            " Part of the exchange overlaps with computation; waiting for it counts as other."
        )
    console.print(
        f"whole step: {median_and_spread(result.step, 2)} ms; the times of its phases are torch's"
        f" profiler's.{exchange} Data are read in parallel. Saving a checkpoint stops training for"
        f" {result.stall:.2f} s."
    )
    if any(phase.bound()[1] > 1 for phase in result.phases.values()):
        console.print("above 100% of a roof: the data were already in a cache")


def main() -> None:
    args = parse()
    check_rounds(args.rounds, args.warmup)
    config = repeatable_step(args.cfg, args.opts, args.data, args.batch_size)
    output = output_directory(args.output)
    from swinv2_moe.measure import roofline

    result = roofline.measure(config, output, args.rounds, args.warmup)
    if result is None:  # not the main rank
        return
    show(result)
    roofline.draw(result, output / "roofline.png")
    write_results(output / "roofline.json", result.record())
