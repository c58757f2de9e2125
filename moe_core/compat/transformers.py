"""Compute the experts of Hugging Face transformers' models with this engine.

>>> import moe_core.compat.transformers
>>> moe_core.compat.transformers.register()
>>> model = AutoModelForCausalLM.from_config(config, experts_implementation="moe_core")

`model.set_experts_implementation("moe_core")` changes an existing model. Routers, parameters,
gradients and checkpoints remain those of transformers.

Experts with another activation than SiLU, GELU, ReLU or that of gpt-oss, or with a norm, are
computed expert by expert, and call the module's own activation.

On a CPU weights are not copied. This includes the weights of gpt-oss, whose tensor [E, M, 2 H]
interleaves two weights.

Source: the interface and the layouts, transformers 5.24, integrations/moe.py.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.context import expert_dtype
from moe_core.ops import (
    DispatchPlan,
    ExpertWeights,
    combine,
    dispatch,
    expert_linear,
    make_plan,
    moe_ffn,
)

_OLDEST = (5, 24)
try:
    from transformers import __version__ as _version
    from transformers.activations import GELUActivation, SiLUActivation
    from transformers.integrations import moe as _moe
except ImportError as error:
    raise ImportError(
        "moe_core.compat.transformers needs transformers"
        f" {_OLDEST[0]}.{_OLDEST[1]} or newer ({error})"
    ) from error

_NAME = "moe_core"
# The engine's names of the activations of transformers and torch, by class or function.
_NAMES = {
    F.silu: "silu",
    F.gelu: "gelu",
    F.relu: "relu",
    torch.relu: "relu",
    SiLUActivation: "silu",
    nn.SiLU: "silu",
    GELUActivation: "gelu",
    nn.ReLU: "relu",
}


def register() -> None:
    """Add "moe_core" to the values of transformers' `experts_implementation`.

    Raises:
        ImportError: this version of transformers is too old.
    """
    check_version(_version)
    _moe.ALL_EXPERTS_FUNCTIONS.register(_NAME, experts_forward)


def check_version(version: str) -> None:
    """Raise ImportError for a version of transformers without the interface that is used here."""
    installed = tuple(int(part) for part in version.split(".")[:2])
    if installed < _OLDEST:
        raise ImportError(
            f"transformers {version} is too old: moe_core.compat.transformers needs"
            f" {_OLDEST[0]}.{_OLDEST[1]} or newer"
        )


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an experts module. transformers calls it instead of the module's own.

    Args:
        module: its class has transformers' decorator `use_experts_implementation`.
        hidden_states: tokens [T, M].
        top_k_index: the experts of each token [T, K].
        top_k_weights: their gate values [T, K].

    Returns:
        [T, M], in the dtype of hidden_states.

    Raises:
        ValueError: the experts are under transformers' expert parallelism.
    """
    if module._is_expert_parallel:
        raise ValueError(
            f"{type(module).__name__} is under transformers' expert parallelism, where moe_core"
            " does not compute"
        )
    plan = make_plan(top_k_index, module.num_experts, None)
    gates = top_k_weights.to(torch.promote_types(top_k_weights.dtype, torch.float32))
    tokens = hidden_states.to(expert_dtype(hidden_states))
    activation = _activation(module)
    if activation is None or module.has_post_expert_norm:
        out = _plain_forward(module, tokens, gates, plan)
    else:
        out = moe_ffn(tokens, gates, _weights(module), plan, activation)
    return out.to(hidden_states.dtype)


def _weights(module: Any) -> ExpertWeights:
    """Views of the module's parameters in the engine's shapes."""
    if module.has_gate:
        first, bias_name = [module.gate_up_proj], "gate_up_proj_bias"
    else:
        first, bias_name = [module.up_proj], "up_proj_bias"
    biases = []
    b2 = None
    if module.has_bias:
        biases = [getattr(module, bias_name)]
        b2 = module.down_proj_bias
    if module.has_gate:
        hidden_dim = 1
        if module.is_transposed:
            hidden_dim = 2
        first = _halves(first[0], hidden_dim, module.is_concatenated)
        if module.has_bias:
            biases = _halves(biases[0], 1, module.is_concatenated)
    w2 = module.down_proj
    if module.is_transposed:
        first = [weight.transpose(1, 2) for weight in first]
    else:
        w2 = w2.transpose(1, 2)
    w1, w3 = [*first, None][:2]
    b1, b3 = [*biases, None, None][:2]
    return ExpertWeights(w1, b1, w2, b2, w3, b3)


def _halves(both: Tensor, dim: int, is_concatenated: bool) -> list[Tensor]:
    """Split `dim`, of size 2 H, into the parts of the gate and of the other product."""
    if is_concatenated:
        return list(both.unflatten(dim, (2, -1)).unbind(dim))
    return list(both.unflatten(dim, (-1, 2)).unbind(dim + 1))


# 1. Activations


def _activation(module: Any) -> str | None:
    """The engine's name of the experts' activation; None: only the module can compute it."""
    gate = getattr(module._apply_gate, "__func__", None)  # not of a function set on the instance
    if not module.has_gate or gate is _moe._default_apply_gate:
        return _NAMES.get(_function_of(module.act_fn))
    gpt_oss = sys.modules.get("transformers.models.gpt_oss.modeling_gpt_oss")
    if gpt_oss is None or gate is not gpt_oss.GptOssExperts._apply_gate:
        return None
    # Only these constants are built in.
    if (float(module.alpha), float(module.limit)) != (1.702, 7.0):
        return None
    return "clamped_swiglu"


def _function_of(act_fn: Any) -> Any:
    """The class of a module that computes what its class defines; otherwise `act_fn` itself."""
    if not isinstance(act_fn, nn.Module):
        return act_fn
    has_hooks = act_fn._forward_hooks or act_fn._forward_pre_hooks
    if has_hooks or act_fn._backward_hooks or "forward" in vars(act_fn):
        return act_fn
    return type(act_fn)


# 2. The plain form


def _plain_forward(module: Any, tokens: Tensor, gates: Tensor, plan: DispatchPlan) -> Tensor:
    """As `moe_ffn`, with the module's own activation and norm: [T, M]."""
    name = "up_proj"
    if module.has_gate:
        name = "gate_up_proj"
    first, second = getattr(module, name), module.down_proj
    if module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    b1 = b2 = None
    if module.has_bias:
        b1, b2 = getattr(module, f"{name}_bias"), module.down_proj_bias
    rows = expert_linear(dispatch(tokens, plan), first, b1, plan.offsets)
    if module.has_gate:
        hidden = module._apply_gate(rows)
    else:
        hidden = module.act_fn(rows)
    rows = expert_linear(hidden, second, b2, plan.offsets)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    return combine(rows, gates, plan)
