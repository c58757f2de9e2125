"""Unpack the ILSVRC 2012 archives that lie in a directory into its train/<wnid>/ and val/<wnid>/.

    python data/prepare_imagenet.py data/imagenet

torchvision does the work: it checks the archives' MD5 sums and skips a split whose folder is already there.
"""

import argparse
import pickle
import sys

from torchvision.datasets import ImageNet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="holds ILSVRC2012_devkit_t12.tar.gz, _img_train.tar and _img_val.tar")
    directory = parser.parse_args().directory
    try:
        for split in ("train", "val"):
            print(f"{split}: {len(ImageNet(directory, split))} images in 1,000 classes")
    except (RuntimeError, OSError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        print(f"{directory}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
