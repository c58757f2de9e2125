"""A run as one HTML file: curves, experts, predictions, configuration, environment. It opens
offline, on a phone too.

python tools/report.py output/mine                                     writes
output/mine/report.html python tools/report.py output/mine --compare output/dense --output both.html
"""

from pathlib import Path

from swinv2_moe.command import CommandParser, run_command
from swinv2_moe.config import config_from_text
from swinv2_moe.errors import UserError
from swinv2_moe.measure.report import render
from swinv2_moe.measure.run_record import read_runs


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="of tools/train.py, finished or not")
    parser.add_argument("--compare", metavar="RUN_DIR", help="another run, side by side")
    parser.add_argument("--output", metavar="HTML", help="default: report.html in RUN_DIR")
    parser.add_argument(
        "--data", metavar="DIR", help="where the images of the predictions lie, if they have moved"
    )
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="any configuration keys, in pairs",
    )
    args = parser.parse_args()
    runs = read_runs([Path(path) for path in (args.run, args.compare) if path])
    if args.data and not Path(args.data).is_dir():
        raise UserError(f"--data {args.data}: is not a directory")
    # what is wrong with them later may be the checkpoint's fault, and only costs the predictions
    for run in runs:
        config_from_text(run.config.dump(), str(run.directory), args.opts)
    output = Path(args.output or runs[0].directory / "report.html")
    page = render(runs, args.data, args.opts)
    try:
        output.write_text(page)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from error
    print(f"{output}: {len(page) / 1e6:.1f} MB")


if __name__ == "__main__":
    run_command(main)
