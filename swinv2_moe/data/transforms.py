"""timm's transforms, under this project's configuration keys.

C channels, S DATA.IMG_SIZE
"""

from collections.abc import Callable

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp, posterize
from torchvision import transforms

from swinv2_moe.config import DataConfig
from swinv2_moe.errors import UserError

Transform = Callable[[Image.Image], torch.Tensor]


def build_transform(config: DataConfig, is_train: bool) -> Transform:
    """A PIL image of any size -> float32 [C, S, S], normalised with DATA.MEAN and DATA.STD.

    Training draws from `random`, `numpy.random` and torch's CPU generator; evaluation draws
    nothing.

    Raises:
        UserError: timm does not know AUG.AUTO_AUGMENT.
    """
    if is_train:
        return _train_transform(config)
    return _eval_transform(config)


def _train_transform(config: DataConfig) -> Transform:
    aug = config.augment
    try:
        transform = create_transform(
            config.img_size,
            is_training=True,
            scale=aug.scale,
            ratio=aug.ratio,
            hflip=aug.hflip,
            color_jitter=aug.color_jitter or None,
            auto_augment=aug.auto_augment if aug.auto_augment not in ("", "none") else None,
            interpolation=config.interpolation,
            mean=config.mean,
            std=config.std,
            re_prob=aug.reprob,
            re_mode=aug.remode,
            re_count=aug.recount,
        )
    # only the policy string is parsed in there
    except (AssertionError, ValueError, KeyError) as error:
        raise UserError(
            f"AUG.AUTO_AUGMENT is {aug.auto_augment!r}, timm knows no such policy;"
            " '' is off, 'rand-m9-mstd0.5-inc1' is the usual one"
        ) from error
    for op in _augment_ops(transform):
        if op.aug_fn is posterize:
            op.aug_fn = _posterize
    # all of the picture: a random aspect ratio would still cut a strip off it
    if aug.scale == (1, 1):
        transform.transforms[0] = _eval_transform(config, crop=False).transforms[0]
    return transform


def _augment_ops(transform: transforms.Compose) -> list[AugmentOp]:
    """The operations of timm's RandAugment, AugMix (`ops`) and AutoAugment (`policy`, lists of
    them)."""
    groups = [
        group
        for step in transform.transforms
        for group in (*getattr(step, "policy", ()), getattr(step, "ops", ()))
    ]
    return [op for group in groups for op in group]


def _posterize(image: Image.Image, bits_to_keep: int, **unused: object) -> Image.Image:
    # timm's strongest level asks for 0 bits, a black picture; Pillow 13 raises a ValueError for it.
    return posterize(image, max(1, bits_to_keep))


def _eval_transform(config: DataConfig, crop: bool | None = None) -> transforms.Compose:
    crop = config.test.crop if crop is None else crop
    return create_transform(
        config.img_size,
        is_training=False,
        crop_pct=config.test.crop_ratio if crop else 1.0,
        crop_mode="center" if crop else "squash",  # squash: both sides resized
        # "random" is a training choice
        interpolation="bilinear" if config.interpolation == "random" else config.interpolation,
        mean=config.mean,
        std=config.std,
    )
