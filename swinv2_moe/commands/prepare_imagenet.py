"""Unpack the ILSVRC 2012 archives that lie in a directory into its train/<wnid>/ and val/<wnid>/.

    swinv2-moe prepare-imagenet data/imagenet

torchvision checks the archives' MD5 sums and skips a split whose folder exists.
"""

import pickle

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines

# Raised by torchvision for missing or damaged archives.
_DAMAGE = (
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "directory", help="holds ILSVRC2012_devkit_t12.tar.gz, _img_train.tar and _img_val.tar"
    )
    directory = parser.parse_args().directory
    from torchvision.datasets import ImageNet

    try:
        for split in ("train", "val"):
            print_lines(f"{split}: {len(ImageNet(directory, split))} images in 1,000 classes")
    except _DAMAGE as error:
        raise UserError(f"{directory}: {' '.join(str(error).split())}") from error
