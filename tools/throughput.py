"""Images/s of a configuration's model beside its dense twin, in interleaved rounds: tables,
throughput.csv and .png.

python tools/throughput.py --cfg configs/quickstart_digits.yaml --output output/throughput
--batch-sizes 1 64 python tools/throughput.py --cfg FILE --output DIR --mode inference training
--dtypes float32 bfloat16 \\
    --capacity-factors 1.25 0 --compile off on
torchrun --nproc_per_node 8 tools/throughput.py --cfg FILE --output DIR --mode training
--batch-sizes 128
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from swinv2_moe.command import CommandParser, output_directory, run_command
from swinv2_moe.measure import throughput, throughput_report
from swinv2_moe.measure.rounds import latencies, median_and_spread
from swinv2_moe.measure.throughput import DTYPES, PASSES, SWITCH, Options, Row, Side
from swinv2_moe.tables import number_table

DEFAULT = Options()


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--cfg", required=True, metavar="FILE", help="a YAML file below configs/, or your own"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="where throughput.csv and throughput.png go"
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
        help="per rank",
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
        help="0: dropless; default: as configured",
    )
    parser.add_argument(
        "--compile", nargs="+", default=DEFAULT.compile, metavar="SWITCH", help=_choices(SWITCH)
    )
    parser.add_argument("--rounds", type=int, default=DEFAULT.rounds, metavar="N")
    parser.add_argument(
        "--warmup",
        type=int,
        default=DEFAULT.warmup,
        metavar="N",
        help="rounds before those that count",
    )
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="any configuration keys, in pairs",
    )
    return parser.parse_args()


def _choices(allowed: Sequence[str]) -> str:
    return f"one or more of {', '.join(allowed)}"


def table_of(
    rows: Sequence[Row], both: dict[str, Callable[[Row, Side], str]], one: dict[str, Callable]
) -> Table:
    """Markdown: `both` has two columns for each title, with experts and dense; `one` has one."""
    titles = [f"{title}, {side}" for title in both for side in ("experts", "dense")]
    lines = []
    for row in rows:
        cells = [cell(row, side) for cell in both.values() for side in (row.moe, row.dense)]
        cells += [cell(row) for cell in one.values()]
        lines.append([str(row.combination), *cells])
    return number_table(["", *titles, *one], lines, markdown=True)


SPEED = (
    {
        "images/s": lambda row, side: _rate(row.images_per_second(side)),
        "MFU": lambda row, side: _share(row.mfu(side)),
    },
    {"experts / dense": lambda row: median_and_spread(row.ratio(), 3)},
)
COST = (
    {
        "peak MiB": lambda row, side: (
            "-" if side.peak_memory is None else f"{side.peak_memory / 2**20:,.1f}"
        ),
        "held MiB": lambda row, side: f"{side.held / 2**20:,.1f}",
    },
    {
        "dropped": lambda row: f"{row.dropped:.1%}",
        "largest load": lambda row: f"{row.largest_load:.2f}",
    },
)
COMPILATION = {"first call, s": lambda row, side: f"{side.first_call:.1f}"}


def _rate(values: Sequence[float]) -> str:
    return median_and_spread(values, 0 if min(values) >= 100 else 2)


def _share(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1%}"


def _latency(side: Side) -> str:
    return " / ".join(f"{value:,.1f}" for value in latencies(side.times).values())


def main() -> None:
    args = parse()
    chosen = (args.mode, args.batch_sizes, args.dtypes, args.capacity_factors, args.compile)
    options = Options(*map(tuple, chosen), args.rounds, args.warmup)
    plan = throughput.combinations(args.cfg, args.opts, options)
    output = output_directory(args.output)
    # wide: a line of a table is a line
    console, rows = Console(width=500, highlight=False, markup=False), []
    for row in throughput.measure(plan, options.rounds, options.warmup):
        if not rows:
            title = throughput_report.headline(plan, row.ranks)
            console.print(f"{title}\n{throughput_report.protocol(row, options.warmup)}")
        rows.append(row)
        throughput_report.write_csv(rows, output / "throughput.csv")
        console.print(f"{row.combination}: experts / dense {median_and_spread(row.ratio(), 3)}")
    if rows:  # the main rank's
        throughput_report.draw(rows, title, output / "throughput.png")
        both, one = COST
        both = {
            f"ms {'/'.join(latencies(rows[0].product))}": lambda row, side: _latency(side)
        } | both
        both = both | (COMPILATION if "on" in args.compile else {})
        console.print(
            table_of(rows, *SPEED),
            table_of(rows, both, one),
            f"{output}/throughput.csv, throughput.png",
        )


if __name__ == "__main__":
    run_command(main)
