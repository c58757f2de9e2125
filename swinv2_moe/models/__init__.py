"""SwinV2-MoE models; importing this registers them with timm."""

from swinv2_moe.models import registry  # noqa: F401
from swinv2_moe.models.build import build_model, measure_model
from swinv2_moe.models.complexity import Complexity
from swinv2_moe.models.swin_moe import SwinTransformerMoE
from swinv2_moe.models.swinv2_moe import (
    SwinTransformerV2MoE,
    WithAuxLoss,
    frozen_moe,
    take_aux_loss,
)
from swinv2_moe.models.weights import load_dense, load_strict

__all__ = [
    "Complexity",
    "SwinTransformerMoE",
    "SwinTransformerV2MoE",
    "WithAuxLoss",
    "build_model",
    "frozen_moe",
    "load_dense",
    "load_strict",
    "measure_model",
    "take_aux_loss",
]
