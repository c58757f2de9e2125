"""Whether the layer computes within a torch.func transform or a forward-mode derivative."""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def in_transform(tensor: Tensor) -> bool:
    """Whether a torch.func transform or a level of forward-mode differentiation is active.

    Args:
        tensor: any tensor.
    """
    # Within a level, the primal is a new view also if the tensor has no tangent.
    return torch._C._are_functorch_transforms_active() or unpack_dual(tensor).primal is not tensor
