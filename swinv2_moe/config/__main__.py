"""List every key of the configuration with its default and, where they are few, its values.

python -m swinv2_moe.config
python -m swinv2_moe.config --markdown    # tables with types and meanings
"""

import argparse
import os
import sys

from swinv2_moe.config.checks import choices
from swinv2_moe.config.defaults import default_config, flatten
from swinv2_moe.config.reference import markdown
from swinv2_moe.errors import UserError
from swinv2_moe.imports import add_import_argument


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--markdown", action="store_true", help="a document with types, limits and meanings"
    )
    add_import_argument(parser)
    try:
        args = parser.parse_args()
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    try:
        if args.markdown:
            print(markdown(), end="")
        else:
            _print_keys()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has ended. Python flushes stdout once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_keys() -> None:
    allowed = choices()
    for key, value in flatten(default_config()).items():
        line = f"{key}: {value!r}"
        if key in allowed:
            line += f"  # {', '.join(str(choice) or repr(choice) for choice in allowed[key])}"
        print(line)


if __name__ == "__main__":
    main()
