"""list: the images that two list files name."""

import numpy as np

from swinv2_moe.config import DataConfig
from swinv2_moe.data.lists import read_list
from swinv2_moe.data.sources.base import ImageFiles, Sources
from swinv2_moe.dataset_registry import register_dataset
from swinv2_moe.errors import UserError, shortened


@register_dataset("list", needs_path=False, needs_lists=True)
def listed(config: DataConfig) -> Sources:
    """Load the images of the lists. Classes are numbers: MODEL.NUM_CLASSES of them or, if it is 0,
    those in the training list."""
    num_classes = config.num_classes
    train = _image_files("DATA.TRAIN_LIST", config.train_list, num_classes, config)
    if not num_classes:
        num_classes = _count_classes(config.train_list, train.targets)
    val = _image_files("DATA.VAL_LIST", config.val_list, num_classes, config)
    return Sources(train, val, [str(label) for label in range(num_classes)])


def _image_files(key: str, file: str, num_classes: int, config: DataConfig) -> ImageFiles:
    root, paths, targets = read_list(key, file, config.path, num_classes)
    return ImageFiles(root, paths, targets)


def _count_classes(file: str, targets: np.ndarray) -> int:
    """The number of classes of a training list.

    Raises:
        UserError: a label below the highest one has no image.
    """
    labels = np.unique(targets)
    num_classes = int(labels[-1]) + 1
    if len(labels) == num_classes:
        return num_classes
    # Labels may be huge. The first few candidates suffice, since the message names three at most.
    candidates = np.arange(min(num_classes, len(labels) + 3))
    missing = np.setdiff1d(candidates, labels).tolist()
    raise UserError(
        f"DATA.TRAIN_LIST is {file!r}: its labels reach {num_classes - 1} but"
        f" {num_classes - len(labels)} below have no image ({shortened(missing)}); labels count"
        " from 0, MODEL.NUM_CLASSES (0) would allow gaps"
    )
