"""Tables of numbers for a terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.table import Table


def number_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Collection[str] = (),
    markdown: bool = False,
) -> Table:
    """A table whose first column is text and whose others are numbers, aligned to the right.

    Args:
        columns: titles.
        rows: cells of each row.
        text_columns: titles of further columns of text, aligned to the left.
        markdown: draw it in Markdown.
    """
    table = Table(box=MARKDOWN if markdown else SIMPLE_HEAD, collapse_padding=not markdown)
    for i, title in enumerate(columns):
        is_text = i == 0 or title in text_columns
        table.add_column(title, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row)
    return table
