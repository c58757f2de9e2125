"""Make shards of a dataset (tars of the WebDataset format and an index), or index existing tars.

    swinv2-moe make-shards --data DIR --dataset folder --output SHARDS
    swinv2-moe make-shards --data DIR --dataset list --train-list FILE --val-list FILE \\
        --output SHARDS
    swinv2-moe make-shards --index SHARDS        for SHARDS/{train,val}/*.tar of other programs

After an interruption run the same command again. See data/README.md.
"""

import argparse
import math
import os
import time

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.output import print_lines


def arguments() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--data", metavar="DIR", help="the images, as DATA.PATH")
    parser.add_setting("--dataset", "folder", "as DATA.DATASET", "NAME")
    parser.add_argument("--train-list", metavar="FILE", default="", help="as DATA.TRAIN_LIST")
    parser.add_argument("--val-list", metavar="FILE", default="", help="as DATA.VAL_LIST")
    parser.add_argument("--output", metavar="SHARDS", help="a new directory, or an unfinished one")
    parser.add_argument("--index", metavar="SHARDS", help="only index the tars in this directory")
    parser.add_argument(
        "--num-classes",
        type=int,
        default=0,
        metavar="N",
        help="classes of a list or of --index; 0: the highest label + 1",
    )
    parser.add_setting("--shard-mb", 256, "approximate size of a shard", "MB", type=float)
    parser.add_argument(
        "--short-side",
        type=int,
        default=0,
        metavar="PX",
        help="store larger images as JPEGs with this short side",
    )
    parser.add_setting("--seed", 0, "seed of the order of the images")
    parser.add_setting("--workers", os.cpu_count() or 1, "processes")
    parser.add_argument(
        "--check", action="store_true", help="decode every image and leave out broken ones"
    )
    limit = "largest size of a decoded image; larger ones are left out (default: 120 million)"
    parser.add_argument("--max-pixels", type=int, metavar="N", help=limit)
    args = parser.parse_args()
    if bool(args.index) == bool(args.output):
        parser.error("give either --output (and --data) or --index")
    if args.max_pixels is None:
        from swinv2_moe.data.images import MAX_PIXELS

        args.max_pixels = MAX_PIXELS
    for option, value, minimum in (
        ("--workers", args.workers, 1),
        ("--num-classes", args.num_classes, 0),
        ("--short-side", args.short_side, 0),
        ("--seed", args.seed, 0),
        ("--shard-mb", args.shard_mb, 1e-3),
        ("--max-pixels", args.max_pixels, 1),
    ):
        if not minimum <= value < math.inf:
            parser.error(f"{option} is {value}, it must be at least {minimum}")
    return args


def make(args: argparse.Namespace) -> dict:
    from swinv2_moe.config import as_opts, data_config, load_config
    from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
    from swinv2_moe.data.sources import load_sources

    keys = {
        "DATA.DATASET": args.dataset,
        "DATA.TRAIN_LIST": args.train_list,
        "DATA.VAL_LIST": args.val_list,
        "MODEL.NUM_CLASSES": args.num_classes,
    }
    config = load_config(opts=as_opts(keys), data=args.data)
    options = ShardOptions(args.seed, args.shard_mb, args.short_side, args.check, args.max_pixels)
    return make_shards(load_sources(data_config(config)), args.output, options, args.workers)


def main() -> None:
    args = arguments()
    from swinv2_moe.data.prepare.index_shards import index_shards
    from swinv2_moe.data.shards import SPLITS

    started = time.monotonic()
    if args.index:
        index = index_shards(
            args.index, args.num_classes, args.check, args.workers, args.max_pixels
        )
    else:
        index = make(args)
    seconds = time.monotonic() - started
    print_lines(
        f"{args.index or args.output}: {len(index['class_names']):,} classes, {seconds:.0f} s"
    )
    for split in SPLITS:
        shards = index[split]["shards"]
        images = sum(shard["images"] for shard in shards)
        size = sum(shard["bytes"] for shard in shards)
        left_out = sum(shard["left_out"] for shard in shards)
        print_lines(f"{split}: {images:,} images in {len(shards):,} shards, {size / 1e6:,.1f} MB")
        if left_out:
            first = next(shard.get("first_left_out") for shard in shards if shard["left_out"])
            print_lines(
                f"{split}: {left_out:,} images missing, empty or broken, left out; the first:"
                f" {first}"
            )
