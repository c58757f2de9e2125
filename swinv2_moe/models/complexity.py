"""Parameters and multiply-accumulates of a model, counted on the meta device, without
memory or computation."""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_LAYER_NORM = {
    torch.ops.aten.native_layer_norm: lambda shape, *_, out_shape=None, **__: 2 * shape.numel()
}


class Complexity(NamedTuple):
    """Totals over all experts; `macs` are those one image activates."""

    parameters: int
    macs: int


def count(model: nn.Module, img_size: int, in_chans: int = 3) -> Complexity:
    """Count a model that lives on the meta device.

    The MACs are what one more image in the batch costs, so the position bias, which a batch shares,
    is not in them: convolutions, linear layers, attention, and layer norms as one per element; each
    token counts in its top-k experts, none dropped. This is how Swin Transformer's public code
    counts, and it reproduces its published figures.
    """
    model.eval()
    macs = [
        _batch_macs(model, torch.empty(n, in_chans, img_size, img_size, device="meta"))
        for n in (1, 2)
    ]
    return Complexity(sum(p.numel() for p in model.parameters()), macs[1] - macs[0])


@torch.no_grad()
def _batch_macs(model: nn.Module, images: torch.Tensor) -> int:
    with FlopCounterMode(display=False, custom_mapping=_LAYER_NORM) as counter:
        model(images)
    return counter.get_total_flops() // 2
