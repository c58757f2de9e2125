"""Write a run with fewer experts, or a dense one, from a run with experts.

    swinv2-moe compress output/mine --experts 4 --output output/mine4
    swinv2-moe compress output/mine --dense --output output/mine_dense

Experts are removed and merged by what a sample of the training images shows of them. The new run is
read by every command that reads a run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.call import next_line
from swinv2_moe.commands.options import CommandParser, add_checkpoint_arguments, check_opts
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_data, check_run
from swinv2_moe.output import say
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from swinv2_moe.convert.compress import Result


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser, required=True, metavar="DIR", help="directory of the new run")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--experts", type=int, metavar="N", help="experts of each layer")
    size.add_argument(
        "--dense", action="store_true", help="a dense FFN in place of the experts of each layer"
    )
    parser.add_setting("--images", 512, "training images of the sample, evenly spaced", "N")
    args = parser.parse_args()
    if not args.dense and args.experts < 1:
        raise UserError(f"--experts is {args.experts}, it must be at least 1")
    return args


def show(result: Result) -> None:
    console = Console()
    rows = []
    for name, layer in result.layers.items():
        rows.append([name, f"{layer.change:.1%}", layer.how])
    console.print(number_table(["layer", "changed", "how"], rows, text_columns=["layer", "how"]))
    console.print(
        "changed: share of the layer's output on the sample that is another one, 0 to 100%"
    )
    before, after = result.before, result.after
    console.print(
        f"{result.images:,} training images: loss {before.loss:.3f} -> {after.loss:.3f}, top-1"
        f" {before.top1:.2f}% -> {after.top1:.2f}%"
    )


def main() -> None:
    args = parse()
    check_opts(args.opts)
    check_run(args.resume)
    check_data(args.data)
    from swinv2_moe.convert.compress import compress
    from swinv2_moe.train.checkpoint import select_checkpoint

    output = Path(args.output)
    resume, selected = select_checkpoint(args.resume, args.checkpoint)
    result = compress(
        resume, output, args.experts or 0, args.data, args.dataset, args.opts, args.images
    )
    if selected:
        say(selected)
    show(result)
    say(f"next: {next_line('evaluate', output)}")
