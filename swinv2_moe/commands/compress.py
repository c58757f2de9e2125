"""Write a run with fewer experts from a run with experts.

    swinv2-moe compress output/mine --experts 6 --output output/mine6

A sample of the training images decides which experts are removed. Every command that reads a run
reads the new one. The command that is printed lets the original teach it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.call import next_line
from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_arguments,
    add_left,
    chosen_checkpoint,
)
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from swinv2_moe.convert.compress import Result


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser, required=True, metavar="DIR", help="directory of the new run")
    parser.add_argument(
        "--experts", type=int, required=True, metavar="N", help="experts of each layer"
    )
    parser.add_setting("--images", 512, "training images of the sample, evenly spaced", "N")
    add_left(parser, "--epochs", "run the command that is printed; TRAIN.EPOCHS is in it")
    args = parser.parse_args()
    if args.experts < 1:
        raise UserError(f"--experts is {args.experts}, it must be at least 1")
    return args


def show(result: Result) -> None:
    console = Console()
    rows = []
    for name, layer in result.layers.items():
        rows.append([name, f"{layer.change:.1%}", ", ".join(map(str, layer.kept))])
    columns = ["layer", "changed", "experts that stay"]
    console.print(number_table(columns, rows, text_columns=["layer", columns[2]]))
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
    resume, selected = chosen_checkpoint(args)
    from swinv2_moe.config import as_opts
    from swinv2_moe.convert.compress import compress, distillation_keys

    output = Path(args.output)
    result = compress(resume, output, args.experts, args.data, args.dataset, args.opts, args.images)
    if selected:
        print_lines(selected)
    show(result)
    keys = distillation_keys(output, resume)
    words = ["--cfg", output / "config.yaml", "--output", f"{output}_distilled"]
    words += ["--opts", *as_opts(keys)]
    print_lines(
        f"next: {next_line('evaluate', output)}",
        f"or a short training with the original as the teacher: {next_line('train', *words)}",
    )
