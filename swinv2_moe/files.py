"""Reading files that nobody has checked yet: bounded in size, depth and kind."""

import errno
import json
import os
from pathlib import Path
from typing import Any

from moe_core import open_regular


def read_bounded(path: str | Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger; `strerror` says which.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested too deeply, or holds an integer of thousands of digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: str | Path, max_bytes: int) -> Any:
    """The value of a JSON file of at most `max_bytes` bytes.

    Raises:
        OSError: see `read_bounded`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_bounded(path, max_bytes))


def check_plain_name(name: object) -> str:
    """`name` if it is the name of a file within one directory: no separator, no NUL, not "." or "..".

    Raises:
        ValueError: it is not; the message has its value.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or os.sep in name or "\0" in name:
        raise ValueError(f"{name!r} is not a plain file name")
    return name
