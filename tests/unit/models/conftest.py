"""Small models with weights that are nowhere zero: res-post-norm starts its norms at 0, where any
two blocks agree."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from swinv2_moe.models import SwinTransformerMoE, SwinTransformerV2MoE

# 16 px in patches of 2: maps of 8, 4 and 2; windows of 4, shifted in every second block of the
# first stages.
NANO = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": (2, 2, 1)}
NANO |= {"num_heads": (2, 2, 4), "window_size": 4, "num_classes": 5, "drop_path_rate": 0.0}
NANO |= {"pretrained_window_sizes": (0, 0, 0)}
MOE_BLOCKS = ((), (1,), (0,))


def _randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * values)
    return model


@pytest.fixture
def randomize() -> Callable[..., nn.Module]:
    """`randomize(model, seed=0)`: every parameter from N(0, 0.3)."""
    return _randomize


@pytest.fixture
def nano() -> dict:
    return dict(NANO)


@pytest.fixture
def make_model() -> Callable[..., SwinTransformerV2MoE]:
    """`make_model(num_experts=0, pre_norm=False, **kwargs)`: randomised; dropless, without noise
    unless `moe` says."""

    def make(
        num_experts: int = 0, pre_norm: bool = False, seed: int = 0, **kwargs
    ) -> SwinTransformerV2MoE:
        cls = SwinTransformerMoE if pre_norm else SwinTransformerV2MoE
        moe = {"capacity_factor": 0.0, "gate_noise": 0.0} | kwargs.pop("moe", {})
        kwargs = NANO | {"moe_blocks": MOE_BLOCKS} | kwargs
        return _randomize(cls(num_experts=num_experts, moe=moe, **kwargs), seed)

    return make
