"""A mixture-of-experts engine for torch: routing, grouped expert products, expert parallelism.

>>> config = MoEConfig(model_dim=512, hidden_dim=2048, num_experts=8)
>>> y, aux_loss = MoELayer(config)(torch.randn(4, 196, 512))

torch is imported when a name that needs it is first used: configurations are read and checked
without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_core.config import ROUTING_CHOICES, ExpertShard, MoEConfig
from moe_core.options import EXCHANGES, KERNELS
from moe_core.prepared import PreparedValue, prepared
from moe_core.registry import (
    ACTIVATIONS,
    ALL_TO_ALLS,
    GATED_ACTIVATIONS,
    LOSSES,
    ROUTERS,
    Registry,
    register_activation,
    register_all_to_all,
    register_gated_activation,
    register_loss,
    register_router,
)

# The public names of these modules are the names of this package too. They need torch, whose import
# takes seconds, and the import of any module of this package, such as moe_core.config, begins here:
# without this table no mistake in a configuration could be reported before torch is imported.
_WITH_TORCH = (
    "layer",
    "training",
    "checkpoint",
    "balance",
    "losses",
    "capacity",
    "ops",
    "torch_tools",
)

if TYPE_CHECKING:  # the same names for type checkers and editors
    from moe_core.balance import reset_balance_loads, update_balance
    from moe_core.capacity import RoutingStats
    from moe_core.checkpoint import count_experts, load_tensors, save_tensors
    from moe_core.layer import MoELayer
    from moe_core.losses import AuxiliaryLoss, RoutingScores
    from moe_core.ops import check_kernels, cpu_computes_in, release_buffers
    from moe_core.torch_tools import ignore_experts
    from moe_core.training import (
        average_expert_gradients,
        cast_ahead,
        clip_gradients,
        clip_to_norm,
        compile_ahead,
        equal_tokens,
        expert_parameters,
        finish_gradients,
        gather_ahead,
        global_grad_norm,
        load_strategy_decisions,
        moe_layers,
        step,
        strategy_decisions,
        strategy_tuners,
    )
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in _WITH_TORCH:
                found = import_module(f"{__name__}.{module}")
                if hasattr(found, name):
                    globals()[name] = getattr(found, name)
                    return globals()[name]
        try:
            return import_module(f"{__name__}.{name}")  # such as moe_core.parallel
        except ModuleNotFoundError as error:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error

    def __dir__() -> list[str]:
        return sorted(set(globals()) | set(__all__))


__all__ = [
    "ACTIVATIONS",
    "ALL_TO_ALLS",
    "EXCHANGES",
    "GATED_ACTIVATIONS",
    "KERNELS",
    "LOSSES",
    "ROUTERS",
    "ROUTING_CHOICES",
    "AuxiliaryLoss",
    "ExpertShard",
    "MoEConfig",
    "MoELayer",
    "PreparedValue",
    "Registry",
    "RoutingScores",
    "RoutingStats",
    "average_expert_gradients",
    "cast_ahead",
    "check_kernels",
    "clip_gradients",
    "clip_to_norm",
    "compile_ahead",
    "count_experts",
    "cpu_computes_in",
    "equal_tokens",
    "expert_parameters",
    "finish_gradients",
    "gather_ahead",
    "global_grad_norm",
    "ignore_experts",
    "load_strategy_decisions",
    "load_tensors",
    "moe_layers",
    "prepared",
    "register_activation",
    "register_all_to_all",
    "register_gated_activation",
    "register_loss",
    "register_router",
    "release_buffers",
    "reset_balance_loads",
    "save_tensors",
    "step",
    "strategy_decisions",
    "strategy_tuners",
    "update_balance",
]
