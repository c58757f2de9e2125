"""Train the variants of a plan with several seeds, and compare them in one table.

    python examples/sweep.py configs/ablations/tiny_imagenet.yaml --stage screening --data DIR \\
        --output output/ablation --jobs 2
    python examples/sweep.py configs/ablations/tiny_imagenet.yaml --stage screening \\
        --output output/ablation --table

A plan names the `control`, the number of `seeds`, and for each of its `variants` a configuration
(`base`) and keys (`opts`). `opts` of the plan hold for all variants, those of a stage override
them, and those of a variant override both. `grid: {TRAIN.BASE_LR: [0.001, 0.002]}` makes a variant
of each combination of values, named soft-0.001 and so on.

Started again, it continues: runs that have ended are not repeated. The table has 95% intervals of
Student's t over seeds; differences to the control are paired by seed.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from scipy.special import stdtrit

Variants = dict[str, tuple[str, dict]]  # configuration and keys by name
Runs = dict[str, dict[int, tuple[list[dict], dict]]]  # epochs and summary by variant and seed


def read_plan(file: str, stage: str | None = None) -> tuple[str, int, Variants]:
    """The control, the number of seeds, and the variants of a plan or of one of its stages."""
    plan = yaml.safe_load(Path(file).read_text())
    settings = plan["stages"][stage] if stage else {}
    grid = plan.get("grid", {})
    variants = {}
    for name in settings.get("variants", plan["variants"]):
        variant = plan["variants"][name]
        opts = plan.get("opts", {}) | settings.get("opts", {}) | variant.get("opts", {})
        for values in itertools.product(*grid.values()):
            full_name = "-".join(map(str, [name, *values]))
            variants[full_name] = (variant["base"], opts | dict(zip(grid, values, strict=True)))
    control = str(plan["control"])
    if control not in variants:
        sys.exit(f"{file}: control is {control!r}, allowed: {', '.join(variants)}")
    return control, settings.get("seeds", plan["seeds"]), variants


def train(directory: Path, base: str, opts: dict, data: str | None, jobs: int) -> str:
    """Train or continue a run, with its output in train.log. Returns how that ended."""
    directory.mkdir(parents=True, exist_ok=True)
    recorded = directory / "variant.json"
    variant = {"base": base, "opts": opts}
    if recorded.exists() and json.loads(recorded.read_text()) != variant:
        return "the plan has changed since this run; another --output starts anew"
    recorded.write_text(json.dumps(variant))
    if (directory / "summary.json").exists():
        return "done"
    words = [sys.executable, "-m", "swinv2_moe", "train", "--cfg", base, "--resume", "auto"]
    words += ["--output", str(directory)] + (["--data", data] if data else []) + ["--opts"]
    for key, value in opts.items():
        words += [key, str(value)]
    environment = dict(os.environ)
    if jobs > 1:  # the runs share the cores
        environment["OMP_NUM_THREADS"] = "1"
    with (directory / "train.log").open("a") as log:
        status = subprocess.run(words, stdout=log, stderr=log, env=environment).returncode
    if status or not (directory / "summary.json").exists():
        return f"stopped with status {status}, see {directory / 'train.log'}"
    return "done"


def read_runs(output: Path, variants: Variants, seeds: int) -> Runs:
    """The runs that have ended."""
    runs: Runs = {name: {} for name in variants}
    for name, seed in itertools.product(variants, range(seeds)):
        directory = output / f"{name}-seed{seed}"
        if (directory / "summary.json").exists():
            lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
            epochs = [line for line in lines if "val_top1" in line]
            runs[name][seed] = (epochs, json.loads((directory / "summary.json").read_text()))
    return runs


def interval(values: list[float]) -> str:
    """The mean and half the width of its 95% interval."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    quantile = float(stdtrit(len(values) - 1, 0.975))
    half_width = quantile * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.2f} ± {half_width:.2f}"


def top1_after(epochs: list[dict], seconds: float) -> float:
    """Top-1 of the last epoch that ended within so many seconds of training; 0 if none did."""
    ends = itertools.accumulate(epoch["seconds"] for epoch in epochs)
    within = [epoch for epoch, end in zip(epochs, ends, strict=True) if end <= seconds]
    return within[-1]["val_top1"] if within else 0.0


def table(runs: Runs, control: str) -> str:
    """Markdown. `at its time`: the difference where both have trained as long as the control."""
    titles = ["variant", "seeds", "top-1, %", "to control", "at its time", "MACs, M", "minutes"]
    rows = [titles + ["epochs to target"], ["---"] * 8]
    for name, by_seed in runs.items():
        paired = [
            (by_seed[seed][0], runs[control][seed][0]) for seed in by_seed.keys() & runs[control]
        ]
        times = [sum(epoch["seconds"] for epoch in epochs) for epochs, _ in by_seed.values()]
        ends = [epochs[-1]["val_top1"] for epochs, _ in by_seed.values()]
        difference = [mine[-1]["val_top1"] - other[-1]["val_top1"] for mine, other in paired]
        at_time = []
        for mine, other in paired:
            limit = sum(epoch["seconds"] for epoch in other)
            at_time.append(top1_after(mine, limit) - other[-1]["val_top1"])
        macs = [summary["active_macs"] / 1e6 for _, summary in by_seed.values()]
        reached = [summary.get("target_epoch") for _, summary in by_seed.values()]
        row = [name, str(len(by_seed)), interval(ends)]
        row += ["-", "-"] if name == control else [interval(difference), interval(at_time)]
        row += [f"{macs[0]:.1f}", f"{statistics.mean(times) / 60:.1f}"] if macs else ["-", "-"]
        rows.append(row + [interval([epoch for epoch in reached if epoch])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plan", help="a YAML file of variants and seeds")
    parser.add_argument("--stage", help="a stage of the plan")
    parser.add_argument("--data", help="the data set to train on (DATA.PATH)")
    parser.add_argument("--output", type=Path, required=True, help="directory of all runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--table", action="store_true", help="only print the table so far")
    args = parser.parse_args()
    control, seeds, variants = read_plan(args.plan, args.stage)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {}
        for (name, (base, opts)), seed in itertools.product(variants.items(), range(seeds)):
            run = args.output / f"{name}-seed{seed}"
            if not args.table:
                keys = opts | {"SEED": seed}
                runs[run] = pool.submit(train, run, base, keys, args.data, args.jobs)
        for run, ending in runs.items():
            print(f"{run.name}: {ending.result()}", flush=True)
    print(table(read_runs(args.output, variants, seeds), control))
    sys.exit(any(ending.result() != "done" for ending in runs.values()))


if __name__ == "__main__":
    main()
