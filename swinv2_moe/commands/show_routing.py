"""Show what the experts of a checkpoint have specialised in.

Draws images whose patches have the colour of their expert, heat maps of expert by class, and expert
load over training. Prints the mutual information of expert and patch in bits.

    swinv2-moe show-routing output/mine
    swinv2-moe show-routing output/mine --images holiday/
    swinv2-moe show-routing bundled:tiny --images holiday/

--images replaces the validation images in the pictures. Where the data set of the training is not
on this machine, as with the package's model, the pictures are all that is made.
"""

import argparse
import math
from pathlib import Path

from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_arguments,
    chosen_checkpoint,
    print_selection,
    print_unreadable,
    write_results,
)
from swinv2_moe.input_paths import check_files_exist
from swinv2_moe.tables import Console, number_table


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(
        parser, default="routing", metavar="DIR", help="a directory (default: routing)"
    )
    parser.add_argument(
        "--images",
        nargs="+",
        default=[],
        metavar="PATH",
        help="images and folders for the pictures",
    )
    parser.add_setting("--count", 8, "images in the pictures, evenly spaced")
    parser.add_argument(
        "--limit", type=int, help="validation images to measure on, evenly spaced (default: all)"
    )
    return parser.parse_args()


def show(results: dict, output: Path) -> None:
    console = Console()
    print_selection(console, results)
    if not results["layers"]:
        console.print(f"routing.png and routing.json in {output}; --data DIR also measures")
        return
    console.print(
        f"{results['checkpoint']}, step {results['step']}: dropless, "
        f"{results['images']:,} validation images at {results['image_size']} px, "
        f"{results['classes']} classes ({results['class_bits']:.2f} bits)"
    )
    columns = ["layer", "used", "load", "class", "chance", "position", "colour", "contrast"]
    rows = []
    for layer, values in results["layers"].items():
        bits, load = values["bits"], values["load"]
        row = [layer, f"{values['experts_used']}/{len(load)}", f"{max(load):.2f}"]
        for name in ("class", "class_by_chance", "position", "colour", "contrast"):
            row.append(f"{bits[name]:.3f}")
        rows.append(row)
    console.print(number_table(columns, rows))
    console.print(
        "used: experts with tokens. load: the highest; 1 is an even share. class to contrast: "
        "mutual information of a patch and its expert, at most "
        f"{math.log2(len(load)):.2f} bits. chance: class, with the images' classes shuffled."
    )
    print_unreadable(console, results)
    console.print(f"{', '.join(results['figures'])} and routing.json in {output}")
    if "load.png" not in results["figures"]:
        console.print("no load.png: RUN is a checkpoint outside of a run")


def main() -> None:
    args = parse()
    check_files_exist("--images", args.images or ())
    resume, selected = chosen_checkpoint(args)
    from swinv2_moe.measure.routing import draw_routing

    output = Path(args.output)
    results = draw_routing(
        resume, output, args.images, args.data, args.dataset, args.opts, args.count, args.limit
    )
    results["selected"] = selected
    write_results(output / "routing.json", results)
    show(results, output)
