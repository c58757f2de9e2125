"""Train, test, show and export mmdetection models on data in COCO's format.

    swinv2-moe detect train detection/shapes/mask_rcnn --output output/shapes
    swinv2-moe detect test detection/shapes/mask_rcnn output/shapes --output ap.json
    swinv2-moe detect show detection/shapes/mask_rcnn output/shapes \\
        data/shapes/val --output pictures
    swinv2-moe detect export detection/shapes/mask_rcnn output/shapes shapes.pth
    torchrun --nproc_per_node 8 -m swinv2_moe detect train \\
        detection/cascade_mask_rcnn/base_moe_frozen \\
        --pretrained output/swin_moe_base_window12_192_32expert

Needs the detection extra, which `make detection` installs. Annotations and images are checked
first (data/README.md).
"""

import argparse
import os

from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_argument,
    add_opts_argument,
    check_output_file,
    output_directory,
    write_results,
)
from swinv2_moe.config.load import find_config
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_files_exist
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console

IS_MAIN = os.environ.get("RANK", "0") == "0"


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="start or continue training a detector")
    test = commands.add_parser("test", help="average precision of boxes and masks")
    show = commands.add_parser("show", help="pictures of images with boxes, masks and routing")
    export = commands.add_parser(
        "export", help="write all weights to one .pth file for mmdetection's tools"
    )
    for command in (train, test, show, export):
        command.add_argument(
            "config",
            metavar="CONFIG",
            help="a name of this project below detection/, or your own file",
        )
        add_opts_argument(command, help="any keys of the configuration", joined=True)
    for command in (test, show, export):
        command.add_argument(
            "source", metavar="RUN", help="a run, a checkpoint directory, or a .pth"
        )
        add_checkpoint_argument(command, measure="AP in validation")
    train.add_argument(
        "--output",
        "--work-dir",  # mmdetection's name of the option
        metavar="DIR",
        help="the run (default: output/<name of the config>)",
    )
    train.add_argument(
        "--pretrained",
        metavar="RUN",
        help="weights of the backbone: a run of this project, or a file",
    )
    train.add_argument(
        "--resume",
        metavar="auto|RUN",
        help="continue from a run; auto: from the newest complete checkpoint of --output",
    )
    test.add_setting("--split", "test", "images to test on", choices=["train", "test"])
    test.add_argument("--output", metavar="JSON", help="a file for the results")
    show.add_argument("images", nargs="+", metavar="IMAGE", help="images and folders of images")
    show.add_setting("--output", "detections", "directory for the pictures", "DIR")
    show.add_setting("--threshold", 0.3, "lowest score that is shown", "SCORE")
    export.add_argument("file", metavar="FILE.pth")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.command == "test":
        check_output_file(args.output)
    check_paths(args)
    # Imported here, so that --help works without mmdetection; without it, this raises UserError.
    from swinv2_moe.detection import run

    opts, work_dir = args.opts, None
    if args.command == "train":
        work_dir = args.output
        if args.pretrained:
            opts = opts + [f"model.backbone.pretrained={args.pretrained}"]
    config = run.load_config(args.config, opts, work_dir)
    {"train": train, "test": test, "show": show, "export": export}[args.command](args, config)


def check_paths(args: argparse.Namespace) -> None:
    """Raise UserError for a path that does not exist, or a configuration of a classifier."""
    file = find_config(args.config)
    if file.suffix in (".yaml", ".yml"):
        raise UserError(
            f"CONFIG {args.config}: configures a classifier, which `swinv2-moe train --cfg"
            f" {args.config}` trains"
        )
    check_files_exist("CONFIG", [str(file)])
    if args.command == "train":
        if args.resume not in (None, "auto"):
            check_files_exist("--resume", [args.resume])
        if args.pretrained is not None:
            check_files_exist("--pretrained", [args.pretrained])
    elif args.command == "show":
        check_files_exist("IMAGE", args.images)
    else:
        check_files_exist("RUN", [args.source])


def train(args: argparse.Namespace, config) -> None:
    from swinv2_moe.detection import run

    source = run.starting_checkpoint(config, args.resume)
    say_once(run.use_trained_classes(config, source, ["train", "val"]))
    check(config, ["train", "val"])
    if IS_MAIN:
        counts = run.count_parameters(config)
        trained = (
            f"{counts['trained']:,} of them trained ({counts['trained_experts']:,} of experts)"
        )
        print_lines(f"{counts['all']:,} parameters, {trained}")
    report(run.train(config, args.resume), None)


def test(args: argparse.Namespace, config) -> None:
    from swinv2_moe.detection import datasets, run

    if args.split == "train":
        datasets.test_on_train_images(config)
    source = chosen_checkpoint(args)
    say_once(run.use_trained_classes(config, source, ["test"], any_names=True))
    check(config, ["test"])
    report(run.test(config, source), args.output)


def chosen_checkpoint(args: argparse.Namespace) -> str:
    """Select the checkpoint that --checkpoint names, and print a line about it."""
    from swinv2_moe.checkpoints.checkpoint import select_checkpoint

    checkpoint, line = select_checkpoint(args.source, args.checkpoint)
    say_once(line)
    return checkpoint


def say_once(line: str) -> None:
    """Print a line on the main rank, if it is not empty."""
    if line and IS_MAIN:
        print_lines(line, flush=True)


def check(config, splits: list[str]) -> None:
    """Check the data sets on the main rank.

    The other ranks wait for the main rank when the process group is created.
    """
    from swinv2_moe.detection import datasets

    if IS_MAIN:
        for annotations in datasets.check_datasets(config, splits):
            print_lines(annotations, flush=True)


def report(metrics: dict, output: str | None) -> None:
    from swinv2_moe.detection import datasets

    if IS_MAIN:
        if metrics:
            Console().print(datasets.table_of(metrics))
        else:
            print_lines("no average precision: nothing was validated")
        write_results(output, metrics)


def show(args: argparse.Namespace, config) -> None:
    from swinv2_moe.detection import run
    from swinv2_moe.detection.show import show

    output = output_directory(args.output)
    checkpoint = chosen_checkpoint(args)
    say_once(run.use_trained_classes(config, checkpoint, ["test"], any_names=True))
    for file, objects in show(config, checkpoint, args.images, output, args.threshold):
        print_lines(f"{file}: {objects} objects")


def export(args: argparse.Namespace, config) -> None:
    from swinv2_moe.detection import run

    run.export_pth(config, chosen_checkpoint(args), args.file)
    print_lines(f"{args.file}: for mmdetection's tools, with {args.config}")
