"""Accuracy of a checkpoint on its validation images, or on other images of its classes.

    swinv2-moe evaluate output/mine
    swinv2-moe evaluate output/mine --capacity-factor 0 --top-k 2 \\
        --output accuracy.json
    torchrun --nproc_per_node 8 -m swinv2_moe evaluate output/mine --data DIR

The model is not compiled; COMPILE is ignored.
"""

import argparse

from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_arguments,
    add_left,
    check_output_file,
    chosen_checkpoint,
    print_selection,
    print_unreadable,
    write_results,
)
from swinv2_moe.tables import Console, number_table

EXTREMES = 5  # with many classes, the table shows this number of the worst and of the best classes


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--capacity-factor",
        type=float,
        metavar="F",
        help="0: dropless; default: that of the checkpoint",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="experts per token; default: that of the checkpoint"
    )
    add_left(
        parser,
        "--sweep",
        "--capacity-factor evaluates with a factor, `throughput --capacity-factors` times them",
    )
    args = parser.parse_args()
    check_output_file(args.output)
    return args


def show(results: dict) -> None:
    console = Console()
    print_selection(console, results)
    experts = "dense"
    if "num_experts" in results:
        experts = (
            f"{results['num_experts']} experts, K = {results['top_k']}, "
            f"capacity factor {results['capacity_factor']:g} "
            f"({results['dropped_share']:.2%} dropped)"
        )
    size = results["image_size"]
    console.print(f"{results['checkpoint']}, step {results['step']}, {experts}, {size} px")
    for note in results["data_notes"]:
        console.print(note)
    if results["other_class_names"]:
        console.print(results["other_class_names"])
    row = [f"{results['images']:,}"]
    row += [percent(results[key]) for key in ("top1", "top5", "confidence", "ece")]
    row.append(f"{results['loss']:.4f}")
    row += [percent(results[key]) for key in ("balanced_accuracy", "macro_f1")]
    columns = ["images", "top-1", "top-5", "confidence", "ECE", "loss", "balanced", "macro-F1"]
    console.print(number_table(columns, [row]))
    console.print(number_table(["class", "images", "recall"], class_rows(results["per_class"])))
    print_unreadable(console, results)


def class_rows(classes: list[dict]) -> list[list[str]]:
    """Rows for the classes that have images, the worst first. With many classes, only the worst and
    the best are shown."""
    with_images = [entry for entry in classes if entry["images"]]
    rows = []
    for entry in sorted(with_images, key=lambda entry: entry["top1"]):
        rows.append([entry["name"], f"{entry['images']:,}", percent(entry["top1"])])
    if len(rows) > 4 * EXTREMES:
        rows[EXTREMES:-EXTREMES] = [[f"... {len(rows) - 2 * EXTREMES:,} more", "", ""]]
    return rows


def percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}%"


def main() -> None:
    args = parse()
    resume, selected = chosen_checkpoint(args)
    from swinv2_moe.measure.accuracy import RoutingOptions, evaluate_checkpoint

    routing = RoutingOptions(args.capacity_factor, args.top_k)
    results = evaluate_checkpoint(resume, args.data, args.dataset, args.opts, routing)
    if results is None:  # not the main rank
        return
    results["selected"] = selected
    show(results)
    write_results(args.output, results)
