"""A mixture-of-experts engine for torch: routing, grouped expert products, expert parallelism.

>>> config = MoEConfig(model_dim=512, hidden_dim=2048, num_experts=8)
>>> y, aux_loss = MoELayer(config)(torch.randn(4, 196, 512))
"""

from moe_core.checkpoint import (
    count_experts,
    damage,
    expert_file,
    load_tensors,
    save_tensors,
    sync_file,
    tensors_by_file,
    write_tensors,
)
from moe_core.config import ExpertShard, MoEConfig
from moe_core.layer import MoELayer, RoutingStats
from moe_core.training import (
    average_expert_gradients,
    clip_gradients,
    expert_parameters,
    global_grad_norm,
    load_strategy_decisions,
    moe_layers,
    strategy_decisions,
)
from moe_core.tutel import count_tutel_experts, from_tutel, to_tutel

__all__ = [
    "ExpertShard",
    "MoEConfig",
    "MoELayer",
    "RoutingStats",
    "average_expert_gradients",
    "clip_gradients",
    "count_experts",
    "count_tutel_experts",
    "damage",
    "expert_file",
    "expert_parameters",
    "from_tutel",
    "global_grad_norm",
    "load_strategy_decisions",
    "load_tensors",
    "moe_layers",
    "save_tensors",
    "strategy_decisions",
    "sync_file",
    "tensors_by_file",
    "to_tutel",
    "write_tensors",
]
