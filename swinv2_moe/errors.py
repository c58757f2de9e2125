"""The exception for a user's mistake, and functions that format its message."""

from collections.abc import Sequence

from swinv2_moe.output import printable


class UserError(Exception):
    """Raised for user input (configuration, data, checkpoint) that cannot be used.

    The message names the input and its value. Commands print the message in one line, without a
    traceback, and exit with status 2.
    """


def short(value: object, length: int = 80) -> str:
    """The `repr` of a value from a file, for messages: at most `length` characters and "..."."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; deep nesting
        return f"{type(value).__name__} that is too large to print"
    if len(text) <= length:
        return text
    return f"{text[:length]}..."


def one_line(text: str) -> str:
    """Convert `text` to one line: line ends become spaces; the rest as `printable`."""
    return printable(" ".join(text.split()))


def shortened(names: Sequence[object]) -> str:
    """The first three names, separated by commas, and how many there are in all."""
    text = ", ".join(one_line(str(name)) for name in names[:3])
    if len(names) > 3:
        text += f", ... ({len(names)} in all)"
    return text


class StoppedElsewhere(Exception):
    """Raised on a rank that has saved and stops because another rank received SIGTERM.

    It is only raised under a launcher that restarts ranks. For torchrun, exit status 0 of a rank
    means the end of the job. Here a single node leaves, and the ranks of the other nodes must
    restart.
    """
