"""Unpack the ILSVRC 2012 archives that lie in a directory into its train/<wnid>/ and val/<wnid>/.

    python data/prepare_imagenet.py data/imagenet

torchvision checks the archives' MD5 sums and skips a split whose folder exists.
"""

import argparse
import pickle

from swinv2_moe.command import run_command  # first: it makes Ctrl-C one line

# isort: split

from torchvision.datasets import ImageNet

from swinv2_moe.errors import UserError

# Raised by torchvision for missing or damaged archives.
_DAMAGE = (RuntimeError, OSError, EOFError, LookupError, TypeError, ValueError)
_DAMAGE += (pickle.UnpicklingError,)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", help="holds ILSVRC2012_devkit_t12.tar.gz, _img_train.tar and _img_val.tar"
    )
    directory = parser.parse_args().directory
    try:
        for split in ("train", "val"):
            print(f"{split}: {len(ImageNet(directory, split))} images in 1,000 classes")
    except _DAMAGE as error:
        raise UserError(f"{directory}: {' '.join(str(error).split())}") from error


if __name__ == "__main__":
    run_command(main)
