"""Consistency checks of the keys in MODEL.SWINV2."""

from yacs.config import CfgNode

from swinv2_moe.errors import UserError
from swinv2_moe.model_types import check_moe_blocks


def check_swinv2(config: CfgNode) -> None:
    """Raise UserError for values of MODEL.SWINV2 that contradict each other or the image size."""
    swin, moe = config.MODEL.SWINV2, config.MODEL.MOE
    stages = len(swin.DEPTHS)
    for name, value in (
        ("SWINV2.NUM_HEADS", swin.NUM_HEADS),
        ("SWINV2.PRETRAINED_WINDOW_SIZES", swin.PRETRAINED_WINDOW_SIZES),
        ("MOE.BLOCKS", moe.BLOCKS),
    ):
        if len(value) != stages:
            raise UserError(
                f"MODEL.{name} is {value}, it must have one entry for each of the {stages} stages"
                f" of MODEL.SWINV2.DEPTHS ({swin.DEPTHS})"
            )
    for name in ("DEPTHS", "NUM_HEADS"):
        if not swin[name] or min(swin[name]) < 1:
            raise UserError(
                f"MODEL.SWINV2.{name} is {swin[name]}, it must have an entry of at least 1 for each"
                " stage"
            )
    for stage, heads in enumerate(swin.NUM_HEADS):
        dim = swin.EMBED_DIM * 2**stage
        if dim % heads:
            raise UserError(
                f"MODEL.SWINV2.NUM_HEADS is {swin.NUM_HEADS}: the {dim} channels of stage {stage}"
                f" (MODEL.SWINV2.EMBED_DIM {swin.EMBED_DIM}) cannot be divided over {heads} heads"
            )
    check_moe_blocks(config, swin.DEPTHS)
    _check_image_size(config)


def _check_image_size(config: CfgNode) -> None:
    """Every stage's feature map must be whole windows, or no larger than one window."""
    size, swin = config.DATA.IMG_SIZE, config.MODEL.SWINV2
    if not _tiles(size, swin):
        unit = swin.PATCH_SIZE * 2 ** (len(swin.DEPTHS) - 1)
        good = [s for s in range(unit, size + 16 * unit, unit) if _tiles(s, swin)]
        near = sorted(sorted(good, key=lambda s: abs(s - size))[:3])
        raise UserError(
            f"DATA.IMG_SIZE is {size}, windows of {swin.WINDOW_SIZE} (MODEL.SWINV2.WINDOW_SIZE) on"
            f" patches of {swin.PATCH_SIZE} cannot tile it; sizes near it that work:"
            f" {', '.join(map(str, near))}"
        )


def _tiles(size: int, swin: CfgNode) -> bool:
    if size % (swin.PATCH_SIZE * 2 ** (len(swin.DEPTHS) - 1)):
        return False
    sides = [size // swin.PATCH_SIZE // 2**stage for stage in range(len(swin.DEPTHS))]
    return all(side <= swin.WINDOW_SIZE or side % swin.WINDOW_SIZE == 0 for side in sides)
