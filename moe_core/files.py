"""Opening files that may not be what their name promises."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading in binary mode.

    Opening a named pipe would wait for a writer, and reading a device may never end.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; `strerror` says which.
    """
    try:
        # O_NONBLOCK: open() returns at once for a named pipe, too. It changes nothing for regular
        # files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # NUL in the name, or characters that no name has
        raise OSError(errno.EINVAL, "not a file name", repr(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
