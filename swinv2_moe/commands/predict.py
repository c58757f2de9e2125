"""The classes of pictures that belong to no data set.

    swinv2-moe predict output/mine dog.jpg holiday/
    swinv2-moe predict output/mine holiday/ --output predictions.csv --pictures annotated

Pictures get the transform of validation. Folders are searched with their subfolders. A picture that
cannot be read is named on stderr, and the others go on; the exit status is then 1.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.commands.options import (
    CommandParser,
    add_checkpoint_argument,
    add_opts_argument,
    check_opts,
    check_output_file,
    output_directory,
    print_selection,
    write_text,
)
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_files_exist, check_run
from swinv2_moe.output import print_lines
from swinv2_moe.predict.prediction import (
    BATCH_SIZE,
    TOP_K,
    Prediction,
    as_csv,
    as_json,
    shared_folder,
)
from swinv2_moe.tables import Bar, Console, number_table

if TYPE_CHECKING:  # importing torch takes seconds
    from swinv2_moe.predict.predictor import Predictor

# with more pictures, the table shows this number of rows, and the number of pictures of each class
MAX_ROWS = 40


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint or a single file")
    parser.add_argument("inputs", nargs="+", metavar="PICTURE", help="pictures and folders")
    parser.add_setting("--top-k", TOP_K, "classes of each picture", "K")
    parser.add_setting("--batch-size", BATCH_SIZE, "pictures per forward pass", "N")
    parser.add_argument("--output", metavar="FILE", help="file for the results, .csv or .json")
    parser.add_argument(
        "--pictures",
        dest="annotated",
        metavar="DIR",
        help="directory for copies with the classes and their probabilities",
    )
    add_checkpoint_argument(parser, default="final")
    add_opts_argument(parser)
    args = parser.parse_args()
    for option, value in (("--top-k", args.top_k), ("--batch-size", args.batch_size)):
        if value < 1:
            raise UserError(f"{option} is {value}, it must be at least 1")
    check_output_file(args.output)
    if args.output and Path(args.output).suffix not in (".csv", ".json"):
        raise UserError(f"--output {args.output}: must end in .csv or .json")
    return args


def check_annotated(directory: Path, files: Sequence[Path], names: Sequence[str]) -> None:
    """Raise UserError if the input pictures are in the directory --pictures, or would be
    overwritten there, or if the copies of two pictures have the same name."""
    from swinv2_moe.predict.annotate import copy_name

    resolved = directory.resolve()
    for file in files:
        if resolved in file.resolve().parents:
            raise UserError(
                f"--pictures {directory}: it holds {file}, one of the pictures; name another"
                " directory"
            )
    pictures: dict[str, str] = {}  # the picture of each copy
    for name in names:
        copy = copy_name(name)
        other = pictures.setdefault(copy, name)
        if other != name:
            raise UserError(
                f"--pictures {directory}: the copies of {other} and {name} would both be {copy};"
                " rename one of the two pictures"
            )


def predict(
    predictor: "Predictor", args: argparse.Namespace, files: list[Path], names: list[str]
) -> list[Prediction]:
    """Predict all files with a progress bar, and write annotated copies of the pictures."""
    from swinv2_moe.predict.annotate import copy_name, save_annotated

    console = Console()
    predictions = []
    stream = predictor.stream(files, args.top_k, args.batch_size)
    with Bar(console, "pictures", len(files)) as bar:
        for name, prediction in zip(names, stream, strict=True):
            predictions.append(prediction)
            if args.annotated and prediction.error is None:
                target = Path(args.annotated) / copy_name(name)
                save_annotated(prediction, target)
            bar.advance("")
    return predictions


def show(predictions: list[Prediction], names: list[str], top_k: int) -> None:
    console = Console()
    readable = []
    for name, prediction in zip(names, predictions, strict=True):
        if prediction.error is None:
            readable.append((name, prediction))
    if not readable:
        return
    columns = ["picture", "class", "probability"]
    if top_k > 1:
        columns.append("next")
    rows = [table_row(name, prediction)[: len(columns)] for name, prediction in readable]
    if len(rows) > MAX_ROWS:
        more = f"... {len(rows) - MAX_ROWS:,} more"
        rows = rows[:MAX_ROWS] + [[more] + [""] * (len(columns) - 1)]
    console.print(number_table(columns, rows, text_columns=["picture", "class", "next"]))
    if len(readable) > MAX_ROWS:
        counts = Counter(prediction.best.label for _, prediction in readable)
        rows = [[name, f"{count:,}"] for name, count in counts.most_common()]
        console.print(number_table(["class", "pictures"], rows))


def table_row(name: str, prediction: Prediction) -> list[str]:
    following = []
    for guess in prediction.top[1:]:
        following.append(f"{guess.label} {guess.probability:.1%}")
    best = prediction.best
    mark = " (?)" if prediction.is_unlike else ""
    return [name, best.label + mark, f"{best.probability:.1%}", ", ".join(following)]


def main() -> None:
    args = parse()
    check_opts(args.opts)
    check_run(args.run)
    check_files_exist("PICTURE", args.inputs)
    from swinv2_moe.data.images import image_paths
    from swinv2_moe.predict.predictor import load_predictor

    files = image_paths(args.inputs)
    folder, names = shared_folder(files)
    if args.annotated:
        check_annotated(Path(args.annotated), files, names)
        output_directory(args.annotated, "--pictures")
    predictor = load_predictor(args.run, args.checkpoint, args.opts, "RUN")
    predictions = predict(predictor, args, files, names)
    console = Console()
    print_selection(console, predictor.facts)
    console.print(
        f"{predictor.checkpoint}, step {predictor.facts['step']}, {len(predictor.class_names):,}"
        f" classes, {predictor.facts['image_size']} px; pictures in {folder}"
    )
    show(predictions, names, args.top_k)
    unlike = [prediction.file for prediction in predictions if prediction.is_unlike]
    if unlike:
        console.print(
            f"(?) {len(unlike):,} of {len(predictions):,} pictures are unlike those of the"
            " training: their class may be wrong, whatever its probability; the first:"
            f" {unlike[0]}"
        )
    if args.output:
        text = as_csv(predictions)
        if args.output.endswith(".json"):
            text = as_json(predictions, predictor.facts)
        write_text(args.output, text)
    for unused in sorted({prediction.unused for prediction in predictions} - {""}):
        found = [prediction.file for prediction in predictions if prediction.unused == unused]
        print_lines(
            f"warning: {len(found):,} of {len(predictions):,} pictures have {unused}, which are not"
            f" used; the first: {found[0]}",
            file=sys.stderr,
        )
    unreadable = [prediction for prediction in predictions if prediction.error is not None]
    for prediction in unreadable:
        print_lines(f"{prediction.file}: cannot be read ({prediction.error})", file=sys.stderr)
    if unreadable:
        sys.exit(1)
