"""Ctrl-C ends a command with one line and exit status 130, also during the command's imports.

swinv2_moe.command imports this module before modules that take seconds to import. Therefore this
module imports almost nothing.
"""

import os
import signal
import sys

INTERRUPTED = 130  # the exit status that shells report for a process ended by SIGINT


def end_interrupted() -> None:
    """Exit after a KeyboardInterrupt, with one line on the main rank's stderr.

    A second Ctrl-C ends the process immediately.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _report(kind: type[BaseException], error: BaseException, trace: object) -> None:
    if issubclass(kind, KeyboardInterrupt):
        end_interrupted()
    _report_others(kind, error, trace)


_report_others, sys.excepthook = sys.excepthook, _report
