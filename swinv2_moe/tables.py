"""The terminal: a console for text of others, tables of numbers, progress bars, and the remaining
time of a run. Imports no torch."""

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console
from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import ConsoleOptions, JustifyMethod, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from swinv2_moe.output import between_words, printable

_WIDTH_OF_FILES = 100_000  # longer than any row of a table


class Console(rich.console.Console):
    """rich's console without markup and highlighting. `print` writes each string as one line, on a
    terminal `between_words`.

    What it shows has passed `printable`, whatever the table or progress bar that contains it. Into
    a file or a pipe, `soft_wrap` also writes each row of a table as one line.
    """

    def __init__(self, soft_wrap: bool = True, **options) -> None:
        super().__init__(soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False, **options)
        if soft_wrap and not self.is_terminal:
            self.width = _WIDTH_OF_FILES

    def print(self, *objects: RenderableType | Path, **options) -> None:
        if objects and all(isinstance(item, str | Path) for item in objects):
            texts = list(map(printable, objects))
            if self.is_terminal:
                texts = [between_words(text, self.width) for text in texts]
            objects = tuple(texts)
            options = {"soft_wrap": True, "sep": "\n"} | options
        super().print(*objects, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control:
                segment = segment._replace(text=printable(segment.text, keep="\n"))
            yield segment


def number_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Collection[str] | None = None,
    markdown: bool = False,
) -> Table:
    """A table with columns of numbers, aligned to the right, and columns of text. A cell that is
    wider than the terminal allows goes on in further lines.

    Args:
        columns: titles.
        rows: the cells of each row.
        text_columns: titles of the columns of text, aligned to the left. Default: the first one.
        markdown: draw the table in Markdown.
    """
    if text_columns is None:
        text_columns = columns[:1]
    box = SIMPLE_HEAD
    if markdown:
        box = MARKDOWN
    table = Table(box=box, collapse_padding=not markdown)
    for title in columns:
        justify: JustifyMethod = "right"
        if title in text_columns:
            justify = "left"
        table.add_column(Text(printable(title)), justify=justify, overflow="fold")
    for row in rows:
        cells = [printable(cell) for cell in row]
        if markdown:
            cells = [cell.replace("|", r"\|") for cell in cells]
        table.add_row(*map(Text, cells))
    return table


class Bar:
    """A progress bar with free text at its end, as a context manager; invisible without a
    terminal.

    Args:
        visible: False: on ranks other than the main rank.
    """

    def __init__(
        self, console: Console, description: str, total: int, done: int = 0, visible: bool = True
    ) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not (visible and console.is_terminal),
        )
        self._task = self._progress.add_task(
            description, total=total, completed=done, text="", left="left"
        )

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *error) -> None:
        self._progress.stop()

    def advance(self, text: str, left: str = "left") -> None:
        """Count one more. `left` is shown after the remaining time of the bar."""
        self._progress.update(self._task, advance=1, text=text, left=left)


class TransferBar(Progress):
    """A context with a line in the terminal: images, images/s, MB, MB/s and the time left.

    Args:
        total: the amount of work, in units of `unit`.
        unit: "images" or "bytes".
    """

    def __init__(self, title: str, total: int, unit: str):
        super().__init__(
            TextColumn(title),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeRemainingColumn(),
            console=Console(),
        )
        self.unit = unit
        self.total = total
        self.task = self.add_task("", total=total, done="")

    def skip(self, images: int, bytes: int) -> None:
        """Exclude the work of an earlier call from the total."""
        self.total -= self._count(images, bytes)
        self.update(self.task, total=self.total)

    def show(self, images: int, bytes: int) -> None:
        """Show the work done so far."""
        seconds = self.tasks[0].elapsed or 1.0
        done = ""
        if images:
            done = f"{images:,} images, {images / seconds:,.0f}/s, "
        done += f"{bytes / 1e6:,.0f} MB, {bytes / 1e6 / seconds:,.0f} MB/s"
        self.update(self.task, completed=self._count(images, bytes), done=done)

    def _count(self, images: int, bytes: int) -> int:
        """`images` or `bytes`, depending on the unit of the bar."""
        if self.unit == "images":
            return images
        return bytes


class Position(NamedTuple):
    """A position in a run."""

    epochs: int  # TRAIN.EPOCHS
    max_steps: int  # TRAIN.MAX_STEPS; 0: no limit
    steps_per_epoch: int
    epoch: int  # complete epochs
    epoch_step: int  # steps of the current epoch
    step: int  # steps in all


def steps_left(position: Position) -> int:
    """The number of steps until the end of the run."""
    left = (position.epochs - position.epoch) * position.steps_per_epoch - position.epoch_step
    if position.max_steps:
        left = min(left, position.max_steps - position.step)
    return max(left, 0)


def seconds_left(
    progress: Any, seconds_per_step: float, seconds_per_validation: float = 0.0
) -> float:
    """Seconds until the end of the run, with a validation after each epoch and after the last step.

    Args:
        progress: a Position, or an object with its attributes.
        seconds_per_step: seconds per step, at the recent speed.
        seconds_per_validation: duration of the last validation; 0 before the first one, which makes
            the result too small.
    """
    position = Position(*(getattr(progress, name) for name in Position._fields))
    steps = steps_left(position)
    validations = math.ceil((position.epoch_step + steps) / position.steps_per_epoch)
    return steps * seconds_per_step + validations * seconds_per_validation


def in_words(seconds: float) -> str:
    """A duration in one or two units: 40 s, 12 min, 3 h 05 min, 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min"


def block_place(layer: str) -> str:
    """The stage and block of an MoE layer, counted from 0 as in MODEL.MOE.BLOCKS and in the names
    of parameters.

    "layers.2.blocks.1.mlp.moe" -> "stage 2, block 1"; "blocks.1.mlp.moe" -> "block 1".
    """
    numbers = [int(part) for part in layer.split(".") if part.isdecimal()]
    if len(numbers) == 2:
        stage, block = numbers
        return f"stage {stage}, block {block}"
    if len(numbers) == 1:
        return f"block {numbers[0]}"
    return layer
