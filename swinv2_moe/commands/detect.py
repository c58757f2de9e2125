"""Find objects: train a detector on your own labelled photographs, or one of a configuration.

    swinv2-moe detect train photos                  # with COCO, VOC or YOLO labels
    swinv2-moe detect train output/photos           # continues this run
    swinv2-moe detect predict output/photos holiday/ --output found.csv --pictures drawn
    swinv2-moe detect test output/photos
    swinv2-moe detect report output/photos
    swinv2-moe detect export output/photos exported # ONNX

With a configuration of mmdetection, on data in COCO's format:

    swinv2-moe detect train detection/shapes/mask_rcnn --output output/shapes
    swinv2-moe detect test detection/shapes/mask_rcnn output/shapes --output ap.json
    swinv2-moe detect predict --config detection/shapes/mask_rcnn output/shapes data/shapes/val
    swinv2-moe detect export detection/shapes/mask_rcnn output/shapes shapes.pth
    torchrun --nproc_per_node 8 -m swinv2_moe detect train \\
        detection/cascade_mask_rcnn/base_moe_frozen \\
        --pretrained output/swin_moe_base_window12_192_32expert

Needs the detection extra, which `make detection` installs.
"""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_argument,
    add_opts_argument,
    check_output_file,
    write_results,
    write_text,
)
from swinv2_moe.commands.predict import (
    add_picture_arguments,
    end_with_unreadable,
    find_pictures,
    first_rows,
    predict_all,
)
from swinv2_moe.config.load import find_config
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_files_exist
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from swinv2_moe.detection.detector import Detector

IS_MAIN = os.environ.get("RANK", "0") == "0"
_RECIPE = "detector.json"  # of a run without a configuration
_CHOICES = {
    "epochs": "passes over the training pictures",
    "size": "longer side of what the detector sees, in pixels",
    "batch": "pictures of a step, in each process",
    "lr": "the highest learning rate",
    "weights": "what training starts from: bundled:tiny, timm:NAME, a run, a file; none: random",
    "minutes": "the most that the whole may take (default: 30)",
}


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="start or continue training a detector")
    test = commands.add_parser("test", help="average precision")
    predict = commands.add_parser("predict", help="the objects in pictures")
    show = commands.add_parser("show", help="`predict --config CONFIG RUN --pictures DIR`")
    report = commands.add_parser("report", help="one HTML file about a run")
    export = commands.add_parser("export", help="an ONNX program, or a .pth file of mmdetection")
    _add_train(train)
    test.add_argument("names", nargs="+", metavar="[CONFIG] RUN", help="a run")
    test.add_argument(
        "--split", choices=["train", "val", "test"], help="of which pictures (default: test or val)"
    )
    test.add_argument("--output", metavar="JSON", help="a file for the results")
    predict.add_argument("run", metavar="RUN", help="a run, a checkpoint or a .pth")
    predict.add_argument("--config", metavar="CONFIG", help="that RUN was trained with, if any")
    add_picture_arguments(predict, 8, " (COCO's results)", "boxes")
    predict.add_setting("--threshold", 0.3, "lowest score that is shown", "SCORE")
    show.add_argument("config", metavar="CONFIG", help="that RUN was trained with")
    show.add_argument("run", metavar="RUN", help="a run, a checkpoint or a .pth")
    show.add_argument("inputs", nargs="+", metavar="PICTURE", help="pictures and folders")
    show.add_setting("--output", "detections", "directory for copies with boxes", "DIR")
    show.add_setting("--threshold", 0.3, "lowest score that is shown", "SCORE")
    report.add_argument("run", metavar="RUN", help="a run without a configuration")
    report.add_argument("--output", metavar="HTML", help="default: report.html in RUN")
    export.add_argument(
        "names",
        nargs="+",
        metavar="[CONFIG] RUN OUTPUT",
        help="a run and a new directory for the program; with CONFIG, a .pth for mmdetection",
    )
    for command in (test, predict, show, report, export):
        add_checkpoint_argument(command, measure="AP in validation")
    for command in (test, predict, show, export):
        add_opts_argument(command, help="any keys of CONFIG", joined=True)
    args = parser.parse_args()
    if args.command == "show":
        shown = {"command": "predict", "pictures": args.output, "output": None, "batch_size": 8}
        vars(args).update(shown)
    return args


def _add_train(train: CommandParser) -> None:
    train.add_argument(
        "config",
        nargs="?",
        metavar="FOLDER|RUN|CONFIG",
        help="a folder of labelled pictures, a run to continue, or a configuration: a name below"
        " detection/, or your own file",
    )
    train.add_argument("--data", metavar="DIR", help="the same as FOLDER")
    for name, help in _CHOICES.items():
        train.add_argument(f"--{name}", metavar=name.upper(), help=f"{help}; with FOLDER")
    train.add_argument(
        "--output",
        "--work-dir",  # mmdetection's name of the option
        metavar="DIR",
        help="the run (default: output/<name of the folder or the config>)",
    )
    train.add_argument(
        "--pretrained",
        metavar="RUN",
        help="weights of the backbone of CONFIG: a run of this project, or a file",
    )
    train.add_argument(
        "--resume",
        metavar="auto|RUN",
        help="continue from a run; auto: from the newest complete checkpoint of --output",
    )
    add_opts_argument(train, help="any keys of CONFIG", joined=True)


def main() -> None:
    began = time.time()
    args = parse()
    if args.command == "train":
        args.config = args.config or args.data
        if args.config is None:
            raise UserError("FOLDER, RUN or CONFIG is required: what to train on")
        if args.data not in (None, args.config):
            raise UserError(f"{args.config} and --data {args.data}: give one of them")
        if os.path.isdir(os.path.expanduser(args.config)) or args.data:
            train_folder(args, began)
        else:
            if not find_config(args.config).is_file():
                raise UserError(f"{args.config}: no such folder, run or configuration")
            _refuse(args, _CHOICES, "takes a folder of pictures, not a configuration")
            train(args, _config(args, args.config, args.output))
        return
    {"test": test, "predict": predict, "report": report, "export": export}[args.command](args)


def _refuse(args: argparse.Namespace, names: Any, why: str) -> None:
    for name in names:
        if getattr(args, name):
            raise UserError(f"--{name} {getattr(args, name)}: {why}")


def train_folder(args: argparse.Namespace, began: float) -> None:
    """Train on a folder without a configuration, or continue such a run."""
    _refuse(args, ("pretrained", "opts"), "is for a configuration; a folder has --weights and more")
    folder = os.path.expanduser(args.config)
    check_files_exist("FOLDER", [folder])
    output = args.output or os.path.join("output", os.path.basename(os.path.abspath(folder)))
    run = None
    if Path(folder, _RECIPE).is_file():
        run = Path(folder)
    elif args.resume == "auto" and Path(output, _RECIPE).is_file():
        run = Path(output)
    from swinv2_moe.detection import fit

    given = fit.parse_given({name: getattr(args, name) for name in _CHOICES})
    if run is None:
        run = fit.fit(folder, output, given, began)
    else:
        _refuse(args, _CHOICES, f"a continued run ({run}) has its own")
        fit.resume(run)
    if IS_MAIN:
        _say_result(run)


def _say_result(run: Path) -> None:
    from swinv2_moe.detection.detector import load_detector
    from swinv2_moe.detection.results import measure_run

    measured = measure_run(load_detector(run), run)
    print_lines(
        measured.result.in_words(measured.split),
        f"next: swinv2-moe detect report {run}",
        f"      swinv2-moe detect predict {run} PICTURES --output found.csv --pictures drawn",
        flush=True,
    )


def _config(args: argparse.Namespace, name: str, work_dir: str | None = None) -> Any:
    """The configuration `name`, after checks of the arguments' paths."""
    file = find_config(name)
    if file.suffix in (".yaml", ".yml"):
        raise UserError(
            f"CONFIG {name}: configures a classifier, which `swinv2-moe train --cfg {name}` trains"
        )
    check_files_exist("CONFIG", [str(file)])
    opts = args.opts
    if args.command == "train":
        if args.resume not in (None, "auto"):
            check_files_exist("--resume", [args.resume])
        if args.pretrained is not None:
            check_files_exist("--pretrained", [args.pretrained])
            opts = opts + [f"model.backbone.pretrained={args.pretrained}"]
    # Imported here, so that --help works without mmdetection; without it, this raises UserError.
    from swinv2_moe.detection import run

    return run.load_config(name, opts, work_dir)


def train(args: argparse.Namespace, config: Any) -> None:
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
    show_metrics(run.train(config, args.resume), None)


def test(args: argparse.Namespace) -> None:
    check_output_file(args.output)
    if len(args.names) > 2:
        raise UserError(f"RUN {args.names[0]}: give one run, after its CONFIG if it has one")
    check_files_exist("RUN", [args.names[-1]])
    if len(args.names) == 1:
        _test_run(args, Path(args.names[0]))
        return
    config = _config(args, args.names[0])
    from swinv2_moe.detection import datasets, run

    if args.split == "train":
        datasets.test_on_train_images(config)
    args.source = args.names[1]
    source = chosen_checkpoint(args)
    say_once(run.use_trained_classes(config, source, ["test"], any_names=True))
    check(config, ["test"])
    show_metrics(run.test(config, source), args.output)


def _test_run(args: argparse.Namespace, run: Path) -> None:
    from swinv2_moe.detection.detector import load_detector
    from swinv2_moe.detection.results import as_results, measure_run, table_of_classes

    detector = load_detector(run, args.checkpoint)
    say_once(detector.selected)
    measured = measure_run(detector, run, args.split)
    result, split = measured.result, measured.split
    Console().print(table_of_classes(result, detector.class_names))
    print_lines(result.in_words(split))
    write_results(args.output, as_results(result, detector.class_names) | {"split": split})


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


def check(config: Any, splits: list[str]) -> None:
    """Check the data sets on the main rank.

    The other ranks wait for the main rank when the process group is created.
    """
    from swinv2_moe.detection import datasets

    if IS_MAIN:
        for annotations in datasets.check_datasets(config, splits):
            print_lines(annotations, flush=True)


def show_metrics(metrics: dict, output: str | None) -> None:
    from swinv2_moe.detection import datasets

    if IS_MAIN:
        if metrics:
            Console().print(datasets.table_of(metrics))
        else:
            print_lines("no average precision: nothing was validated")
        write_results(output, metrics)


def predict(args: argparse.Namespace) -> None:
    check_files_exist("RUN", [args.run])
    if not 0 <= args.threshold <= 1:
        raise UserError(f"--threshold is {args.threshold}, it must be 0 to 1")
    folder, files, names = find_pictures(args)
    from swinv2_moe.predict.annotate import save_boxes

    detector = _detector(args)
    say_once(detector.selected)
    stream = detector.stream(files, args.threshold, args.batch_size)
    found = predict_all(stream, names, args.pictures, save_boxes)
    _show_found(found, names, str(folder))
    if args.output:
        from swinv2_moe.predict.objects import as_csv, as_json

        is_json = args.output.endswith(".json")
        write_text(args.output, as_json(found, names) if is_json else as_csv(found))
    end_with_unreadable(found)


def _detector(args: argparse.Namespace) -> "Detector":
    if args.config is None:
        from swinv2_moe.detection.detector import load_detector

        if args.opts:
            raise UserError("--opts: is for a run of a configuration (--config)")
        return load_detector(args.run, args.checkpoint)
    config = _config(args, args.config)
    from swinv2_moe.detection import run
    from swinv2_moe.detection.datasets import class_names, coco_datasets
    from swinv2_moe.detection.detector import Detector

    args.source = args.run
    checkpoint = chosen_checkpoint(args)
    run.use_trained_classes(config, checkpoint, ["test"], any_names=True)
    dataset = next(coco_datasets(config.test_dataloader), None)
    return Detector(config, checkpoint, () if dataset is None else class_names(dataset))


def _show_found(found: list, names: list[str], folder: str) -> None:
    """A table of the first pictures, and the number of objects of each class."""
    rows: list[list[str]] = []
    counts: dict[str, int] = {}
    for name, one in zip(names, found, strict=True):
        for class_name in one.class_names:
            counts[class_name] = counts.get(class_name, 0) + 1
        if one.error is None:
            best = f"{one.class_names[0]} {one.scores[0]:.0%}" if one.class_names else "-"
            rows.append([name, f"{len(one.class_names):,}", best])
    columns = ["picture", "objects", "highest score"]
    Console().print(number_table(columns, first_rows(rows), text_columns=["picture", columns[2]]))
    total = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
    print_lines(f"objects in {len(rows):,} pictures of {folder}: {total}")


def report(args: argparse.Namespace) -> None:
    check_files_exist("RUN", [args.run])
    check_output_file(args.output)
    from swinv2_moe.detection.detector import load_detector
    from swinv2_moe.detection.results import page

    run = Path(args.run)
    text = page(load_detector(run, args.checkpoint), run)
    output = Path(args.output or run / "report.html")
    write_text(output, text)
    print_lines(f"{output}: {len(text) / 1e6:.1f} MB")


def export(args: argparse.Namespace) -> None:
    if len(args.names) not in (2, 3):
        raise UserError("export takes RUN DIR, or CONFIG RUN FILE.pth")
    *config_name, args.source, output = args.names
    check_files_exist("RUN", [args.source])
    if config_name:
        config = _config(args, config_name[0])
        from swinv2_moe.detection import run

        run.export_pth(config, chosen_checkpoint(args), output)
        print_lines(f"{output}: for mmdetection's tools, with {config_name[0]}")
        return
    from swinv2_moe.detection.detector import load_detector
    from swinv2_moe.detection.onnx import export_onnx
    from swinv2_moe.detection.recipe import read_recipe

    detector = load_detector(args.source, args.checkpoint)
    say_once(detector.selected)
    difference = export_onnx(detector, read_recipe(Path(args.source)), Path(output))
    print_lines(
        f"{output}/model.onnx: differs from the detector by at most {difference:.1g};"
        f" examples/detect.py runs it without this project"
    )
