"""Generate a small dataset for detection: shapes on textures with masks, in COCO's format.

python data/make_shapes.py data/shapes
python tools/detect.py train configs/detection/shapes/mask_rcnn.py
"""

from pathlib import Path

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.data.prepare.shapes import Options, make_shapes
from swinv2_moe.output import say


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty")
    default = Options()
    parser.add_argument(
        "--train", type=int, default=default.train, help="images (default: %(default)s)"
    )
    parser.add_argument(
        "--val", type=int, default=default.val, help="images (default: %(default)s)"
    )
    parser.add_argument(
        "--min-size",
        type=int,
        default=default.min_size,
        metavar="PX",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--max-size",
        type=int,
        default=default.max_size,
        metavar="PX",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--max-objects",
        type=int,
        default=default.max_objects,
        help="of an image (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="(default: %(default)s)")
    args = vars(parser.parse_args())
    directory = args.pop("directory")
    for split, objects in make_shapes(directory, Options(**args)).items():
        say(f"{directory / split}: {args[split]:,} images, {objects:,} objects")
