"""Checks and views of what a layer is called with."""

# B images, N tokens of an image, T tokens, M model dim

from torch import Tensor


def as_images(x: Tensor) -> Tensor:
    """Tokens by image [B, N, M]: the first dim of x [B, ..., M] counts images; x [T, M] and x [M]
    are of one image."""
    if x.dim() < 3:
        return x.reshape(1, -1, x.shape[-1])
    return x.flatten(1, -2)


def check_tensors(x: Tensor, mask: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, not {type(x).__name__}")
    if x.dim() == 0:
        raise ValueError("x is 0-d, its last dim must be the layer's model_dim")
    if not x.is_floating_point():
        raise ValueError(f"x has dtype {x.dtype}, it must be floating-point")
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a tensor, not {type(mask).__name__}")
    if mask.is_floating_point():  # an additive mask keeps the positions that are 0
        raise ValueError(f"mask has dtype {mask.dtype}, it must be bool")
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask has shape {list(mask.shape)}, the tokens of x {list(x.shape[:-1])}")


def positions_of(mask: Tensor, count: int | None) -> Tensor:
    """Where `mask` [T] is True, in order: [count]."""
    if count is None:
        return mask.nonzero().squeeze(1)
    return mask.nonzero_static(size=count).squeeze(1)
