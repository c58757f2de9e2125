"""Train the quickstart with experts and dense, and compare the two runs. `make train` runs this."""

import itertools
import shlex
from contextlib import suppress
from pathlib import Path

from swinv2_moe.commands.call import command_line, next_line, program, resume_command
from swinv2_moe.commands.options import CommandParser, add_opts_argument
from swinv2_moe.files import writing
from swinv2_moe.tables import Console, number_table

CONFIG = "quickstart_digits"
# With top-1 routing, the dense model has as many active MACs.
DENSE = ["MODEL.MOE.NUM_EXPERTS", "0"]
WHAT_DIGITS_SHOW = """\
Digits are too easy for experts to help: both models read nearly all of them, and one digit of the
360 is 0.28 points. docs/results.md compares them on photographs."""


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--output",
        default="output/quickstart",
        metavar="DIR",
        help="the directory of both runs (default: output/quickstart); -2, -3, ... if it exists",
    )
    add_opts_argument(parser, help="configuration keys for both runs")
    args = parser.parse_args()
    from swinv2_moe.config import load_config

    opts_of = {"moe": args.opts, "dense": args.opts + DENSE}
    for opts in opts_of.values():
        load_config(CONFIG, opts)  # a mistake ends the command before a directory is made
    output = make_first_free(Path(args.output))
    runs = {}
    for name, opts in opts_of.items():
        run = str(output / name)
        continuation = resume_command(CONFIG, output=run, opts=opts)
        runs[name] = (load_config(CONFIG, opts, output=run), continuation)
    from swinv2_moe.train.run import train

    summaries = {}
    for name, (config, continuation) in runs.items():
        summary = train(config, resume_command=continuation)
        if summary is None:  # the training was told to stop
            return
        summaries[name] = summary
    num_experts = runs["moe"][0].MODEL.MOE.NUM_EXPERTS
    show(summaries, f"{num_experts} experts", output)


def make_first_free(path: Path) -> Path:
    """Make the directory `path`, or if that exists the first free one of path-2, path-3, ...

    Raises:
        UserError: it cannot be made.
    """
    numbered = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for candidate in itertools.chain([path], numbered):
            with suppress(FileExistsError):
                candidate.mkdir()
                return candidate
    raise AssertionError("there is always a next number")


def show(summaries: dict[str, dict], experts: str, output: Path) -> None:
    titles = ["", "final top-1", "best", "parameters", "MACs/image", "images/s", "seconds"]
    rows = []
    for name, label in (("moe", experts), ("dense", "dense")):
        summary = summaries[name]
        row = [
            label,
            f"{summary['val_top1']:.2f}%",
            f"{summary['best_val_top1']:.2f}%",
            f"{summary['parameters'] / 1e6:.2f}M",
            f"{summary['active_macs'] / 1e6:.2f}M",
            f"{summary['images_per_second']:,.0f}",
            f"{summary['seconds']:.0f}",
        ]
        rows.append(row)
    two = [program("torchrun"), "--nproc_per_node", "2"]
    on_two_ranks = command_line("train", two) + ["--cfg", CONFIG, "--output", f"{output}/two"]
    console = Console()
    console.print("", "Validation on the held-out fifth of the digits")
    console.print(number_table(titles, rows))
    console.print(*WHAT_DIGITS_SHOW.split("\n"))
    console.print(
        "",
        f"Checkpoint    {output}/moe/checkpoints/best",
        f"TensorBoard   {shlex.join([program('tensorboard'), '--logdir', str(output)])}",
        f"Next          {next_line('evaluate', output / 'moe')}",
        f"              {shlex.join(on_two_ranks)}",
        f"              {next_line('train', 'YOUR_PICTURES')}",
    )
