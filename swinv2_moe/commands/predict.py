"""The classes of pictures that belong to no data set.

    swinv2-moe predict output/mine dog.jpg holiday/
    swinv2-moe predict output/mine holiday/ --output predictions.csv --pictures annotated

Pictures get the transform of validation. Folders are searched with their subfolders. A picture that
cannot be read is named on stderr, and the others go on; the exit status is then 1.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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

Picture = TypeVar("Picture", bound=Any)  # a result with `file` and `error`

# with more pictures, the table shows this number of rows, and the number of pictures of each class
MAX_ROWS = 40


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint or a single file")
    add_picture_arguments(parser, BATCH_SIZE, "", "the classes and their probabilities")
    parser.add_setting("--top-k", TOP_K, "classes of each picture", "K")
    add_checkpoint_argument(parser, default="final")
    add_opts_argument(parser)
    args = parser.parse_args()
    if args.top_k < 1:
        raise UserError(f"--top-k is {args.top_k}, it must be at least 1")
    return args


def add_picture_arguments(
    parser: CommandParser, batch_size: int, results: str, on_copies: str
) -> None:
    """Add PICTURE, --batch-size, --output and --pictures.

    Args:
        batch_size: the default.
        results: a remark about the files of results, for the help.
        on_copies: what is written on the copies of the pictures.
    """
    parser.add_argument("inputs", nargs="+", metavar="PICTURE", help="pictures and folders")
    parser.add_setting("--batch-size", batch_size, "pictures per forward pass", "N")
    output = f"file for the results, .csv or .json{results}"
    parser.add_argument("--output", metavar="FILE", help=output)
    parser.add_argument("--pictures", metavar="DIR", help=f"directory for copies with {on_copies}")


def find_pictures(args: argparse.Namespace) -> tuple[Path, list[Path], list[str]]:
    """Check the arguments of `add_picture_arguments`, and find the pictures.

    Returns:
        The folder that has all pictures, the pictures, and their names below it.
    """
    if args.batch_size < 1:
        raise UserError(f"--batch-size is {args.batch_size}, it must be at least 1")
    check_output_file(args.output)
    if args.output and Path(args.output).suffix not in (".csv", ".json"):
        raise UserError(f"--output {args.output}: must end in .csv or .json")
    check_files_exist("PICTURE", args.inputs)
    from swinv2_moe.data.images import image_paths

    files = image_paths(args.inputs)
    folder, names = shared_folder(files)
    if args.pictures:
        check_annotated(Path(args.pictures), files, names)
        output_directory(args.pictures, "--pictures")
    return folder, files, names


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


def predict_all(
    stream: Iterable[Picture],
    names: list[str],
    directory: str | None,
    save: Callable[[Picture, Path], None],
) -> list[Picture]:
    """All results of a stream, with a progress bar. Copies of the pictures go to `directory`, if it
    is given."""
    from swinv2_moe.predict.annotate import copy_name

    results = []
    with Bar(Console(), "pictures", len(names)) as bar:
        for name, result in zip(names, stream, strict=True):
            results.append(result)
            if directory and result.error is None:
                save(result, Path(directory) / copy_name(name))
            bar.advance("")
    return results


def end_with_unreadable(results: Iterable[Picture]) -> None:
    """Name the pictures that could not be read on stderr. If there are any, exit with status 1."""
    unreadable = [result for result in results if result.error is not None]
    for result in unreadable:
        print_lines(f"{result.file}: cannot be read ({result.error})", file=sys.stderr)
    if unreadable:
        sys.exit(1)


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
    rows = first_rows(rows)
    console.print(number_table(columns, rows, text_columns=["picture", "class", "next"]))
    if len(readable) > MAX_ROWS:
        counts = Counter(prediction.best.label for _, prediction in readable)
        rows = [[name, f"{count:,}"] for name, count in counts.most_common()]
        console.print(number_table(["class", "pictures"], rows))


def first_rows(rows: list[list[str]]) -> list[list[str]]:
    """The rows of a table; of many the first ones, and how many there are more."""
    if len(rows) <= MAX_ROWS:
        return rows
    return rows[:MAX_ROWS] + [[f"... {len(rows) - MAX_ROWS:,} more"] + [""] * (len(rows[0]) - 1)]


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
    folder, files, names = find_pictures(args)
    from swinv2_moe.predict.annotate import save_annotated
    from swinv2_moe.predict.predictor import load_predictor

    predictor = load_predictor(args.run, args.checkpoint, args.opts, "RUN")
    stream = predictor.stream(files, args.top_k, args.batch_size)
    predictions = predict_all(stream, names, args.pictures, save_annotated)
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
    end_with_unreadable(predictions)
