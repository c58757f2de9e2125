"""What the experts of a checkpoint have specialised in: images whose patches have the colour of
their expert, heat maps of expert by class, expert load over training, and what the expert tells of
a patch, in bits.

python tools/show_routing.py --resume output/mine                           with its own validation
images python tools/show_routing.py --resume output/mine --images holiday/         the pictures with
others
"""

import argparse
import math
from pathlib import Path

from rich.console import Console

from swinv2_moe.command import CommandParser, add_checkpoint_arguments, run_command, write_results
from swinv2_moe.measure.routing import draw_routing
from swinv2_moe.tables import number_table


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(
        parser, default="routing", metavar="DIR", help="a directory (default: routing)"
    )
    parser.add_argument(
        "--images", nargs="+", default=[], metavar="PATH", help="for the pictures: images, folders"
    )
    parser.add_argument(
        "--count", type=int, default=8, help="images in the picture, drawn evenly (default: 8)"
    )
    parser.add_argument(
        "--limit", type=int, help="validation images to measure on, drawn evenly (default: all)"
    )
    return parser.parse_args()


def show(found: dict, output: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for problem in found["passed_over"]:
        console.print(f"passed over: {problem}", markup=False)
    console.print(
        f"{found['checkpoint']}, step {found['step']}: dropless, {found['images']:,} validation"
        " images at"
        f" {found['image_size']} px, {found['classes']} classes ({found['class_bits']:.2f} bits)",
        markup=False,
    )
    columns = ["layer", "used", "load", "class", "chance", "position", "colour", "contrast"]
    rows = []
    for layer, values in found["layers"].items():
        bits, load = values["bits"], values["load"]
        told = [
            bits[name] for name in ("class", "class_by_chance", "position", "colour", "contrast")
        ]
        row = [layer, f"{values['experts_used']}/{len(load)}", f"{max(load):.2f}"]
        rows.append(row + [f"{value:.3f}" for value in told])
    console.print(number_table(columns, rows))
    console.print(
        "used: experts with tokens; load: the highest, 1 is an even share; then the bits that a"
        " patch's expert tells of"
        f" it, {math.log2(len(load)):.2f} at most (chance: with shuffled classes)"
    )
    if unreadable := found["unreadable_images"]:
        console.print(
            f"{len(unreadable)} images could not be read; the first: {unreadable[0]}", markup=False
        )
    console.print(f"{', '.join(found['figures'])} and routing.json in {output}", markup=False)
    if "load.png" not in found["figures"]:
        console.print("no load.png: --resume names a checkpoint, not a run", markup=False)


def main() -> None:
    args = parse()
    output = Path(args.output)
    found = draw_routing(
        args.resume, output, args.images, args.data, args.dataset, args.opts, args.count, args.limit
    )
    write_results(output / "routing.json", found)
    show(found, output)


if __name__ == "__main__":
    run_command(main)
