"""Export a checkpoint to programs that run without this project, and compare them with the model.

The formats are ONNX and torch.export.

    swinv2-moe export output/mine --output output/mine/exported
    swinv2-moe export output/mine --output exported --format onnx --dtype int8 \\
        --images 1000
    swinv2-moe export output/mine --output exported --format onnx torch \\
        --capacity-factor 0
"""

import argparse
from functools import partial
from pathlib import Path

from swinv2_moe.commands.evaluate import percent
from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_arguments,
    chosen_checkpoint,
    print_selection,
)
from swinv2_moe.measure.spread import median_and_spread, ratios
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console, number_table

ROUNDS = 20


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    add_checkpoint_arguments(parser, "final", required=True, metavar="DIR", help="a new directory")
    parser.add_argument(
        "--format",
        nargs="+",
        metavar="FORMAT",
        help="one or more of onnx, torch (default: onnx; torch without the packages of ONNX)",
    )
    parser.add_setting("--dtype", "float32", "float32, bfloat16 or, for onnx, int8")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="images of a batch; 0: any number (default: 0, or 1 for a model with a capacity, whose"
        " shapes follow from the number of images)",
    )
    parser.add_argument(
        "--capacity-factor",
        type=float,
        metavar="F",
        help="0: dropless; default: that of evaluation",
    )
    parser.add_setting("--images", 64, "validation images to compare on", "N")
    return parser.parse_args()


ROWS = {
    "MB": lambda program: f"{sum(part['bytes'] for part in program['files'].values()) / 1e6:.1f}",
    "largest difference": lambda program: f"{program['max_abs_difference']:.2g}",
    "of 99 in 100 images": lambda program: f"{program['p99_abs_difference']:.2g}",
    "largest logit": lambda program: f"{program['max_abs_logit']:.1f}",
    "same top-1": lambda program: f"{program['same_top1']:.2f}%",
    "top-1": lambda program: percent(program["program_top1"]),
    "top-1 of the model": lambda program: percent(program["model_top1"]),
    "ms": lambda program: median_and_spread(program["milliseconds"]["program"], 2),
    "ms of the model": lambda program: median_and_spread(program["milliseconds"]["model"], 2),
    "relative to it": lambda program: median_and_spread(time_ratios(program), 3),
}


def time_ratios(program: dict) -> list[float]:
    """The program's time divided by the model's time, in each round."""
    milliseconds = program["milliseconds"]
    return ratios(milliseconds["program"], milliseconds["model"])


def show(results: dict, output: Path) -> None:
    console = Console()
    print_selection(console, results)
    if results["without_data"]:
        console.print(f"compared on random images: {results['without_data']}")
    if results["other_class_names"]:
        console.print(results["other_class_names"])
    experts = "dense"
    if results["num_experts"]:
        factor = results["capacity_factor"]
        experts = f"{results['num_experts']} experts, capacity factor {factor:g}"
    console.print(f"{results['checkpoint']}, step {results['step']}, {experts}; {results['dtype']}")
    batch, _, size, _ = results["input"]["shape"]
    programs = list(results["programs"].values())
    columns = [f"{batch or 'any number'} x {size} px"]
    columns += [program["file"] for program in programs]
    rows = []
    for name, cell in ROWS.items():
        rows.append([name] + [cell(program) for program in programs])
    console.print(number_table(columns, rows))
    images, batch = programs[0]["images"], programs[0]["timed_batch"]
    compared = f"{images} {results['compared_on']}, timed in batches of {batch}"
    console.print(f"{compared}: {output}/model.json")


def main() -> None:
    args = parse()
    resume, selected = chosen_checkpoint(args)
    from swinv2_moe.export import ExportOptions, default_format, export_model
    from swinv2_moe.measure.rounds import interleaved

    formats = tuple(args.format or [default_format(args.dtype)])
    choices = ExportOptions(formats, args.dtype, args.batch_size, args.capacity_factor, args.images)
    if not args.format and formats == ("torch",):
        print_lines(
            "--format torch: the packages of ONNX, the default, are not installed"
            " (pip install -e '.[export]')"
        )
    output, timer = Path(args.output), partial(interleaved, rounds=ROUNDS)
    results = export_model(resume, output, choices, args.data, args.dataset, args.opts, timer)
    results["selected"] = selected
    show(results, output)
