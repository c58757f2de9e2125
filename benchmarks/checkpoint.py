"""What a checkpoint costs: bytes, the stall of training, the write rate beside `cp` of the same
bytes.

    python benchmarks/checkpoint.py --dir DIR        (about five minutes on two cores; DIR on the
    disk in question)

A window of training steps is timed with one save at its beginning, and without; rounds are
interleaved. The stall is how long the save kept training from its next step; the cost is the
window's time above that of the window without a save, in steps: what the writing took from the
steps beside it is in it. `cp` copies a full checkpoint, then syncs each file.
"""

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from moe_core.files import fsync
from swinv2_moe.config import all_sections, load_config
from swinv2_moe.data import build_data
from swinv2_moe.measure.rounds import machine
from swinv2_moe.measure.spread import median_and_spread
from swinv2_moe.models import build_model
from swinv2_moe.train.distributed import World, seed_everything
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.saver import Cost, Saver, save_policy

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart_digits.yaml"
MODES = {  # staging in MB, experts in a save, whether training waits for the end
    "full, training waits": (0, False, True),
    "full, behind it": (1 << 20, False, False),
    "partial, training waits": (0, True, True),
    "partial, behind it": (1 << 20, True, False),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary directory")
    for name, value in {
        "embed-dim": 160,
        "experts": 16,
        "partial": 2,
        "batch": 32,
        "window": 20,
        "rounds": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


class Bench:
    """A trainer on the digits, and a saver with a separate directory for each mode."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        keys = (
            f"DEVICE cpu DATA.BATCH_SIZE {args.batch} MODEL.SWINV2.EMBED_DIM {args.embed_dim}"
            " CHECKPOINT.KEEP_LAST 1"
        )
        keys += f" MODEL.MOE.NUM_EXPERTS {args.experts} CHECKPOINT.EXPERTS {args.partial}"
        world, self.window, self.costs = World(0, 1, torch.device("cpu")), args.window, []
        self.savers = {}
        for i, (mode, (staging, _, _)) in enumerate(MODES.items()):
            opts = [*keys.split(), "CHECKPOINT.STAGING_MB", str(staging)]
            sections = all_sections(load_config(QUICKSTART, opts))
            policy = save_policy(sections.checkpoint)
            self.savers[mode] = Saver(root / str(i), world, policy, report=self.costs.append)
        data = build_data(sections.data)
        seed_everything(0)
        model = build_model(sections.model, data.num_classes)
        self.trainer = Trainer(sections, world, data, model)
        self.batches = list(data.train_loader)
        self.trainer.step.wrapped.train()

    def steps(self, count: int) -> float:
        started = time.perf_counter()
        for i in range(count):
            self.trainer.train_step([self.batches[i % len(self.batches)]])
        return time.perf_counter() - started

    def plain_window(self) -> float:
        return self.steps(self.window)

    def window_with_save(self, mode: str) -> tuple[float, float, Cost]:
        """Seconds of the window, seconds for which training waited, and the cost that the saver
        reports."""
        saver, (_, partial, waits) = self.savers[mode], MODES[mode]
        started = time.perf_counter()
        self.trainer.save(saver, partial=partial)
        if waits:
            saver.wait()
        stall = time.perf_counter() - started
        self.steps(self.window)
        seconds = time.perf_counter() - started
        saver.close()
        return seconds, stall, self.costs[-1]


def copy(source: Path, target: Path) -> float:
    """Seconds for `cp -r` and a sync of each file."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in target.rglob("*.safetensors"):
        fsync(file)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        bench = Bench(args, Path(directory))
        bench.steps(3)
        # partial saves need an earlier checkpoint, and the first save also touches memory for the
        # first time
        for mode in MODES:
            bench.window_with_save(mode)
        size = sum(p.numel() for p in bench.trainer.step.model.parameters())
        saves, copies = {mode: [] for mode in MODES}, []
        for _ in range(args.rounds):
            plain = bench.plain_window()
            for mode in MODES:
                seconds, stall, cost = bench.window_with_save(mode)
                step = plain / args.window
                saves[mode].append(
                    (stall, stall / step, (seconds - plain) / step, cost.bytes, cost.seconds)
                )
            latest = bench.savers["full, behind it"].root / "latest"
            copies.append(copy(latest.resolve(), Path(directory) / "copy"))
        whole = saves["full, behind it"][0][3]
    experts = f"{args.experts} experts in 2 layers, {args.partial} of them in a partial save"
    print(f"{size / 1e6:.1f}M parameters, {experts}; a step {1e3 * step:.0f} ms;")
    print(f"{args.rounds} rounds of {args.window} steps; {machine('cpu')}\n")
    print(
        "| save | MB | stall, ms | stall, steps | cost, steps | until on disk, s | MB/s | of cp |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rate = whole / 1e6 / statistics.median(copies)
    for mode, rows in saves.items():
        stall, stall_steps, cost_steps, size, seconds = (
            list(column) for column in zip(*rows, strict=True)
        )
        mine = statistics.median(b / 1e6 / s for b, s in zip(size, seconds, strict=True))
        cells = [f"{size[0] / 1e6:.0f}", median_and_spread([1e3 * s for s in stall], 0)]
        cells += [median_and_spread(values, 2) for values in (stall_steps, cost_steps, seconds)]
        print(f"| {mode} | {' | '.join(cells)} | {mine:.0f} | {mine / rate:.2f} |")
    print(
        f"| `cp` and sync | {whole / 1e6:.0f} | | | | {median_and_spread(copies, 2)} | {rate:.0f} |"
        " 1 |"
    )


if __name__ == "__main__":
    main()
