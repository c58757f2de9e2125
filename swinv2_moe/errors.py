"""The one exception that stands for a user's mistake: tools print its single line and exit 2,
without a traceback."""


class UserError(Exception):
    """Something the user gave (configuration, data, checkpoint) cannot be used; the message names
    it and its value."""


def short(value: object, length: int = 80) -> str:
    """How a message shows a value that a file holds: its `repr`, of at most `length` characters and
    three dots."""
    try:
        text = repr(value)
    # an integer of thousands of digits; nested as deeply as parsers allow
    except (ValueError, RecursionError):
        return f"{type(value).__name__} that is too large to print"
    if len(text) <= length:
        return text
    return f"{text[:length]}..."


def one_line(text: str) -> str:
    """`text` as a terminal can show it: spaces for line ends, escapes for control characters."""
    joined = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in joined)
