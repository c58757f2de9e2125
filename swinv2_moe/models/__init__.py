"""Models with mixtures of experts.

Importing this registers every model type, that is every file `*_moe.py` here, and its names with
timm.
"""

import importlib
import pkgutil

from swinv2_moe.models import registry  # noqa: F401
from swinv2_moe.models.build import (
    Complexity,
    build_model,
    configured_windows,
    measure_model,
    model_arguments,
)
from swinv2_moe.models.moe_mlp import (
    MoEMlp,
    block_name,
    frozen_moe,
    separate_aux_loss,
    take_aux_loss,
)
from swinv2_moe.models.protocol import MoEModel, WithAuxLoss
from swinv2_moe.models.swin_moe import SwinTransformerMoE
from swinv2_moe.models.swinv2_moe import SwinTransformerV2MoE
from swinv2_moe.models.weights import load_dense, load_strict

for _module in pkgutil.iter_modules(__path__):
    if _module.name.endswith("_moe"):
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Complexity",
    "MoEMlp",
    "MoEModel",
    "SwinTransformerMoE",
    "SwinTransformerV2MoE",
    "WithAuxLoss",
    "block_name",
    "build_model",
    "configured_windows",
    "frozen_moe",
    "load_dense",
    "load_strict",
    "measure_model",
    "model_arguments",
    "separate_aux_loss",
    "take_aux_loss",
]
