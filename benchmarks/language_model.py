"""Loss curves of examples/language_model.py with experts and of the dense model of equal active
FLOPs.

    python benchmarks/language_model.py --seeds 0 1     (about 25 minutes on one core)
    python benchmarks/language_model.py --seeds --rounds 40

Each model of each seed is trained in turn, and its lines are added to --csv as they are printed: a
second call with other seeds adds to it. The figure has all of them. Losses are in nats per byte.
--rounds compares the times of a training step, interleaved: other work on the machine slows both.
"""

import argparse
import csv
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles, stdev

import torch

from swinv2_moe.measure.rounds import interleaved
from swinv2_moe.measure.spread import median_and_spread, ratios
from swinv2_moe.plots import COLOURS, new_figure, save_png, tidy

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "language_model.py"
COLUMNS = ["experts", "seed", "step", "loss", "validation", "tokens_per_second"]
LINE = re.compile(r"step +(\d+) +loss ([\d.]+) +validation ([\d.]+) +([\d,]+) tokens/s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1], help="none: only draw")
    parser.add_argument("--experts", type=int, nargs="+", default=[0, 8], help="0: dense")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument(
        "--rounds", type=int, default=0, help="of training steps, interleaved; 0: none"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", default=ROOT / "docs/results/language_model.csv"
    )
    parser.add_argument(
        "--figure", type=Path, metavar="PNG", default=ROOT / "docs/images/language_model.png"
    )
    return parser.parse_args()


def train(experts: int, seed: int, steps: int, file: Path) -> None:
    """Train one model in a separate process, and append its lines to the file."""
    command = [sys.executable, str(EXAMPLE), "--experts", str(experts), "--seed", str(seed)]
    command += ["--steps", str(steps), "--every", "50"]
    is_new = not file.exists()
    with (
        file.open("a", newline="") as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        writer = csv.writer(output, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            values = LINE.match(line)
            if values:
                step, loss, validation, speed = values.groups()
                writer.writerow([experts, seed, step, loss, validation, speed.replace(",", "")])
                output.flush()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}")


def training_step(experts: int) -> Callable[[], object]:
    """A training step of a new model on one batch."""
    example = runpy.run_path(str(EXAMPLE))
    args = example["parse"](["--experts", str(experts)])
    torch.manual_seed(args.seed)
    model = example["LanguageModel"](args, None).to(args.device)
    batch = example["Text"](example["read_text"](None), args, 0, 1).training_batch(1)
    return partial(
        example["train_step"], model, model, batch, example["make_optimizer"](model, args)
    )


def print_speeds(numbers_of_experts: list[int], rounds: int) -> None:
    """Print milliseconds of a step, and the ratio to the first model's time in the same round."""
    steps = {name_of(experts): training_step(experts) for experts in numbers_of_experts}
    times = interleaved(steps, rounds)
    base = next(iter(times.values()))
    for name, milliseconds in times.items():
        ratio = median_and_spread(ratios(milliseconds, base), 2)
        print(f"{name}: {median_and_spread(milliseconds, 1)} ms a step, ratio {ratio}")


def read(file: Path) -> dict[int, dict[int, list[dict[str, float]]]]:
    """The lines of each run, by number of experts and by seed."""
    runs: dict[int, dict[int, list[dict[str, float]]]] = {}
    with file.open(newline="") as content:
        for row in csv.DictReader(content):
            seeds = runs.setdefault(int(row["experts"]), {})
            lines = seeds.setdefault(int(row["seed"]), [])
            lines.append({name: float(row[name]) for name in COLUMNS[2:]})
    return runs


def name_of(experts: int) -> str:
    if experts:
        return f"{experts} experts"
    return "dense"


def table(runs: dict[int, dict[int, list[dict[str, float]]]]) -> str:
    """A table with a row for each model: mean and standard deviation over the seeds, and speed."""
    lines = ["| | seeds | last loss | last validation | best validation | tokens/s |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for experts, seeds in sorted(runs.items()):
        cells = [name_of(experts), str(len(seeds))]
        for name, choose in (("loss", last), ("validation", last), ("validation", min)):
            values = [choose([line[name] for line in run]) for run in seeds.values()]
            spread = stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{mean(values):.3f} ± {spread:.3f}")
        speeds = [line["tokens_per_second"] for run in seeds.values() for line in run]
        low, _, high = quantiles(speeds, n=4)
        cells.append(f"{median(speeds):,.0f} ({low:,.0f} - {high:,.0f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def last(values: list[float]) -> float:
    return values[-1]


def draw(runs: dict[int, dict[int, list[dict[str, float]]]], file: Path) -> None:
    """Draw training and validation loss, with a line for each seed."""
    figure = new_figure(9, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"loss": "training", "validation": "validation"}
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for colour, (experts, seeds) in zip(COLOURS, sorted(runs.items()), strict=False):
            label = name_of(experts)
            for run in seeds.values():
                steps = [line["step"] for line in run]
                axes.plot(steps, [line[column] for line in run], color=colour, label=label)
                label = "_"  # one entry for all seeds
        axes.set_title(title, loc="left")
        axes.set_xlabel("steps of 2,048 bytes")
        tidy(axes)
    panels[0].set_ylabel("nats per byte")
    panels[0].legend(frameon=False)
    save_png(figure, file, "--figure")


def main() -> None:
    args = arguments()
    for seed in args.seeds:
        for experts in args.experts:
            train(experts, seed, args.steps, args.csv)
    if args.rounds:
        print_speeds(args.experts, args.rounds)
    if not args.csv.exists():
        return
    runs = read(args.csv)
    draw(runs, args.figure)
    print(table(runs))


if __name__ == "__main__":
    main()
