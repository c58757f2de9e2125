"""Finds and checks the window sizes that a model's position network was trained with.

With log-spaced coordinates (arXiv 2111.09883, section 3.3) one network works for any window size.
But coordinates must be scaled by the window size of training. That is the model's window size, or
MODEL.SWINV2.PRETRAINED_WINDOW_SIZES if it has changed.
"""

# S stages, w a window's side in tokens

from collections.abc import Sequence
from typing import Any

from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor

from swinv2_moe.errors import UserError
from swinv2_moe.models.protocol import MoEModel

_LARGEST_STEP = 1.1  # log2(8 + 1) / log2(8) = 1.06, of a window of two tokens
# [1, 2w-1, 2w-1, 2], in Microsoft's and older timm files
_TABLE = "layers.{}.blocks.0.attn.relative_coords_table"


def windows_of_tables(state: dict[str, Tensor], stages: int) -> list[int] | None:
    """The window side with which each stage of dense weights was trained.

    It is computed from the coordinate tables that some files hold. None for files without them.
    """
    found = [state.get(_TABLE.format(stage)) for stage in range(stages)]
    tables = [table for table in found if table is not None]
    if len(tables) < stages:
        return None
    windows = [_window_of(table) for table in tables]
    if all(windows):
        return windows
    return None


def _window_of(table: Tensor) -> int:
    """The window side of a table; 0 if the table is not valid."""
    size = 0
    if table.ndim == 4:
        size = table.shape[1]
    if table.shape != (1, size, size, 2) or size % 2 == 0:
        return 0
    middle = size // 2
    if middle == 0:  # a window of one token
        return 1
    next_token = float(table[0, middle, middle + 1, 1])  # log2(8 / (w - 1) + 1) / log2(8)
    if not 1e-6 < next_token <= _LARGEST_STEP:
        return 0
    return round(8 / (8**next_token - 1)) + 1


def windows_of_model(model: SwinTransformerV2) -> list[int]:
    """For each stage the window side that the position biases of a SwinV2 were trained with."""
    windows = []
    stage: Any
    for stage in model.layers:
        attention = stage.blocks[0].attn
        windows.append(attention.pretrained_window_size[0] or attention.window_size[0])
    return windows


def set_windows(model: SwinTransformerV2, windows: Sequence[int]) -> None:
    """Measure the positions of each stage by another window side than the stage's own."""
    stage: Any
    for stage, window in zip(model.layers, windows, strict=True):
        for block in stage.blocks:
            block.attn.pretrained_window_size = (window, window)
            block.attn.init_non_persistent_buffers()


def check_windows(model: MoEModel, trained: Sequence[int] | None, source: str) -> None:
    """`compare_windows` with those of a model, which is asked only if `trained` are known."""
    if trained:
        compare_windows(model.position_windows(), trained, source)


def compare_windows(here: Sequence[int], trained: Sequence[int], source: str) -> None:
    """Compare the windows of weights with those of a model.

    Args:
        here: the model's windows; empty if its positions do not depend on them.
        trained: the weights' windows; empty where they are not known.

    Raises:
        UserError: the model would scale positions differently than in the training of its weights.
    """
    if trained and here and list(trained) != list(here):
        raise UserError(
            f"{source}: its position biases are for windows of {list(trained)}, the model would use"
            f" them for {here};"
            f" set MODEL.SWINV2.PRETRAINED_WINDOW_SIZES {str(list(trained)).replace(' ', '')}"
        )
