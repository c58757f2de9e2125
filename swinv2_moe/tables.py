"""Tables of numbers for a terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table


def number_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Collection[str] | None = None,
    markdown: bool = False,
) -> Table:
    """A table with columns of numbers, aligned to the right, and columns of text.

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
        table.add_column(title, justify=justify)
    for row in rows:
        table.add_row(*row)
    return table
