"""Accuracy of a checkpoint on its validation images, or on others of the same classes.

python tools/evaluate.py --resume output/mine
python tools/evaluate.py --resume output/mine --capacity-factor 0 --top-k 2 --output accuracy.json
torchrun --nproc_per_node 8 tools/evaluate.py --resume output/mine --data DIR --sweep 0.5 0.75 1
1.25 2 0

Nothing is compiled here, whatever COMPILE says.
"""

import argparse
from pathlib import Path

from rich.console import Console

from swinv2_moe.command import (
    CommandParser,
    add_checkpoint_arguments,
    check_output_file,
    run_command,
    write_results,
)
from swinv2_moe.errors import UserError
from swinv2_moe.measure.accuracy import RoutingOptions, draw_sweep, evaluate_checkpoint
from swinv2_moe.tables import number_table

EXTREMES = 5  # classes of either end in the table, where there are many


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--capacity-factor", type=float, metavar="F", help="0: dropless; default: the checkpoint's"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="experts a token; default: the checkpoint's"
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        type=float,
        default=[],
        metavar="F",
        help="accuracy and speed at these factors too; a PNG",
    )
    args = parser.parse_args()
    check_output_file(args.output)
    if args.sweep:
        check_output_file(figure_of(args))
        if args.output == str(figure_of(args)):
            raise UserError(
                f"--output {args.output}: the sweep's figure gets this name, the results need"
                " another"
            )
    return args


def figure_of(args: argparse.Namespace) -> Path:
    """Beside the results."""
    return Path(args.output or "sweep").with_suffix(".png")


def show(found: dict) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    for problem in found["passed_over"]:
        console.print(f"passed over: {problem}")
    experts = "dense"
    if "num_experts" in found:
        experts = (
            f"{found['num_experts']} experts, K = {found['top_k']}, capacity factor"
            f" {found['capacity_factor']:g}"
        )
        experts += f" ({found['dropped_share']:.2%} dropped)"
    console.print(
        f"{found['checkpoint']}, step {found['step']}, {experts}, {found['image_size']} px"
    )
    if found["other_class_names"]:
        console.print(found["other_class_names"])
    row = [
        f"{found['images']:,}",
        *percent(found, "top1", "top5", "confidence", "ece"),
        f"{found['loss']:.4f}",
    ]
    console.print(number_table(["images", "top-1", "top-5", "confidence", "ECE", "loss"], [row]))
    console.print(number_table(["class", "images", "top-1"], class_rows(found["per_class"])))
    if "sweep" in found:
        columns = ["capacity", "dropped", "top-1", "top-5", "images/s", "relative"]
        console.print(number_table(columns, map(sweep_row, found["sweep"])))
    if unreadable := found["unreadable_images"]:
        console.print(f"{len(unreadable)} images could not be read; the first: {unreadable[0]}")


def class_rows(classes: list[dict]) -> list[list[str]]:
    """The worst first; of many classes the two ends."""
    ordered = sorted((one for one in classes if one["images"]), key=lambda one: one["top1"])
    rows = [[one["name"], f"{one['images']:,}", f"{one['top1']:.2f}%"] for one in ordered]
    if len(rows) > 4 * EXTREMES:
        rows[EXTREMES:-EXTREMES] = [[f"... {len(rows) - 2 * EXTREMES:,} more", "", ""]]
    return rows


def sweep_row(one: dict) -> list[str]:
    speeds = [spread(one["images_per_second"], digits=0), spread(one["speed_ratio"], digits=3)]
    return [
        f"{one['capacity_factor']:g}",
        f"{one['dropped_share']:.2%}",
        *percent(one, "top1", "top5"),
        *speeds,
    ]


def percent(found: dict, *keys: str) -> list[str]:
    return ["-" if found[key] is None else f"{found[key]:.2f}%" for key in keys]


def spread(one: dict, digits: int) -> str:
    low, high = one["quartiles"]
    return f"{one['median']:,.{digits}f} ({low:,.{digits}f} - {high:,.{digits}f})"


def main() -> None:
    args = parse()
    routing = RoutingOptions(args.capacity_factor, args.top_k, tuple(args.sweep))
    found = evaluate_checkpoint(args.resume, args.data, args.dataset, args.opts, routing)
    if found is None:  # the main rank has it
        return
    show(found)
    write_results(args.output, found)
    if args.sweep:
        draw_sweep(found, figure_of(args))
        print(f"figure: {figure_of(args)}")


if __name__ == "__main__":
    run_command(main)
