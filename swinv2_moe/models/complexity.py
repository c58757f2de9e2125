"""Count the parameters and multiply-accumulates of a model on the meta device, without memory or
computation."""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_LAYER_NORM = {
    torch.ops.aten.native_layer_norm: lambda shape, *_, out_shape=None, **__: 2 * shape.numel()
}


class Complexity(NamedTuple):
    """Parameters over all experts, and the MACs of one image (`macs`)."""

    parameters: int
    macs: int


def count(model: nn.Module, img_size: int, in_chans: int = 3) -> Complexity:
    """Count a model that lives on the meta device.

    MACs are the cost of one more image in a batch: convolutions, linear layers, attention, and one
    MAC per element of a layer norm. Each token counts in its top-k experts; none is dropped. The
    position bias is computed once per batch and not counted. Swin Transformer's public code counts
    in the same way, and the results agree with the published figures.
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
