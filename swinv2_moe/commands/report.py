"""Write one HTML file about a run: curves, experts, mistakes, configuration, environment.

The file needs no network. By default it is report.html in the run directory.

    swinv2-moe report output/mine
    swinv2-moe report output/mine --compare output/dense --output both.html
    swinv2-moe report output/mine --watch   # during the training
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_argument,
    add_opts_argument,
    check_output_file,
    write_text,
)
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines

if TYPE_CHECKING:
    from swinv2_moe.measure.report_validation import ReportValidation
    from swinv2_moe.measure.run_record import RunRecord

WATCH = 30  # seconds between two updates of the page
POLL = 1  # seconds between two checks for the first logged step


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="a run, finished or not")
    parser.add_argument("--compare", metavar="RUN_DIR", help="another run, side by side")
    parser.add_argument("--output", metavar="HTML", help="default: report.html in RUN_DIR")
    add_checkpoint_argument(parser)
    parser.add_argument(
        "--data", metavar="DIR", help="the validation images, if they have moved since the training"
    )
    images = "at most so many validation images, evenly spaced; 0: all"
    parser.add_setting("--images", 5000, images, "N")
    parser.add_argument(
        "--watch",
        type=int,
        nargs="?",
        const=WATCH,
        default=0,
        metavar="SECONDS",
        help=f"write the file again every so many seconds until the run ends (default: {WATCH})",
    )
    add_opts_argument(parser)
    args = parser.parse_args()
    for option in ("images", "watch"):
        value = getattr(args, option)
        if value < 0:
            raise UserError(f"--{option} is {value}, it must not be negative")
    if args.data and not Path(args.data).is_dir():
        raise UserError(f"--data {args.data}: is not a directory")
    check_output_file(args.output)
    return args


def main() -> None:
    args = parse()
    directories = [Path(args.run)]
    if args.compare:
        directories.append(Path(args.compare))
    output = Path(args.output or directories[0] / "report.html")
    validations: dict[tuple[str, str], ReportValidation] = {}
    runs = read_begun(directories, wait=args.watch > 0)
    while not write_report(runs, output, validations, args):
        time.sleep(args.watch)
        runs = read_begun(directories, wait=True)


def read_begun(directories: list[Path], wait: bool) -> list[RunRecord]:
    """Read the runs. With `wait`, wait until each run has logged a step."""
    from swinv2_moe.measure.run_record import NotBegunError, read_runs

    told = False
    while True:
        try:
            return read_runs(directories)
        except NotBegunError as error:
            if not wait:
                raise
            if not told:
                print_lines(f"waiting: {error}", flush=True)
            told = True
            time.sleep(POLL)


def write_report(
    runs: list[RunRecord],
    output: Path,
    validations: dict[tuple[str, str], ReportValidation],
    args: argparse.Namespace,
) -> bool:
    """Write the page.

    Args:
        validations: results of earlier calls, by the result of `select_checkpoint`.

    Returns:
        Whether the page is final.
    """
    from swinv2_moe.config import config_from_text

    # An error in --opts ends the command. An error in the checkpoint only omits the predictions.
    for run in runs:
        config_from_text(run.config.dump(), str(run.directory), args.opts)
    from swinv2_moe.checkpoints.checkpoint import select_checkpoint
    from swinv2_moe.measure.report import render
    from swinv2_moe.measure.report_validation import validate

    used = []
    for run in runs:
        selected = select_checkpoint(str(run.directory), args.checkpoint)
        if selected not in validations:
            validations[selected] = validate(selected, args.data, args.opts, args.images)
            if validations[selected].problem:
                line = f"warning: {validations[selected].problem}"
                print_lines(line, file=sys.stderr, flush=True)
        used.append(validations[selected])
    finished = not args.watch or all(run.summary for run in runs)
    refresh = 0
    if not finished:
        refresh = args.watch
    page = render(runs, used, refresh)
    write_text(output, page)
    print_lines(f"{output}: {len(page) / 1e6:.1f} MB", flush=True)
    return finished
