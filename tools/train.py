"""Train SwinV2-MoE as a configuration says.

python tools/train.py --cfg configs/quickstart_digits.yaml --output output/digits
torchrun --nproc_per_node 2 tools/train.py --cfg configs/quickstart_digits.yaml --output output/digits2
"""

import argparse

from swinv2_moe.command import add_config_arguments, config_from, run_command
from swinv2_moe.engine import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument(
        "--resume", metavar="auto|DIR", help="go on from a checkpoint or run; auto: from --output's last"
    )
    args = parser.parse_args()
    train(config_from(args), resume=args.resume)


if __name__ == "__main__":
    run_command(main)
