"""Mixup and cutmix."""

from timm.data import Mixup

from swinv2_moe.config import AugmentConfig


def build_mixup(config: AugmentConfig, label_smoothing: float, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix, or None if both are off."""
    if config.mixup_prob == 0 or (config.mixup == 0 and config.cutmix == 0):
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        prob=config.mixup_prob,
        switch_prob=config.mixup_switch_prob,
        mode=config.mixup_mode,
        label_smoothing=label_smoothing,
        num_classes=num_classes,
    )
