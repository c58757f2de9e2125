"""Write a run with fewer experts from a run with experts.

    swinv2-moe compress output/mine --experts 6 --output output/mine6
    swinv2-moe compress output/mine --experts 6 --output output/mine6 --epochs 10

A sample of the training images decides which experts are removed and merged. Every command that
reads a run reads the new one. With --epochs the original then teaches it, and the run DIR_distilled
is the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.call import next_line, run_tool
from swinv2_moe.commands.options import CommandParser, add_checkpoint_arguments, check_opts
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_data, check_run
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from swinv2_moe.convert.compress import Result

EPOCHS = 10  # of the distillation whose command is printed


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser, required=True, metavar="DIR", help="directory of the new run")
    parser.add_argument(
        "--experts", type=int, required=True, metavar="N", help="experts of each layer"
    )
    parser.add_setting("--images", 512, "training images of the sample, evenly spaced", "N")
    parser.add_setting("--epochs", 0, "epochs of the distillation; 0: print its command", "N")
    args = parser.parse_args()
    if args.epochs < 0:
        raise UserError(f"--epochs is {args.epochs}, it must not be negative")
    if args.experts < 1:
        raise UserError(f"--experts is {args.experts}, it must be at least 1")
    return args


def distilled_run(output: Path) -> Path:
    """The directory of the distillation of a compressed run."""
    return output.with_name(f"{output.name}_distilled")


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
    from swinv2_moe.checkpoints.checkpoint import select_checkpoint
    from swinv2_moe.config import as_opts
    from swinv2_moe.convert.compress import compress, distillation_keys

    output = Path(args.output)
    if args.epochs and distilled_run(output).exists():
        raise UserError(f"--output {output}: {distilled_run(output)} already exists")
    resume, selected = select_checkpoint(args.resume, args.checkpoint)
    result = compress(resume, output, args.experts, args.data, args.dataset, args.opts, args.images)
    if selected:
        print_lines(selected)
    show(result)
    keys = distillation_keys(result.config, output, resume, args.epochs or EPOCHS)
    words = ["--cfg", output / "config.yaml", "--output", distilled_run(output)]
    words += ["--opts", *as_opts(keys)]
    if args.epochs:
        run_tool("train", *words)
    else:
        print_lines(
            f"next: {next_line('evaluate', output)}",
            f"or a short training with the original as the teacher: {next_line('train', *words)}",
        )
