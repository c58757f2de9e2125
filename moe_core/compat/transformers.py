"""Compute the experts of Hugging Face transformers' models with this engine.

>>> import moe_core.compat.transformers
>>> moe_core.compat.transformers.register()
>>> model = AutoModelForCausalLM.from_config(config, experts_implementation="moe_core")

`model.set_experts_implementation("moe_core")` changes an existing model. Routers, parameters,
gradients and checkpoints remain those of transformers.

On a CPU weights are not copied. This includes the weights of gpt-oss, whose tensor [E, M, 2 H]
interleaves two weights.

Source: the interface and the layouts, transformers 5.24, integrations/moe.py.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

from typing import Any

import torch
from torch import Tensor, nn

from moe_core.ops import ExpertWeights, make_plan, moe_ffn
from moe_core.registry import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    register_activation,
    register_gated_activation,
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
# The engine's names of the activations of transformers and torch.
_SAME = {
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
        ValueError: the experts are followed by a norm, are under transformers' expert parallelism,
            or have an activation that this engine does not support.
    """
    _check(module)
    weights = _weights(module)
    activation = _activation(module)
    plan = make_plan(top_k_index, module.num_experts, None)
    gates = top_k_weights.to(torch.promote_types(top_k_weights.dtype, torch.float32))
    out = moe_ffn(hidden_states, gates, weights, plan, activation)
    return out.to(hidden_states.dtype)


def _check(module: Any) -> None:
    name = type(module).__name__
    if module.has_post_expert_norm:
        raise ValueError(f"{name} has a norm behind each expert, which moe_core does not compute")
    if module._is_expert_parallel:
        raise ValueError(
            f"{name} is under transformers' expert parallelism, where moe_core does not compute"
        )


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


def _activation(module: Any) -> str:
    """The engine's name of the module's activation. A new activation is registered."""
    gate = type(module)._apply_gate
    if not module.has_gate or gate is _moe._default_apply_gate:
        return _plain_activation(module)
    if gate.__qualname__ == "GptOssExperts._apply_gate":
        return _clamped_swiglu(float(module.alpha), float(module.limit))
    raise ValueError(
        f"{type(module).__name__} has an activation of its own (_apply_gate), which moe_core does"
        " not know"
    )


def _plain_activation(module: Any) -> str:
    """The engine's name of the activation `act_fn` of a module."""
    act_fn = module.act_fn
    if type(act_fn) in _SAME:
        return _SAME[type(act_fn)]
    kind = type(act_fn).__name__
    if not isinstance(act_fn, nn.Module) or list(act_fn.parameters()):
        raise ValueError(
            f"{type(module).__name__} has the activation {kind}, which is no function without"
            " parameters, as moe_core needs"
        )
    settings = []
    for name, value in vars(act_fn).items():
        is_state = isinstance(value, bool) and (name == "training" or name.startswith("_"))
        if isinstance(value, int | float | str) and not is_state:
            settings.append(f"{name}={value}")
    name = f"transformers.{kind}({', '.join(settings)})"
    if name not in ACTIVATIONS:
        register_activation(name)(act_fn)
    return name


def _clamped_swiglu(alpha: float, limit: float) -> str:
    """The engine's name of gpt-oss's activation.

    With other constants than the published ones, only the torch forms compute it.
    """
    if (alpha, limit) == (1.702, 7.0):
        return "clamped_swiglu"
    name = f"clamped_swiglu({alpha}, {limit})"
    if name not in GATED_ACTIVATIONS:

        @register_gated_activation(name)
        def clamped(z: Tensor, u: Tensor) -> Tensor:
            z = z.clamp(max=limit)
            return z * torch.sigmoid(alpha * z) * (u.clamp(-limit, limit) + 1)

    return name
