"""Write one HTML file about a run: curves, experts, predictions, configuration, environment.

The file needs no network. By default it is report.html in the run directory.

    python tools/report.py output/mine
    python tools/report.py output/mine --compare output/dense --output both.html
"""

from pathlib import Path

from swinv2_moe.command import CommandParser, add_opts_argument, write_text
from swinv2_moe.errors import UserError


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="a run, finished or not")
    parser.add_argument("--compare", metavar="RUN_DIR", help="another run, side by side")
    parser.add_argument("--output", metavar="HTML", help="default: report.html in RUN_DIR")
    parser.add_argument(
        "--data", metavar="DIR", help="the validation images, if they have moved since the training"
    )
    add_opts_argument(parser)
    args = parser.parse_args()
    from swinv2_moe.config import config_from_text
    from swinv2_moe.measure.report import render
    from swinv2_moe.measure.run_record import read_runs

    directories = [Path(args.run)]
    if args.compare:
        directories.append(Path(args.compare))
    runs = read_runs(directories)
    if args.data and not Path(args.data).is_dir():
        raise UserError(f"--data {args.data}: is not a directory")
    # Check --opts here: in `render`, an error may come from the checkpoint and only omits the
    # predictions.
    for run in runs:
        config_from_text(run.config.dump(), str(run.directory), args.opts)
    output = Path(args.output or runs[0].directory / "report.html")
    page = render(runs, args.data, args.opts)
    write_text(output, page)
    print(f"{output}: {len(page) / 1e6:.1f} MB")
