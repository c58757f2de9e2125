"""timm's transforms, under this project's configuration keys.

C channels, S DATA.IMG_SIZE
"""

from collections.abc import Callable

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp, posterize
from torchvision import transforms
from yacs.config import CfgNode

from swinv2_moe.errors import UserError

Transform = Callable[[Image.Image], torch.Tensor]


def build_transform(config: CfgNode, is_train: bool) -> Transform:
    """A PIL image of any size -> float32 [C, S, S], normalised with DATA.MEAN and DATA.STD.

    Training draws from `random`, `numpy.random` and torch's CPU generator; evaluation draws
    nothing.

    Raises:
        UserError: timm does not know AUG.AUTO_AUGMENT.
    """
    return _train_transform(config) if is_train else _eval_transform(config)


def _train_transform(config: CfgNode) -> Transform:
    aug, data = config.AUG, config.DATA
    try:
        transform = create_transform(
            data.IMG_SIZE,
            is_training=True,
            scale=tuple(aug.SCALE),
            ratio=tuple(aug.RATIO),
            hflip=aug.HFLIP,
            color_jitter=aug.COLOR_JITTER or None,
            auto_augment=aug.AUTO_AUGMENT if aug.AUTO_AUGMENT not in ("", "none") else None,
            interpolation=data.INTERPOLATION,
            mean=tuple(data.MEAN),
            std=tuple(data.STD),
            re_prob=aug.REPROB,
            re_mode=aug.REMODE,
            re_count=aug.RECOUNT,
        )
    # only the policy string is parsed in there
    except (AssertionError, ValueError, KeyError) as error:
        raise UserError(
            f"AUG.AUTO_AUGMENT is {aug.AUTO_AUGMENT!r}, timm knows no such policy;"
            " '' is off, 'rand-m9-mstd0.5-inc1' is the usual one"
        ) from error
    for op in _augment_ops(transform):
        if op.aug_fn is posterize:
            op.aug_fn = _posterize
    # all of the picture: a random aspect ratio would still cut a strip off it
    if list(aug.SCALE) == [1, 1]:
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


def _eval_transform(config: CfgNode, crop: bool | None = None) -> transforms.Compose:
    crop = config.TEST.CROP if crop is None else crop
    return create_transform(
        config.DATA.IMG_SIZE,
        is_training=False,
        crop_pct=config.TEST.CROP_RATIO if crop else 1.0,
        crop_mode="center" if crop else "squash",  # squash: both sides resized
        # "random" is a training choice
        interpolation="bilinear"
        if config.DATA.INTERPOLATION == "random"
        else config.DATA.INTERPOLATION,
        mean=tuple(config.DATA.MEAN),
        std=tuple(config.DATA.STD),
    )
