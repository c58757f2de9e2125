"""Look into a checkpoint, make one from other programs' weights, or theirs from one.

python tools/convert_checkpoint.py inspect output/mine
python tools/convert_checkpoint.py import swin-moe
swin_moe_small_patch4_window12_192_8expert_32gpu_22k.pth \\
    --cfg configs/in22k/swin_moe_small_window12_192_8expert.yaml --output output/released
python tools/convert_checkpoint.py export swin-moe output/released --ranks 32 --output theirs.pth
"""

import argparse
import dataclasses
import json
import sys
from itertools import groupby
from pathlib import Path

from rich.console import Console

from swinv2_moe.command import CommandParser, run_command
from swinv2_moe.config import load_config
from swinv2_moe.convert import EXPORTS, IMPORTS, Summary, export_weights, import_weights, summarize
from swinv2_moe.errors import UserError
from swinv2_moe.files import read_bounded
from swinv2_moe.tables import number_table
from swinv2_moe.train.checkpoint import DamagedError

_MAX_NAMES_BYTES = 1 << 26


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "inspect", help="what a checkpoint holds; exit status 1 if a file is damaged"
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="its directory, or a run's")
    command.add_argument("--json", action="store_true", help="as JSON")
    command = commands.add_parser("import", help="a checkpoint from other weights")
    command.add_argument(
        "kind", choices=IMPORTS, help="single: what `export single` wrote; dense: to be upcycled"
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="the file; of several ranks X.pth for X.pth.rank0, ..., or x-{rank}.pth",
    )
    command.add_argument("--cfg", metavar="FILE", help="the model; a single file holds its own")
    command.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="any configuration keys, in pairs",
    )
    command.add_argument(
        "--class-names", metavar="FILE", help="one a line, in the order of the classifier's outputs"
    )
    command.add_argument(
        "--noise", type=float, default=0.0, metavar="STD", help="dense: on experts, relative"
    )
    command.add_argument(
        "--output", required=True, metavar="DIR", help="the checkpoint's directory"
    )
    command = commands.add_parser("export", help="other programs' files from a checkpoint")
    command.add_argument(
        "kind", choices=EXPORTS, help="single: one .safetensors file with all the weights"
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="its directory, or a run's")
    command.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="a file for each of N ranks; default: the whole model",
    )
    command.add_argument(
        "--newer", action="store_true", help="swin-moe: as newer Tutel reads it, not as released"
    )
    command.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="the file; of ranks .rank0, ... is added, or put for {rank}",
    )
    args = parser.parse_args()
    if args.command == "import" and args.noise and args.kind != "dense":
        raise UserError(f"--noise {args.noise}: is for dense weights, not for {args.kind}")
    if args.command == "import" and args.opts and not args.cfg:
        raise UserError("--opts: needs --cfg")
    return args


def show(summary: Summary) -> None:
    console = Console(highlight=False, soft_wrap=True)
    epoch = "weights alone"
    if summary.epoch is not None:
        epoch = f"epoch {summary.epoch}"
    classes = ""
    if summary.classes:
        classes = f", {summary.classes} named classes"
    console.print(
        f"{summary.directory}\nstep {summary.step}, {epoch}, saved {summary.saved}", markup=False
    )
    console.print(f"{summary.model}{classes}", markup=False)
    sections = [
        [name, f"{files:,}", f"{size / 1e6:,.1f}"]
        for name, (files, size) in summary.sections.items()
    ]
    console.print(number_table(["section", "files", "MB"], sections))
    if summary.layers:
        layers = [
            [name, str(layer.experts), f"{layer.bytes / 1e6:,.1f}", ages_in_words(layer.ages)]
            for name, layer in summary.layers.items()
        ]
        columns = ["layer", "experts", "MB", "steps behind"]
        console.print(number_table(columns, layers, text_columns=["steps behind"]))
    damaged = [f"{file} {problem}" for file, problem in summary.damaged.items()]
    console.print("\n".join(damaged) or "every file has its checksum", markup=False)


def ages_in_words(ages: list[int]) -> str:
    """[40, 20, 0, 40] -> "40: experts 0, 3; 20: expert 1"."""
    ordered = sorted((-age, expert) for expert, age in enumerate(ages) if age)
    groups = [
        (-age, [str(expert) for _, expert in group])
        for age, group in groupby(ordered, lambda pair: pair[0])
    ]
    return (
        "; ".join(f"{age}: expert{'s' * (len(own) > 1)} {', '.join(own)}" for age, own in groups)
        or "0"
    )


def class_names(file: str | None) -> list[str] | None:
    try:
        if file is None:
            return None
        return read_bounded(file, _MAX_NAMES_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--class-names {file}: cannot be read ({error})") from error


def main() -> None:
    args = parse()
    try:
        run(args)
    except PermissionError as error:  # of a directory on the way, say
        raise UserError(f"{error.filename}: no permission") from error


def run(args: argparse.Namespace) -> None:
    if args.command == "export":
        export_weights(
            args.kind, Path(args.checkpoint), Path(args.output), args.ranks, not args.newer
        )
    elif args.command == "import":
        config = None
        if args.cfg:
            config = load_config(args.cfg, args.opts)
        names = class_names(args.class_names)
        import_weights(args.kind, Path(args.source), Path(args.output), config, names, args.noise)
    else:
        try:
            summary = summarize(Path(args.checkpoint))
        except DamagedError as error:  # meta.json: there is nothing more to tell
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        print(json.dumps(dataclasses.asdict(summary), indent=1)) if args.json else show(summary)
        sys.exit(1 if summary.damaged else 0)


if __name__ == "__main__":
    run_command(main)
