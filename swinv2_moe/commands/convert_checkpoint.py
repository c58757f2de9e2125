"""Inspect a checkpoint, or convert it from and to the files of other programs.

    swinv2-moe convert-checkpoint inspect output/mine
    swinv2-moe convert-checkpoint import swin-moe \\
        swin_moe_small_patch4_window12_192_8expert_32gpu_22k.pth \\
        --cfg in22k/swin_moe_small_window12_192_8expert --output output/released
    swinv2-moe convert-checkpoint export swin-moe output/released --ranks 32 \\
        --output theirs.pth
    swinv2-moe convert-checkpoint export hub output/mine --output my-model
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.call import next_line
from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_argument,
    add_left,
    add_opts_argument,
)
from swinv2_moe.errors import UserError, short
from swinv2_moe.input_paths import check_files_exist
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from swinv2_moe.convert.summary import Summary

# kinds of files
IMPORTS = ("swin-moe", "tutel", "single", "dense", "vmoe")
EXPORTS = ("swin-moe", "tutel", "single", "hub")
DTYPES = ("float32", "bfloat16", "int8")
_MAX_NAMES_BYTES = 1 << 26
_MOST_FILES = 6  # names in a line


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "inspect", help="print what a checkpoint holds; exit status 1 if a file is damaged"
    )
    command.add_argument("source", metavar="CHECKPOINT", help="directory of a checkpoint or run")
    add_checkpoint_argument(command, default="latest")
    command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("import", help="write a checkpoint from other programs' weights")
    command.add_argument(
        "kind",
        choices=IMPORTS,
        help="single: a file of `export single`; dense: weights to be upcycled; vmoe: V-MoE's",
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="the file; for files of several ranks, X.pth for X.pth.rank0, ..., or x-{rank}.pth;"
        " for vmoe X for X.index and its shards",
    )
    command.add_argument(
        "--cfg",
        metavar="FILE",
        help="configuration of the model; a single file contains it, and that of vmoe follows from"
        " its tensors",
    )
    add_opts_argument(command)
    command.add_argument(
        "--class-names",
        metavar="FILE",
        help="text file with a name per line, in the order of the classifier's outputs",
    )
    add_left(command, "--noise", "experts with noise became no better than copies")
    command.add_argument(
        "--output", required=True, metavar="DIR", help="directory of the new checkpoint"
    )
    command = commands.add_parser("export", help="write other programs' files from a checkpoint")
    command.add_argument(
        "kind",
        choices=EXPORTS,
        help="single: one .safetensors file with all the weights; hub: a directory that"
        " timm.create_model loads",
    )
    command.add_argument("source", metavar="CHECKPOINT", help="directory of a checkpoint or run")
    add_checkpoint_argument(command)
    command.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="write a file for each of N ranks; default: one for the whole model",
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="single: how weights are stored; int8: large matrices in a byte for each number, with"
        " a scale for each row, the rest in bfloat16",
    )
    command.add_argument(
        "--newer",
        action="store_true",
        help="swin-moe: layout of newer Tutel in place of that of the released files",
    )
    command.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="the file, for hub the directory; with --ranks, .rank0, ... is added, or the rank"
        " replaces {rank}",
    )
    args = parser.parse_args()
    check_options(args)
    return args


def check_options(args: argparse.Namespace) -> None:
    """Raise UserError for an option that does not belong to the kind of file."""
    if args.command == "export" and args.newer and args.kind != "swin-moe":
        raise UserError(f"--newer: is for swin-moe, not for {args.kind}")
    if args.command == "export" and args.dtype != DTYPES[0] and args.kind != "single":
        raise UserError(f"--dtype {args.dtype}: is for single, not for {args.kind}")
    if args.command == "import" and args.cfg and args.kind == "vmoe":
        raise UserError(f"--cfg {args.cfg}: the sizes of vmoe are those of its tensors; see --opts")
    if args.command == "import" and args.opts and not args.cfg and args.kind != "vmoe":
        raise UserError("--opts: needs --cfg")


def show(summary: Summary) -> None:
    console = Console()
    epoch = "weights alone"
    if summary.epoch is not None:
        epoch = f"epoch {summary.epoch}"
    classes = ""
    if summary.classes:
        classes = f", {summary.classes} named classes"
    console.print(summary.directory, f"step {summary.step}, {epoch}, saved {summary.saved}")
    console.print(f"{summary.model}{classes}")
    sections = [
        [name, f"{files:,}", f"{size / 1e6:,.1f}"]
        for name, (files, size) in summary.sections.items()
    ]
    console.print(number_table(["section", "files", "MB"], sections))
    if summary.layers:
        layers = [
            [name, str(layer.experts), f"{layer.bytes / 1e6:,.1f}"]
            for name, layer in summary.layers.items()
        ]
        console.print(number_table(["layer", "experts", "MB"], layers))
    for file, problem in summary.damaged.items():
        console.print(f"{file} {problem}")
    if not summary.damaged:
        console.print("every file has its checksum")


def class_names(file: str | None) -> list[str] | None:
    """The names in a file, one per line; None without a file.

    Raises:
        UserError: a file that cannot be read or is empty, a blank name, a name that occurs twice.
    """
    from swinv2_moe.files import read_bounded

    try:
        if file is None:
            return None
        names = read_bounded(file, _MAX_NAMES_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--class-names {file}: cannot be read ({error})") from error
    if not names:
        raise UserError(f"--class-names {file}: is empty")
    lines: dict[str, int] = {}  # by name
    for line, name in enumerate(names, start=1):
        if not name.strip():
            raise UserError(f"--class-names {file}: line {line} is {short(name)}, a blank name")
        if name in lines:
            raise UserError(
                f"--class-names {file}: line {line} repeats {short(name)} of line {lines[name]}"
            )
        lines[name] = line
    return names


def written(paths: list[Path]) -> list[str]:
    """A line for each written file or directory, with its size and the files in a directory."""
    lines = []
    for path in paths:
        files, names = [path], ""
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            names = f": {', '.join(str(file.relative_to(path)) for file in files[:_MOST_FILES])}"
            if len(files) > _MOST_FILES:
                names += f", ... ({len(files)} files)"
        size = sum(file.stat().st_size for file in files)
        lines.append(f"{path}{names}, {size / 1e6:,.1f} MB")
    return lines


def main() -> None:
    args = parse()
    try:
        run(args)
    except PermissionError as error:  # for example of a parent directory
        raise UserError(f"{error.filename}: no permission") from error


def run(args: argparse.Namespace) -> None:
    from swinv2_moe.config import load_config

    config = None
    if args.command != "import":
        check_files_exist("CHECKPOINT", [args.source])
    if args.command == "import" and args.cfg:
        config = load_config(args.cfg, args.opts)
    from swinv2_moe.checkpoints.checkpoint import DamagedError, select_checkpoint
    from swinv2_moe.convert.convert import export_weights, import_weights
    from swinv2_moe.convert.summary import summarize

    if args.command == "export":
        source, selected = select_checkpoint(args.source, args.checkpoint)
        if selected:
            print_lines(selected)
        legacy = not args.newer
        files = export_weights(
            args.kind, Path(source), Path(args.output), args.ranks, legacy, args.dtype
        )
        print_lines(*written(files))
        if args.kind == "hub":
            print_lines(f"{args.output}/README.md says how to load and upload it")
    elif args.command == "import":
        names = class_names(args.class_names)
        output = Path(args.output)
        notes = import_weights(args.kind, Path(args.source), output, config, names, args.opts)
        print_lines(
            *notes,
            *written([output]),
            f"next: {next_line('evaluate', args.output)} --data DIR",
        )
    else:
        try:
            source, _ = select_checkpoint(args.source, args.checkpoint)
            summary = summarize(Path(source))
        except DamagedError as error:  # of meta.json: the rest cannot be read
            print_lines(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        if args.json:
            print_lines(*json.dumps(dataclasses.asdict(summary), indent=1).split("\n"))
        else:
            show(summary)
        sys.exit(int(bool(summary.damaged)))
