"""Watch a run in the terminal: its curves, experts, speed and the time that is left.

The picture follows the run and ends with it, or with Ctrl-C.

    swinv2-moe watch output/mine
    swinv2-moe watch output/mine --once   # one picture, also into a file or a pipe
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines

if TYPE_CHECKING:
    from swinv2_moe.measure.live_run import LiveRun
    from swinv2_moe.tables import Console

_HEIGHT = 24  # lines of the picture if the output is a file or a pipe


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="a run, finished or not")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument(
        "--every",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between two reads of the run (default: 1)",
    )
    args = parser.parse_args()
    if not 0 < args.every <= 3600:
        raise UserError(f"--every is {args.every}, it must be above 0 and at most 3600 seconds")
    return args


def main() -> None:
    args = parse()
    from swinv2_moe.measure.live_run import LiveRun
    from swinv2_moe.tables import Console

    console = Console(soft_wrap=False)
    run = LiveRun(Path(args.run))
    run.read()
    if console.is_terminal and not args.once:
        try:
            wait(run, args.every)
            follow(run, console, args.every)
        except KeyboardInterrupt:
            if run.last is None:
                return
    if run.last is None:  # also if a resumed run has stopped before it repeated all steps
        raise UserError(f"{run.directory}: has not logged a step yet")
    show(run, console)


def wait(run: LiveRun, every: float) -> None:
    """Wait for the first logged step.

    Raises:
        UserError: the run has ended without a logged step.
    """
    if run.last is None:
        print_lines(f"waiting: {run.directory} has not logged a step yet", flush=True)
    while run.last is None:
        if run.state(time.time()) == "stopped":
            raise UserError(f"{run.directory}: has logged no step, and is not running")
        time.sleep(every)
        run.read()


def follow(run: LiveRun, console: Console, every: float) -> None:
    """Show the run on the whole terminal until the run ends."""
    from rich.live import Live

    from swinv2_moe.measure.live_picture import picture

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = time.time()
            if run.last is not None:  # otherwise a resumed run is about to repeat all steps
                live.update(picture(run, console.width, console.height, now), refresh=True)
            if run.state(now) in ("finished", "stopped"):
                return
            time.sleep(every)
            run.read()


def show(run: LiveRun, console: Console) -> None:
    """Print one picture."""
    from swinv2_moe.measure.live_picture import picture

    height = _HEIGHT
    if console.is_terminal:
        height = console.height - 1  # the last line is for the prompt
    console.print(picture(run, console.width, height, time.time()), height=height)
