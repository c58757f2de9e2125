"""Train the quickstart twice, with experts and without, and show both side by side: what `make
train` runs."""

import itertools
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swinv2_moe.command import CommandParser, resume_command, run_command
from swinv2_moe.config import load_config
from swinv2_moe.train import train

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart_digits.yaml"
# top-1 routing: the dense model is the one of equal active MACs
DENSE = ["MODEL.MOE.NUM_EXPERTS", "0"]


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--output", default="output/quickstart", help="run directory; -2, -3, ... where it is taken"
    )
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="configuration keys for both runs",
    )
    args = parser.parse_args()
    output = first_free(Path(args.output))
    summaries = {}
    for name, opts in (("moe", []), ("dense", DENSE)):
        opts, run = [*opts, *args.opts], str(output / name)
        going_on = resume_command("tools/train.py", cfg=str(CONFIG), output=run, opts=opts)
        summaries[name] = train(load_config(CONFIG, opts, output=run), resume_command=going_on)
        if summaries[name] is None:  # told to stop
            return
    show(summaries, output)


def first_free(path: Path) -> Path:
    """`path`, or with the first number behind it under which nothing lies yet."""
    candidates = itertools.chain(
        [path], (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    )
    return next(candidate for candidate in candidates if not candidate.exists())


def show(summaries: dict[str, dict], output: Path) -> None:
    table = Table(
        "", "final top-1", "best", "parameters", "MACs/image", "images/s", "seconds", box=None
    )
    for name, label in (("moe", "MoE, 8 experts"), ("dense", "dense")):
        s = summaries[name]
        table.add_row(
            label,
            f"{s['val_top1']:.2f}%",
            f"{s['best_val_top1']:.2f}%",
            f"{s['parameters'] / 1e6:.2f}M",
            f"{s['active_macs'] / 1e6:.2f}M",
            f"{s['images_per_second']:,.0f}",
            f"{s['seconds']:.0f}",
        )
    config = f"{CONFIG.parent.name}/{CONFIG.name}"
    on_two_ranks = ".venv/bin/torchrun --nproc_per_node 2 tools/train.py"
    on_two_ranks += f" --cfg {config} --output {output}/two"
    console = Console(highlight=False, soft_wrap=True)
    console.print("\nValidation on the held-out fifth of the digits", markup=False)
    console.print(table)
    console.print(
        f"""
Checkpoint    {output}/moe/checkpoints/best
TensorBoard   .venv/bin/tensorboard --logdir {output}
Next          .venv/bin/python tools/evaluate.py --resume {output}/moe
              {on_two_ranks}
              your own photographs: README.md, "Your images\"""",
        markup=False,
    )


if __name__ == "__main__":
    run_command(main)
