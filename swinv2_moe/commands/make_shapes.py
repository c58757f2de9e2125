"""Generate a small dataset for detection: shapes on textures with masks, in COCO's format.

swinv2-moe make-shapes data/shapes
swinv2-moe detect train detection/shapes/mask_rcnn
"""

from pathlib import Path

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.data.prepare.shapes import Options, make_shapes
from swinv2_moe.output import print_lines


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty")
    default = Options()
    parser.add_setting("--train", default.train, "images")
    parser.add_setting("--val", default.val, "images")
    parser.add_setting("--min-size", default.min_size, "", "PX")
    parser.add_setting("--max-size", default.max_size, "", "PX")
    parser.add_setting("--max-objects", default.max_objects, "of an image")
    parser.add_setting("--seed", default.seed, "")
    args = vars(parser.parse_args())
    directory = args.pop("directory")
    for split, objects in make_shapes(directory, Options(**args)).items():
        print_lines(f"{directory / split}: {args[split]:,} images, {objects:,} objects")
