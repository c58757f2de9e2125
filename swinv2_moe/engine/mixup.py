"""Mixup and cutmix."""

from timm.data import Mixup
from yacs.config import CfgNode


def build_mixup(config: CfgNode, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix, or None where both are off."""
    aug = config.AUG
    if aug.MIXUP_PROB == 0 or (aug.MIXUP == 0 and aug.CUTMIX == 0):
        return None
    return Mixup(
        mixup_alpha=aug.MIXUP,
        cutmix_alpha=aug.CUTMIX,
        prob=aug.MIXUP_PROB,
        switch_prob=aug.MIXUP_SWITCH_PROB,
        mode=aug.MIXUP_MODE,
        label_smoothing=config.MODEL.LABEL_SMOOTHING,
        num_classes=num_classes,
    )
