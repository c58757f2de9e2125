"""How far each phase of a training step is from this machine's measured peaks: table, roofline.json
and roofline.png.

python tools/roofline.py --cfg configs/quickstart_digits.yaml --output output/roofline
python tools/roofline.py --cfg configs/imagenette_96.yaml --data DIR --batch-size 64 --output
output/roofline torchrun --nproc_per_node 2 tools/roofline.py --cfg configs/quickstart_digits.yaml
--output output/roofline2

Data without a disk: --opts DATA.DATASET digits. The disk is the one of --output.
"""

import argparse
import json

from rich.console import Console
from rich.table import Table

from swinv2_moe.command import CommandParser, output_directory, run_command
from swinv2_moe.errors import UserError
from swinv2_moe.measure import roofline
from swinv2_moe.measure.roofline import PHASES, Roofline
from swinv2_moe.measure.roofline_figure import draw
from swinv2_moe.measure.rounds import check_rounds, median_and_spread
from swinv2_moe.tables import number_table


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--cfg", required=True, metavar="FILE", help="a YAML file below configs/, or your own"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="the data set (DATA.PATH); a folder with train/ and val/"
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="for the results, and the disk that is measured",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="images per rank; default: as configured"
    )
    parser.add_argument("--rounds", type=int, default=10, metavar="N")
    parser.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="rounds before those that count"
    )
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="any configuration keys, in pairs",
    )
    return parser.parse_args()


def table_of(found: Roofline) -> Table:
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
        if name not in found.phases:
            rows.append([name] + ["-"] * (len(titles) - 1))
            continue
        phase, share = found.phases[name], found.share_of_step(name)
        work, (bound, of_roof) = phase.work, phase.bound()
        amounts = [work.flops / 1e9, work.memory / 1e6, work.exchange / 1e6, work.disk / 1e6]
        amounts += [phase.rate("flops") / 1e9, phase.rate("memory") / 1e9]
        cells = [f"{amount:,.3g}" if amount else "-" for amount in amounts]
        times = median_and_spread(phase.times, 2)
        of_step = "-"
        if share is not None:
            of_step = f"{share:.1%}"
        rows.append([name, times, of_step, *cells, bound, f"{of_roof:.1%}"])
    return number_table(titles, rows, text_columns=["bound by"], markdown=True)


def show(found: Roofline) -> None:
    # wide: a line of the table is a line
    console = Console(width=500, highlight=False, markup=False)
    console.print(
        f"{found.title}, without mixup, accumulation or averaged weights\n"
        f"{found.machine}; medians of {len(found.step)} rounds after {found.warmup} to warm up"
    )
    for peak in found.peaks.values():
        unit = "B/s"
        if peak is found.peaks["flops"]:
            unit = "FLOP/s"
        console.print(f"peak: {peak.rate / 1e9:,.2f} G{unit}, {peak.what}")
    console.print(table_of(found))
    console.print(
        f"whole step: {median_and_spread(found.step, 2)} ms, of which its phases, alone, make"
        f" {median_and_spread([100 * share for share in found.accounted()], 1)}%; data are read"
        " meanwhile, a checkpoint"
        f" makes training stand still for {found.stall:.2f} s"
    )
    if any(phase.bound()[1] > 1 for phase in found.phases.values()):
        console.print("above 100% of a roof: operators found in a cache what others had left there")


def main() -> None:
    args = parse()
    check_rounds(args.rounds, args.warmup)
    config = roofline.configuration(args.cfg, args.opts, args.data, args.batch_size)
    output = output_directory(args.output)
    found = roofline.measure(config, output, args.rounds, args.warmup)
    if found is None:  # the main rank has it
        return
    show(found)
    draw(found, output / "roofline.png")
    try:
        (output / "roofline.json").write_text(json.dumps(found.record(), indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"--output {output}/roofline.json: cannot be written ({error.strerror})"
        ) from error


if __name__ == "__main__":
    run_command(main)
