"""Write the class map that carries a classifier over to other classes (MODEL.CLASS_MAP), by the
classes' names.

    swinv2-moe make-class-map imagenet-22k imagenet-1k --output map22kto1k.txt
    swinv2-moe make-class-map output/pretrained my_images --output map.txt

Line i holds the number, in the pretrained classifier, of class i here; -1 where it had no such
class, whose row of the classifier then starts anew.
"""

from pathlib import Path

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines


def main() -> None:
    parser = CommandParser(description=__doc__)
    kinds = (
        "a run or checkpoint, a folder of images, shards, a file with a name in each line, or one"
        " of timm's ImageNets, such as imagenet-1k"
    )
    parser.add_argument("pretrained", help=f"the classes of the pretrained classifier: {kinds}")
    parser.add_argument("classes", help="the classes of the new data, in one of these forms")
    parser.add_argument("--output", required=True, metavar="FILE")
    args = parser.parse_args()
    from swinv2_moe.data.classes import NO_CLASS, check_counting, class_names, map_classes

    trained, names = class_names(args.pretrained), class_names(args.classes)
    hint = check_counting(trained, names, args.pretrained)
    numbers = map_classes(trained, names)
    missing = [name for name, number in zip(names, numbers, strict=True) if number == NO_CLASS]
    if len(missing) == len(names):
        raise UserError(
            f"{args.classes}: none of its {len(names)} classes ({names[0]}, ...) is in"
            f" {args.pretrained}"
        )
    try:
        Path(args.output).write_text("".join(f"{number}\n" for number in numbers))
    except OSError as error:
        raise UserError(
            f"--output {args.output}: {(error.strerror or str(error)).lower()}"
        ) from error
    print_lines(
        f"{args.output}: {len(names) - len(missing)} of {len(names)} classes have a row in"
        f" the pretrained classifier{hint}"
    )
    if missing:
        shown = missing[:5]
        if len(missing) > len(shown):
            shown.append("...")
        print_lines(f"new: {', '.join(shown)}")
