"""cifar10, cifar100: the Python versions of CIFAR, unpacked."""

from typing import TYPE_CHECKING

import numpy as np

from swinv2_moe.data.section import DataConfig, register_dataset
from swinv2_moe.data.sources.base import ImageArrays, Sources, content_of
from swinv2_moe.errors import UserError

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10


@register_dataset("cifar10")
def cifar10(config: DataConfig) -> Sources:
    from torchvision.datasets import CIFAR10

    return _load(CIFAR10, config.path)


@register_dataset("cifar100")
def cifar100(config: DataConfig) -> Sources:
    from torchvision.datasets import CIFAR100

    return _load(CIFAR100, config.path)


def _load(dataset: "type[CIFAR10]", root: str) -> Sources:
    try:
        train = dataset(root, train=True, download=False)
        val = dataset(root, train=False, download=False)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"DATA.PATH is {root!r}: it holds no intact {dataset.base_folder}/ (nothing is"
            f" downloaded, data/README.md says where {dataset.__name__} comes from); found:"
            f" {content_of(root)}"
        ) from error
    return Sources(_arrays(train), _arrays(val), list(train.classes))


def _arrays(part: "CIFAR10") -> ImageArrays:
    return ImageArrays(type(part).__name__, part.data, np.asarray(part.targets, np.int64))
