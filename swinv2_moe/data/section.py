"""The sections DATA, AUG and TEST of a configuration, and the registry of datasets.

A new dataset is one file, `swinv2_moe/data/sources/NAME.py` or a file given by `--import FILE`:

    >>> from swinv2_moe.data import ImageArrays, Sources, register_dataset
    >>> @register_dataset("npz")
    ... def npz(config: DataConfig) -> Sources: ...
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_core.options import option

LoadFunction = TypeVar("LoadFunction", bound=Callable[[Any], Any])


@dataclass(frozen=True)
class RegisteredDataset:
    """A function that loads a dataset, and the configuration keys that it needs.

    Attributes:
        load: `DataConfig` -> `swinv2_moe.data.Sources`.
        needs_path: DATA.PATH must name a directory.
        needs_lists: DATA.TRAIN_LIST and DATA.VAL_LIST must name files; DATA.PATH is optional.
        use_workers: the loader may read images in DATA.NUM_WORKERS processes.
    """

    load: Callable[[Any], Any]
    needs_path: bool = True
    needs_lists: bool = False
    use_workers: bool = True

    @property
    def needs_files(self) -> bool:
        """Whether the configuration must name files. If so, `--data` names files of this dataset.
        Otherwise `--data` names a folder of images, which replaces this dataset."""
        return self.needs_path or self.needs_lists


# By name, the values of DATA.DATASET. Importing this package imports its own.
DATASETS: dict[str, RegisteredDataset] = {}


def register_dataset(
    name: str, *, needs_path: bool = True, needs_lists: bool = False, use_workers: bool = True
) -> Callable[[LoadFunction], LoadFunction]:
    """Decorator that registers a function as a value of DATA.DATASET.

    The function receives a `DataConfig` and returns `swinv2_moe.data.Sources`. In its `path`, "~"
    is expanded. If the dataset needs files, `path` is an existing directory or empty. For missing
    or broken data the function raises UserError, with a message of one line that names the file.

    Args:
        name: the value of DATA.DATASET.
        needs_path: DATA.PATH must name a directory.
        needs_lists: DATA.TRAIN_LIST and DATA.VAL_LIST must name files.
        use_workers: False for images that are fast to read. The training process then reads them,
            for any DATA.NUM_WORKERS.

    Raises:
        ValueError: the name is registered already, or is not a string.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a dataset is registered as {name!r}, which is not a name")
    if name in DATASETS:
        load = DATASETS[name].load
        place = f"{load.__module__}.{load.__qualname__}"
        raise ValueError(f"DATA.DATASET {name!r} is registered already: {place}")

    def register(load: LoadFunction) -> LoadFunction:
        DATASETS[name] = RegisteredDataset(load, needs_path, needs_lists, use_workers)
        return load

    return register


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """AUG: random changes of training images."""

    scale: tuple[float, float] = option(
        (0.08, 1.0),
        "smallest and largest area of a random resized crop, as shares of the image",
    )
    hflip: float = option(0.5, "probability of a horizontal flip", least=0, most=1)
    color_jitter: float = option(
        0.4,
        "strength of the colour jitter; 0: off. Only without `AUTO_AUGMENT`",
        least=0,
        most=1,
    )
    auto_augment: str = option("rand-m9-mstd0.5-inc1", "a policy of timm; empty or `none`: off")
    reprob: float = option(0.25, "probability of random erasing", least=0, most=1)
    mixup: float = option(0.8, "alpha of mixup; 0: off", least=0)
    cutmix: float = option(1.0, "alpha of cutmix; 0: off", least=0)


@dataclass(frozen=True, kw_only=True)
class CropConfig:
    """TEST: the part of an image that is evaluated."""

    crop_ratio: float = option(
        0.875,
        "side of the centre crop, as a share of the resized short side; 0: no crop, both sides"
        " are resized",
        least=0,
        most=1,
        affects="accuracy",
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """DATA: images and how they are read."""

    dataset: str = option(
        "digits",
        "source of the images, or a registered name (`--import`)",
        choices=DATASETS,
        affects="accuracy",
    )
    path: str = option(
        "",
        "`folder`: holds `train/` and `val/` with a folder per class; `list`: root of relative"
        " paths; `shards`: output of `swinv2-moe make-shards`. `--data` sets it",
        affects="accuracy",
    )
    train_list: str = option("", "`list`: file with one `path label` per line, or Swin's JSON map")
    val_list: str = option("", "`list`: as `TRAIN_LIST`, for validation", affects="accuracy")
    val_split: float = option(
        0.0,
        "`folder`, `imagenet`: share of each class of `train/` that is held out where there is"
        " no `val/`, the same for every `SEED`; files with equal bytes stay on one side",
        least=0,
        most=0.9,
        affects="accuracy",
    )
    batch_size: int = option(128, "images per rank per forward pass", least=1, affects="rate")
    global_batch_size: int = option(
        0,
        "images per step over all ranks; 0: `DATA.BATCH_SIZE` per rank",
        least=0,
        affects="rate",
    )
    img_size: int = option(
        192,
        "side of the square input, pixels",
        least=1,
        most=2**16,
        affects="accuracy",
    )
    channels: int = option(
        3,
        "channels of an image: 1, grey, or 3, RGB",
        choices=(1, 3),
        affects="accuracy",
    )
    interpolation: str = option(
        "bicubic",
        "interpolation in resizing; `random`: bilinear or bicubic, in training",
        choices=("nearest", "bilinear", "bicubic", "random"),
        affects="accuracy",
    )
    mean: tuple[float, ...] = option(
        (0.485, 0.456, 0.406),
        "mean of each channel; the default is ImageNet's",
        affects="accuracy",
    )
    std: tuple[float, ...] = option(
        (0.229, 0.224, 0.225),
        "standard deviation of each channel; the default is ImageNet's",
        affects="accuracy",
    )
    num_workers: int = option(2, "loader processes per rank", least=0, affects="")
    max_bad_share: float = option(
        0.01,
        "the run stops when a larger share of the images is unreadable",
        least=0,
        most=1,
        affects="",
    )

    augment: AugmentConfig
    test: CropConfig
    num_classes: int  # MODEL.NUM_CLASSES
    seed: int
    device: str
    # validation in a fixed random order: where the experts' capacity is limited, the images of a
    # batch affect each other, and more choices are dropped in a folder that is sorted by class
    shuffle_val: bool
    validation_only: bool  # the training images are not needed and need not exist
