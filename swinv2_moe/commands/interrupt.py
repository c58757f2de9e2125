"""Ctrl-C ends a command with one line and exit status 130, also during the command's imports.

swinv2_moe.commands imports this module before modules that take seconds to import. Therefore this
module imports almost nothing.
"""

import os
import signal
import sys
import threading
import traceback
from types import TracebackType

INTERRUPTED = 130  # the exit status that shells report for a process ended by SIGINT


def end_interrupted() -> None:
    """Exit after a KeyboardInterrupt, with one line on the main rank's stderr.

    A second Ctrl-C ends the process immediately.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception, with escapes, since its text may contain that of a file."""
    if issubclass(kind, KeyboardInterrupt):
        end_interrupted()
    from swinv2_moe.output import printable

    lines = traceback.format_exception(kind, error, trace)
    print(printable("".join(lines), keep="\n"), file=sys.stderr, end="")


def _send_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Repeat a Ctrl-C that came in a destructor or a callback, where Python ignores exceptions."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        _unraisable_hook(ignored)


sys.excepthook = _report
_unraisable_hook = sys.unraisablehook
sys.unraisablehook = _send_again
