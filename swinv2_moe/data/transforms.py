"""timm's transforms, under this project's configuration keys.

C channels, S DATA.IMG_SIZE
"""

from collections.abc import Callable
from functools import partial

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp, posterize
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms

from swinv2_moe.data.section import DataConfig
from swinv2_moe.errors import UserError

Transform = Callable[[Image.Image], torch.Tensor]
# Longer images are shortened before they are resized. The input of 1024 pixels then has an
# intermediate image of at most 37 megapixels.
MAX_RATIO = 32


def build_transform(config: DataConfig, is_train: bool) -> Transform:
    """Build the transform of a PIL image of any size to float32 [C, S, S], normalised with
    DATA.MEAN and DATA.STD.

    Training draws from `random`, `numpy.random` and torch's CPU generator; evaluation is
    deterministic.

    Raises:
        UserError: timm does not know AUG.AUTO_AUGMENT.
    """
    if not is_train:
        return _eval_transform(config, crop=config.test.crop_ratio > 0)
    transform = _train_transform(config)
    if config.augment.scale == (1, 1):
        # The whole image is used. A random crop of another aspect ratio would remove a strip.
        transform.transforms[:1] = _eval_transform(config, crop=False).transforms[:2]
    return transform


def _train_transform(config: DataConfig) -> transforms.Compose:
    aug = config.augment
    auto_augment = None
    if aug.auto_augment not in ("", "none"):
        auto_augment = aug.auto_augment
    try:
        transform = create_transform(
            config.img_size,
            is_training=True,
            scale=aug.scale,
            hflip=aug.hflip,
            color_jitter=aug.color_jitter or None,  # type: ignore[arg-type]  # timm tests for None
            auto_augment=auto_augment,
            interpolation=config.interpolation,
            mean=config.mean,
            std=config.std,
            re_prob=aug.reprob,
            re_mode="pixel",
        )
    # This is the only argument that timm parses.
    except (AssertionError, ValueError, KeyError) as error:
        raise UserError(
            f"AUG.AUTO_AUGMENT is {aug.auto_augment!r}, timm knows no such policy;"
            " '' is off, 'rand-m9-mstd0.5-inc1' is the usual one"
        ) from error
    for op in _augment_ops(transform):
        if op.aug_fn is posterize:
            op.aug_fn = _posterize
    transform.transforms[0].get_params = _crop_box
    return transform


def _crop_box(
    image: Image.Image, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop. Of an image of few pixels, timm's has a height
    or width of 0, which gives a black image; this one has at least 1."""
    top, left, height, width = RandomResizedCropAndInterpolation.get_params(image, scale, ratio)
    top, left = min(top, image.height - 1), min(left, image.width - 1)
    return top, left, max(1, height), max(1, width)


def _augment_ops(transform: transforms.Compose) -> list[AugmentOp]:
    """The operations in `ops` of timm's RandAugment and AugMix, and `policy` of AutoAugment."""
    ops: list[AugmentOp] = []
    for step in transform.transforms:
        ops += getattr(step, "ops", ())
        for sub_policy in getattr(step, "policy", ()):
            ops += sub_policy
    return ops


def _posterize(image: Image.Image, bits_to_keep: int, **unused: object) -> Image.Image:
    # timm's strongest level keeps 0 bits, which gives a black image, and a ValueError in Pillow 13.
    return posterize(image, max(1, bits_to_keep))


def _eval_transform(config: DataConfig, crop: bool) -> transforms.Compose:
    """Resize the shorter side and crop the centre, or resize both sides."""
    crop_ratio, crop_mode = 1.0, "squash"
    if crop:
        crop_ratio, crop_mode = config.test.crop_ratio, "center"
    bound = partial(bounded, size=config.img_size, crop=crop)
    interpolation = config.interpolation
    if interpolation == "random":  # "random" is for training only
        interpolation = "bilinear"
    transform = create_transform(
        config.img_size,
        is_training=False,
        crop_pct=crop_ratio,
        crop_mode=crop_mode,
        interpolation=interpolation,
        mean=config.mean,
        std=config.std,
    )
    return transforms.Compose([bound, *transform.transforms])


def bounded(image: Image.Image, size: int, crop: bool) -> Image.Image:
    """The image, with a long side that takes little memory when the short side is resized.

    An image is unchanged unless its long side exceeds MAX_RATIO times the short side.

    Args:
        size: side of the model's input.
        crop: keep the middle, which the centre crop takes; else average along the long side.
    """
    width, height = image.size
    longest = MAX_RATIO * min(image.size)
    if max(image.size) <= longest:
        return image
    if crop:
        left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
        return image.crop((left, top, left + min(width, longest), top + min(height, longest)))
    longest = max(longest, size)
    # resize() would take 32 bytes for each pixel of the long side
    return image.reduce((max(1, width // longest), max(1, height // longest)))
