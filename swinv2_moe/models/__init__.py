"""Models with mixtures of experts.

The names of `__all__` come with every model type and its names for timm, when the first of them is
used. The configuration reads `swinv2_moe.models.section` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [  # noqa: F405
    "Complexity",
    "MoEMlp",
    "MoEModel",
    "SwinTransformerMoE",
    "SwinTransformerV2MoE",
    "WithAuxLoss",
    "add_experts",
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

if TYPE_CHECKING:
    from swinv2_moe.models.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("swinv2_moe.models.api"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
