"""Lay out and check COCO 2017: unpack archives, link to folders, name missing parts.

    swinv2-moe prepare-coco DOWNLOADS --output data/coco
    swinv2-moe prepare-coco data/coco --decode all         check again, decoding every image

DOWNLOADS holds train2017.zip, val2017.zip and annotations_trainval2017.zip, or the folders in them.
Nothing is moved or removed. After an interruption run the same command again.
"""

import argparse
from pathlib import Path

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines


def count(text: str) -> int | None:
    """Parse a number of images, or "all", for which None is returned."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of images nor 'all'")
    return int(text)


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "source", metavar="DOWNLOADS", type=Path, help="archives or folders of COCO 2017"
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="where to lay it out (default: in DOWNLOADS)"
    )
    parser.add_setting("--decode", 500, "images to decode of each part, or 'all'", "N", type=count)
    args = parser.parse_args()
    from swinv2_moe.detection.coco import PARTS, check_split, lay_out, splits

    target = args.output or args.source
    missing = lay_out(args.source, target)
    for part in missing:
        print_lines(f"missing: {part}")
    if missing:
        raise UserError(
            f"{args.source}: {len(missing)} of the {len(PARTS)} parts of COCO are not there"
        )
    for file, images in splits(target):
        print_lines(check_split(file, images, args.decode), flush=True)
    print_lines(f"{target} is complete")
