"""The whole network, SwinV2-MoE beside its dense twin: images/s and MFU in inference and in
training.

    python benchmarks/model.py                     (about 4 minutes on two cores)

The measuring is tools/throughput.py's (swinv2_moe.measure.throughput); this runs its two modes and
keeps the rows.
"""

import argparse
import shlex
import sys
from pathlib import Path

import torch
from results_file import Table, keep, publish

from swinv2_moe.command import run_command
from swinv2_moe.measure.spread import median_and_spread
from swinv2_moe.measure.throughput import measure
from swinv2_moe.measure.throughput_options import Options
from swinv2_moe.measure.throughput_plan import combinations
from swinv2_moe.measure.throughput_report import headline

CONFIG = Path(__file__).parent.parent / "configs/in22k"
CONFIGS = {  # the V2 form of the published recipes
    "cpu": CONFIG / "swin_moe_small_window12_192_8expert.yaml",
    "cuda": CONFIG / "swin_moe_base_window12_192_32expert.yaml",
}
BATCHES = {
    "cpu": {"inference": [1, 8], "training": [8]},
    "cuda": {"inference": [1, 128], "training": [128]},
}


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=CONFIGS, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--cfg", type=Path)
    parser.add_argument(
        "--modes", nargs="+", choices=["inference", "training"], default=["inference", "training"]
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="of both modes")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--opts", nargs="+", default=["MODEL.TYPE", "swinv2_moe"], metavar="KEY VALUE"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser


def main() -> None:
    args = make_parser(__doc__).parse_args()
    columns = ["", "images/s, experts", "dense", "experts / dense", "MFU, experts", "MFU, dense"]
    command = shlex.join(["python", "benchmarks/model.py", *sys.argv[1:]])
    rows: list[list[str]] = []
    data: list[dict] = []
    notes = ["MFU: of what a large matrix product of the same dtype reached in the same round"]
    notes.append("one pass of the whole network between two synchronisations")
    table = Table("The whole network", command, columns, rows, notes, data)
    for mode in args.modes:
        batches = args.batch_sizes or BATCHES[args.device][mode]
        options = Options((mode,), tuple(batches), tuple(args.dtypes), rounds=args.rounds)
        opts = [*args.opts, "DEVICE", args.device]
        plan = combinations(args.cfg or CONFIGS[args.device], opts, options)
        title = headline(plan, 1)
        if title not in notes:
            notes.insert(0, title)
        for row in measure(plan, options.rounds, options.warmup):
            speeds = [
                median_and_spread(row.images_per_second(side), 2) for side in (row.moe, row.dense)
            ]
            mfu = [median_and_spread(row.mfu(side), 3) for side in (row.moe, row.dense)]
            rows.append([str(row.combination), *speeds, median_and_spread(row.ratio(), 3), *mfu])
            times = {
                "moe_ms": list(row.moe.times),
                "dense_ms": list(row.dense.times),
                "product_ms": list(row.product),
            }
            times |= {"moe_mfu": row.mfu(row.moe), "dense_mfu": row.mfu(row.dense)}
            data.append(
                row.combination._asdict()
                | times
                | {"dropped": row.dropped, "largest_load": row.largest_load}
            )
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    run_command(main)
