"""Text that leaves the program. Every terminal line, CSV cell, page and figure passes `printable`.

Names of files, classes, tensors and configurations come from others. They may hold commands to the
terminal, marks that reverse the reading direction, or the credentials of a URI.
"""

import argparse
import csv
import io
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

_WORD = re.compile(r"[^\s'\"]+")
_USER = re.compile(r"(\w://)[^/?#@:]*(?::.*)?@")  # within a word that ends in @
_SECRET = re.compile(
    r"([?&][\w.-]*(?:pass(?:word|wd)?|pwd|token|secret|key|sig|signature|credential)=)[^\s&'\"]+",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?")
_COMMAND = re.compile(r"(swinv2-moe|swinv2_moe|torchrun|python) \S")
_COLUMNS = (60, 100)  # the least and the most that help takes
_JOINERS = "\u200c\u200d"  # inside words of Persian and of Indian languages, and in emoji


def printable(text: object, keep: str = "") -> str:
    """The text with escapes for characters that are not printable, and without credentials.

    Escaped are control characters, line ends, marks of reading direction, and bytes of a file name
    that are not UTF-8.

    Args:
        keep: characters that are not escaped.
    """
    text = without_credentials(str(text))
    if text.isprintable():
        return text
    return "".join(char if char in keep else _shown(char) for char in text)


def _shown(char: str) -> str:
    if char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs":
        return char
    if "\udc80" <= char <= "\udcff":  # a byte that Python could not decode
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape", "backslashreplace").decode()


def without_credentials(text: str) -> str:
    """The text with *** in place of the user and password of URIs, and of secrets in their
    queries."""
    if "://" not in text:
        return text
    return _SECRET.sub(r"\1***", _WORD.sub(_without_users, text))


def _without_users(word: re.Match) -> str:
    # A password may hold @. In a word that ends in @ no search for the last one fails: the time
    # grows with the length of a hostile text, not with its square.
    head, at, tail = word[0].rpartition("@")
    return _USER.sub(r"\1***@", head + at) + tail


def between_words(line: str, width: int) -> str:
    """The line with line ends between words, where a terminal of `width` columns would end it
    inside one. A line with a command stays as it is, so that it can be copied."""
    if len(line) <= width or _COMMAND.search(line):
        return line
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def print_lines(*lines: object, file: TextIO | None = None, flush: bool = False) -> None:
    """Print each of `lines` on stdout, or on `file`: in one line, on a terminal `between_words`."""
    file, texts = file or sys.stdout, [printable(line) for line in lines]
    if file.isatty():
        width = shutil.get_terminal_size().columns
        texts = [between_words(text, width) for text in texts]
    print(*texts, sep="\n", file=file, flush=flush)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help that ends lines between words. Indented lines of a description are commands, and stay
    as they are."""

    def __init__(self, prog: str) -> None:
        least, most = _COLUMNS
        columns = shutil.get_terminal_size().columns - 2
        super().__init__(prog, width=min(max(columns, least), most))

    def _split_lines(self, text: str, width: int) -> list[str]:
        words = " ".join(text.split())
        return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for paragraph in text.split("\n\n"):
            if paragraph.startswith(" "):
                lines += [paragraph, ""]
            else:
                lines += [*self._split_lines(paragraph, width), ""]
        return "\n".join(lines).rstrip()


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """The rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def csv_cell(value: object) -> object:
    """A value of a CSV file: text as `printable`, and with ' where it would be a formula."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    if text.startswith(("=", "+", "-", "@")) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return text
