"""Few-shot linear and nearest-neighbour accuracy of a checkpoint's frozen features.

The images are those of the training, or DIR with train/ and val/, with any classes.

    swinv2-moe few-shot output/mine --data DIR
    torchrun --nproc_per_node 8 -m swinv2_moe few-shot output/mine --data DIR \\
        --shots 5 --output five_shot.json
"""

import argparse

from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_arguments,
    check_output_file,
    chosen_checkpoint,
    print_selection,
    print_unreadable,
    write_results,
)
from swinv2_moe.tables import Console, number_table


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--shots",
        nargs="+",
        type=int,
        default=[1, 5, 10],
        metavar="N",
        help="training images per class (default: 1 5 10)",
    )
    parser.add_setting("--draws", 5, "random draws of the training images for each N")
    parser.add_argument(
        "--classifier",
        default="ridge",
        help="linear classifier: ridge (default, as published) or logistic",
    )
    parser.add_setting("--knn", 20, "neighbours", "K")
    args = parser.parse_args()
    check_output_file(args.output)
    return args


def show(results: dict) -> None:
    console = Console()
    print_selection(console, results)
    console.print(
        f"{results['checkpoint']}, step {results['step']}: {results['features']} features of "
        f"{results['train_images']:,} + {results['val_images']:,} images "
        f"at {results['image_size']} px, {results['classes']} classes"
    )
    rows = []
    for shots, result in results["few_shot"].items():
        name = f"{shots}-shot {results['classifier']}"
        std = "-"
        if result["std"] is not None:
            std = f"{result['std']:.2f}"
        rows.append([name, f"{result['mean']:.2f}%", std, str(len(result["top1"]))])
    knn = results["knn"]
    rows.append([f"{knn['neighbors']}-NN, all images", f"{knn['top1']:.2f}%", "-", "-"])
    console.print(number_table(["classifier", "top-1", "std", "draws"], rows))
    print_unreadable(console, results)


def main() -> None:
    args = parse()
    resume, selected = chosen_checkpoint(args)
    from swinv2_moe.measure.few_shot import Protocol, evaluate_few_shot

    protocol = Protocol(tuple(args.shots), args.draws, args.classifier, args.knn)
    results = evaluate_few_shot(resume, args.data, args.dataset, args.opts, protocol)
    if results is None:  # not the main rank
        return
    results["selected"] = selected
    show(results)
    write_results(args.output, results)
