"""The public names of `swinv2_moe.models`. Importing this registers every model type, that is every
file `*_moe.py` here, and its names with timm."""

# ruff: noqa: F401 - they are for `__init__`

from swinv2_moe.models.added_experts import add_experts
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
