"""What the commands in tools/ share: the configuration's arguments, and one line for a user's mistake."""

import argparse
import os
import sys
from collections.abc import Callable

from yacs.config import CfgNode

from moe_core.parallel import CollectiveError
from swinv2_moe.config import load_config
from swinv2_moe.engine.stopping import StoppedElsewhere
from swinv2_moe.errors import UserError


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """--cfg, --data, --output and --opts."""
    parser.add_argument("--cfg", required=True, metavar="FILE", help="a YAML file below configs/, or your own")
    parser.add_argument(
        "--data", metavar="DIR", help="the data set (DATA.PATH); a folder of images with train/ and val/"
    )
    parser.add_argument("--output", metavar="DIR", help="the run directory (OUTPUT)")
    parser.add_argument("--opts", nargs="+", default=[], metavar="KEY VALUE", help="any configuration keys, in pairs")


def config_from(args: argparse.Namespace) -> CfgNode:
    """The checked configuration that the arguments describe."""
    return load_config(args.cfg, args.opts, data=args.data, output=args.output)


def run_command(main: Callable[[], None]) -> None:
    """Run a command; a UserError becomes one line on the main rank's stderr and exit status 2."""
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except CollectiveError as error:  # each rank knows its own part of it; NCCL's own words are many lines
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except StoppedElsewhere:
        sys.exit(os.EX_TEMPFAIL)
    except KeyboardInterrupt:
        sys.exit(130)
