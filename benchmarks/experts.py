"""Do experts help? The configurations of configs/tiny_imagenet side by side: accuracy, few-shot
transfer, routing.

    python benchmarks/experts.py --data TINY_IMAGENET --transfer IMAGENETTE --output output/experts
    python benchmarks/experts.py ... --opts TRAIN.EPOCHS 100 AMP_ENABLE true MODEL.SWINV2.EMBED_DIM
    96     on a GPU

The dense model and the one with 8 experts are trained with each of three seeds, the others with the
first. Started again, it goes on where it was; --only names some of the experiments, so that several
machines can share the work.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

from swinv2_moe.command import run_command, run_tool, run_training

REPEATED = ("dense", "8expert")
ONCE = (
    "8expert_last2blocks",
    "16expert",
    "8expert_cosine",
    "8expert_top2",
    "8expert_capacity1",
    "8expert_dropless",
)
COLUMNS = (
    "parameters (M)",
    "MACs (M)",
    "top-1",
    "5-shot",
    "20-NN",
    "dropped",
    "largest load",
    "entropy",
    "images/s",
)

# three of the columns, as metrics.jsonl calls them
ROUTING = ("dropped_share", "load_max", "entropy")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="to train on: train/ and val/")
    parser.add_argument(
        "--transfer", required=True, metavar="DIR", help="for few-shot: train/ and val/"
    )
    parser.add_argument("--output", default="output/experts", metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*REPEATED, *ONCE], default=[*REPEATED, *ONCE])
    parser.add_argument("--draws", type=int, default=20, help="of the images for few-shot")
    parser.add_argument(
        "--opts", nargs="+", default=[], metavar="KEY VALUE", help="configuration keys for all"
    )
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds is {args.seeds}, it must be at least 1")
    output = Path(args.output)
    seeds = range(args.seeds)
    for name, seed in [*((n, s) for s in seeds for n in REPEATED), *((n, 0) for n in ONCE)]:
        if name in args.only:
            measure(name, seed, output / f"{name}-seed{seed}", args)
    print(table(output, [name for name in (*REPEATED, *ONCE) if name in args.only]))


def measure(name: str, seed: int, directory: Path, args: argparse.Namespace) -> None:
    """Train (or go on), then the few-shot accuracy of the result."""
    run_training(
        f"configs/tiny_imagenet/{name}.yaml", args.data, directory, ["SEED", seed, *args.opts]
    )
    file = directory / "few_shot.json"
    if not file.exists():
        shots = ["--shots", 5, "--draws", args.draws, "--output", file]
        run_tool("tools/few_shot.py", "--resume", directory, "--data", args.transfer, *shots)


def table(output: Path, names: list[str]) -> str:
    """Markdown; a mean and, of several seeds, their standard deviation."""
    lines = [f"| experiment | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name in names:
        runs = [read(directory) for directory in sorted(output.glob(f"{name}-seed*"))]
        cells = [_cell([found[column] for found in runs]) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read(directory: Path) -> dict[str, float | None]:
    """What a run has left; the routing is that of its last 20 logged steps, the mean over the
    layers."""
    summary, few_shot = (
        json.loads((directory / file).read_text()) for file in ("summary.json", "few_shot.json")
    )
    steps = [
        line
        for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ]
    routing = {
        key: [step[f"moe/{key}"] for step in steps[-20:] if f"moe/{key}" in step] for key in ROUTING
    }
    values = [summary["parameters"] / 1e6, summary["active_macs"] / 1e6, summary["val_top1"]]
    values += [few_shot["few_shot"]["5"]["mean"], few_shot["knn"]["top1"]]
    values += [mean(found) if found else None for found in routing.values()]
    return dict(zip(COLUMNS, [*values, summary["images_per_second"]], strict=True))


def _cell(values: list[float | None]) -> str:
    if None in values:
        return "-"
    deviation = f" ± {stdev(values):.2f}" if len(values) > 1 and stdev(values) > 0 else ""
    return f"{mean(values):.2f}{deviation}"


if __name__ == "__main__":
    run_command(main)
