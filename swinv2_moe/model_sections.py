"""Sections of the configuration that hold the arguments of models: MODEL.SWINV2, MODEL.VIT.

They are apart from the models (swinv2_moe.models), which import torch: a configuration is read and
checked without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from yacs.config import CfgNode

from swinv2_moe.errors import UserError


def _check_nothing(config: CfgNode) -> None:
    """The check of a section whose values cannot contradict each other."""


@dataclass(frozen=True)
class Section:
    """A group of keys below MODEL, read by one model type or several.

    Args:
        name: of the group: MODEL.<name>.
        defaults: each key's default.
        ranges: the lowest and the highest value of a key, both included.
        check: raises UserError for values of a configuration that contradict each other.
        sizes: keys that summaries of a model show, under the names that they show them by.
        meanings: what a key means, for the reference of keys.
    """

    name: str
    defaults: Mapping[str, object]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    check: Callable[[CfgNode], None] = _check_nothing
    sizes: Mapping[str, str] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)


def check_moe_blocks(config: CfgNode, depths: Sequence[int]) -> None:
    """Raise UserError where MODEL.MOE.BLOCKS names a block that no stage of `depths` has."""
    blocks = config.MODEL.MOE.BLOCKS
    for stage, chosen in enumerate(blocks):
        depth = 0
        if stage < len(depths):
            depth = depths[stage]
        for block in chosen:
            if not (isinstance(block, int) and 0 <= block < depth):
                raise UserError(
                    f"MODEL.MOE.BLOCKS is {blocks}: stage {stage} has no block {block}, its"
                    f" {depth} blocks count from 0"
                )


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
    if min(swin.PRETRAINED_WINDOW_SIZES) < 0:
        raise UserError(
            f"MODEL.SWINV2.PRETRAINED_WINDOW_SIZES is {swin.PRETRAINED_WINDOW_SIZES}, its entries"
            " must be at least 0"
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


def check_vit(config: CfgNode) -> None:
    """Raise UserError for values of MODEL.VIT that contradict each other or the image size."""
    vit, size = config.MODEL.VIT, config.DATA.IMG_SIZE
    if vit.EMBED_DIM % vit.NUM_HEADS:
        raise UserError(
            f"MODEL.VIT.NUM_HEADS is {vit.NUM_HEADS}: MODEL.VIT.EMBED_DIM ({vit.EMBED_DIM}) cannot"
            f" be divided over {vit.NUM_HEADS} heads"
        )
    if vit.GLOBAL_POOL not in ("token", "avg"):
        raise UserError(f"MODEL.VIT.GLOBAL_POOL is {vit.GLOBAL_POOL!r}, allowed: token, avg")
    if size % vit.PATCH_SIZE:
        below = size // vit.PATCH_SIZE * vit.PATCH_SIZE
        raise UserError(
            f"DATA.IMG_SIZE is {size}, it must be a multiple of MODEL.VIT.PATCH_SIZE"
            f" ({vit.PATCH_SIZE}), such as {below or vit.PATCH_SIZE} or {below + vit.PATCH_SIZE}"
        )
    check_moe_blocks(config, [vit.DEPTH])
    if config.MODEL.MOE.NUM_EXPERTS and len(config.MODEL.MOE.BLOCKS) != 1:
        raise UserError(
            f"MODEL.MOE.BLOCKS is {config.MODEL.MOE.BLOCKS}, it must have one entry for the only"
            " stage of a ViT"
        )


SWINV2 = Section(
    "SWINV2",
    {
        "PATCH_SIZE": 4,
        "EMBED_DIM": 96,
        "DEPTHS": [2, 2, 18, 2],
        "NUM_HEADS": [3, 6, 12, 24],
        "WINDOW_SIZE": 12,
        "MLP_RATIO": 4.0,
        "PRETRAINED_WINDOW_SIZES": [0, 0, 0, 0],
    },
    ranges={
        "PATCH_SIZE": (1, inf),
        "EMBED_DIM": (1, inf),
        "WINDOW_SIZE": (1, inf),
        "MLP_RATIO": (0.1, inf),
    },
    check=check_swinv2,
    sizes={"dim": "EMBED_DIM", "depths": "DEPTHS"},
    meanings={
        "PATCH_SIZE": "side of a patch, pixels",
        "EMBED_DIM": "channels of the first stage; each further stage has twice as many",
        "DEPTHS": "blocks of each stage",
        "NUM_HEADS": "attention heads of each stage; each number divides the stage's channels",
        "WINDOW_SIZE": "side of an attention window, patches",
        "MLP_RATIO": "hidden dim of an FFN, in units of its channels",
        "PRETRAINED_WINDOW_SIZES": "for each stage, the window side that the pretrained weights"
        " were trained with; 0: `WINDOW_SIZE`",
    },
)

VIT = Section(
    "VIT",
    {
        "PATCH_SIZE": 16,
        "EMBED_DIM": 192,
        "DEPTH": 12,
        "NUM_HEADS": 3,
        "GLOBAL_POOL": "token",
    },
    ranges={
        "PATCH_SIZE": (1, inf),
        "EMBED_DIM": (1, inf),
        "DEPTH": (1, inf),
        "NUM_HEADS": (1, inf),
    },
    check=check_vit,
    sizes={"dim": "EMBED_DIM", "depth": "DEPTH"},
    meanings={
        "PATCH_SIZE": "side of a patch, pixels; divides `DATA.IMG_SIZE`",
        "EMBED_DIM": "channels of a token; divisible by `NUM_HEADS`",
        "DEPTH": "number of blocks",
        "NUM_HEADS": "attention heads of a block",
        "GLOBAL_POOL": "what the classifier reads: `token`, the class token, or `avg`, the mean of"
        " the patches",
    },
)

# By model type. A type of another section is a file of swinv2_moe.models that holds it.
SECTIONS = {"swinv2_moe": SWINV2, "swin_moe": SWINV2, "vit_moe": VIT}
