"""Few-shot linear and nearest-neighbour accuracy of a checkpoint's frozen features, on its own data
or other images.

python tools/few_shot.py --resume output/mine --data DIR               DIR holds train/ and val/,
with any classes torchrun --nproc_per_node 8 tools/few_shot.py --resume output/mine --data DIR
--shots 5 --output five_shot.json
"""

import argparse

from rich.console import Console

from swinv2_moe.command import (
    CommandParser,
    add_checkpoint_arguments,
    check_output_file,
    run_command,
    write_results,
)
from swinv2_moe.measure.few_shot import CLASSIFIERS, Protocol, evaluate_few_shot
from swinv2_moe.tables import number_table


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--shots",
        nargs="+",
        type=int,
        default=[1, 5, 10],
        metavar="N",
        help="training images a class",
    )
    parser.add_argument(
        "--draws", type=int, default=5, help="of those images, for each N (default: 5)"
    )
    parser.add_argument(
        "--classifier", choices=CLASSIFIERS, default="ridge", help="default: ridge, as published"
    )
    parser.add_argument("--knn", type=int, default=20, metavar="K", help="neighbours (default: 20)")
    args = parser.parse_args()
    check_output_file(args.output)
    return args


def show(found: dict) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for problem in found["passed_over"]:
        console.print(f"passed over: {problem}", markup=False)
    console.print(
        f"{found['checkpoint']}, step {found['step']}: {found['features']} features of"
        f" {found['train_images']:,} +"
        f" {found['val_images']:,} images at {found['image_size']} px, {found['classes']} classes",
        markup=False,
    )
    rows = []
    for shots, result in found["few_shot"].items():
        name = f"{shots}-shot {found['classifier']}"
        std = "-"
        if result["std"] is not None:
            std = f"{result['std']:.2f}"
        rows.append([name, f"{result['mean']:.2f}%", std, str(len(result["top1"]))])
    knn = found["knn"]
    rows.append([f"{knn['neighbors']}-NN, all images", f"{knn['top1']:.2f}%", "-", "-"])
    console.print(number_table(["classifier", "top-1", "std", "draws"], rows))
    if unreadable := found["unreadable_images"]:
        console.print(
            f"{len(unreadable)} images could not be read; the first: {unreadable[0]}", markup=False
        )


def main() -> None:
    args = parse()
    protocol = Protocol(tuple(args.shots), args.draws, args.classifier, args.knn)
    found = evaluate_few_shot(args.resume, args.data, args.dataset, args.opts, protocol)
    if found is None:  # the main rank has them
        return
    show(found)
    write_results(args.output, found)


if __name__ == "__main__":
    run_command(main)
