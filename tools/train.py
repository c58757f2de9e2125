"""Train SwinV2-MoE (or evaluate a checkpoint) as a configuration says.

python tools/train.py --cfg configs/quickstart_digits.yaml --output output/digits
torchrun --nproc_per_node 2 tools/train.py --cfg configs/quickstart_digits.yaml --output output/digits2
python tools/train.py --cfg configs/quickstart_digits.yaml --resume output/digits --eval
"""

import argparse

from swinv2_moe.command import add_config_arguments, config_from, run_command
from swinv2_moe.engine import evaluate, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument(
        "--resume", metavar="auto|DIR", help="go on from a checkpoint or run; auto: from --output's last"
    )
    parser.add_argument("--eval", action="store_true", help="only measure the accuracy of --resume's checkpoint")
    args = parser.parse_args()
    config = config_from(args)
    (evaluate if args.eval else train)(config, resume=args.resume)


if __name__ == "__main__":
    run_command(main)
