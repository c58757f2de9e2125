"""List the keys of the configuration with their defaults and, where they are few, their values.

swinv2-moe config
swinv2-moe config MODEL.MOE     # the keys below, with types, limits and meanings
swinv2-moe config --markdown    # tables of all of them
"""

import argparse
import os
import sys

from swinv2_moe.config.checks import choices
from swinv2_moe.config.reference import describe, markdown
from swinv2_moe.config.tree import default_config, flatten
from swinv2_moe.errors import UserError
from swinv2_moe.imports import add_import_argument
from swinv2_moe.output import HelpFormatter, print_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "prefix", nargs="?", metavar="PREFIX", help="a key, or the first words of keys"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="a document with types, limits and meanings"
    )
    add_import_argument(parser)
    try:
        args = parser.parse_args()
        described = ""
        if args.prefix:
            described = describe(args.prefix)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    try:
        if args.markdown:
            print_lines(*markdown().splitlines())
        elif described:
            print_lines(*described.split("\n"))
        else:
            _print_keys()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reading process, such as `head`, has ended. Python flushes stdout once more when it
        # exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_keys() -> None:
    allowed = choices()
    for key, value in flatten(default_config()).items():
        line = f"{key}: {value!r}"
        if key in allowed:
            line += f"  # {', '.join(str(choice) or repr(choice) for choice in allowed[key])}"
        print_lines(line)


if __name__ == "__main__":
    main()
