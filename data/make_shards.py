"""Make shards (tars of the WebDataset format, and an index) of a data set, or the index of shards
that are there.

    python data/make_shards.py --data DIR --dataset folder --output SHARDS
    python data/make_shards.py --data DIR --dataset list --train-list FILE --val-list FILE --output
    SHARDS python data/make_shards.py --index SHARDS        SHARDS/train/*.tar and SHARDS/val/*.tar
    come from elsewhere

Killed, or out of disk? The same command goes on. data/README.md tells the rest.
"""

import argparse
import math
import os
import time

from swinv2_moe.command import run_command
from swinv2_moe.config import as_opts, data_config, load_config
from swinv2_moe.data.images import MAX_PIXELS
from swinv2_moe.data.prepare.index_shards import index_shards
from swinv2_moe.data.prepare.make_shards import Options, make_shards
from swinv2_moe.data.shards import SPLITS
from swinv2_moe.data.sources import load_sources


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="DIR", help="the images, as DATA.PATH")
    parser.add_argument(
        "--dataset", choices=["folder", "list", "imagenet", "cifar10", "cifar100"], default="folder"
    )
    parser.add_argument("--train-list", metavar="FILE", default="", help="as DATA.TRAIN_LIST")
    parser.add_argument("--val-list", metavar="FILE", default="", help="as DATA.VAL_LIST")
    parser.add_argument("--output", metavar="SHARDS", help="a new directory, or one that was begun")
    parser.add_argument("--index", metavar="SHARDS", help="only index what is there")
    parser.add_argument(
        "--num-classes", type=int, default=0, metavar="N", help="of a list or --index; 0: as found"
    )
    parser.add_argument(
        "--shard-mb", type=float, default=256, metavar="MB", help="about (default: %(default)s)"
    )
    parser.add_argument(
        "--short-side", type=int, default=0, metavar="PX", help="larger images become such JPEGs"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of the images (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes (default: %(default)s)"
    )
    parser.add_argument(
        "--check", action="store_true", help="decode every image and leave out broken ones"
    )
    limit = "of an image that is decoded; larger ones are left out (default: %(default)s)"
    parser.add_argument("--max-pixels", type=int, default=MAX_PIXELS, metavar="N", help=limit)
    args = parser.parse_args()
    if bool(args.index) == bool(args.output):
        parser.error("give either --output (and --data) or --index")
    limits = {
        "workers": 1,
        "num_classes": 0,
        "short_side": 0,
        "seed": 0,
        "shard_mb": 1e-3,
        "max_pixels": 1,
    }
    for name, least in limits.items():
        if not least <= getattr(args, name) < math.inf:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(args, name)}, it must be at least {least}"
            )
    return args


def make(args: argparse.Namespace) -> dict:
    keys = {
        "DATA.DATASET": args.dataset,
        "DATA.TRAIN_LIST": args.train_list,
        "DATA.VAL_LIST": args.val_list,
    }
    keys["MODEL.NUM_CLASSES"] = args.num_classes
    config = load_config(opts=as_opts(keys), data=args.data)
    options = Options(args.seed, args.shard_mb, args.short_side, args.check, args.max_pixels)
    return make_shards(load_sources(data_config(config)), args.output, options, args.workers)


def main() -> None:
    args, started = arguments(), time.monotonic()
    if args.index:
        index = index_shards(
            args.index, args.num_classes, args.check, args.workers, args.max_pixels
        )
    else:
        index = make(args)
    print(
        f"{args.index or args.output}: {len(index['class_names']):,} classes,"
        f" {time.monotonic() - started:.0f} s"
    )
    for split in SPLITS:
        shards = index[split]["shards"]
        images, size, left_out = (
            sum(shard[key] for shard in shards) for key in ("images", "bytes", "left_out")
        )
        print(f"{split}: {images:,} images in {len(shards):,} shards, {size / 1e6:,.1f} MB")
        if left_out:
            first = next(shard.get("first_left_out") for shard in shards if shard["left_out"])
            print(
                f"{split}: {left_out:,} images missing, empty or broken, left out; the first:"
                f" {first}"
            )


if __name__ == "__main__":
    run_command(main)
