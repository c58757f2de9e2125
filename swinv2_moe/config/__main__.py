"""List every key of the configuration with its default and, where they are few, its values.

python -m swinv2_moe.config
"""

import argparse

from swinv2_moe.config.checks import CHOICES
from swinv2_moe.config.defaults import default_config, flatten
from swinv2_moe.errors import UserError
from swinv2_moe.imports import add_import_argument
from swinv2_moe.model_types import model_types


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_import_argument(parser)
    try:
        parser.parse_args()
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    for key, value in flatten(default_config()).items():
        line = f"{key}: {value!r}"
        if key == "MODEL.TYPE":
            line += f"  # {', '.join(model_types())}"
        elif key in CHOICES:
            line += f"  # {', '.join(map(str, CHOICES[key]))}"
        print(line)


if __name__ == "__main__":
    main()
