"""Tutel's gates: modules from tokens [T, M] to logits [T, E], with Tutel's parameter names."""

# T tokens, E experts, M model dim

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_OPTIONS = ("capacity_factor", "gate_noise")
_MAX_TEMPERATURE = math.log(100)


class LinearTopKGate(nn.Module):
    """`logits = x W^T` without bias.

    Args:
        k: the number of experts per token. A number above the number of experts means all.
        fp32_gate: whether the weight is fp32 for any dtype of the model.
        options: `capacity_factor` and `gate_noise`, which the layer reads.

    Raises:
        ValueError: an unknown option.
    """

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        **options,
    ) -> None:
        super().__init__()
        _check_options("top", options)
        dtype = None
        if fp32_gate:
            dtype = torch.float32
        self.wg = nn.Linear(model_dim, num_global_experts, bias=False, dtype=dtype)
        self.top_k = min(num_global_experts, int(k))
        self.fp32_gate = fp32_gate

    def forward(self, x: Tensor) -> Tensor:
        if self.fp32_gate:
            _keep_in_fp32(self.wg)
        return self.wg(x.to(self.wg.weight.dtype))


class CosineTopKGate(nn.Module):
    """Cosine similarity of the projected token with one learned direction per expert.

    Args:
        proj_dim: the dim of the projection.
        init_t: the initial temperature. The parameter `temperature` starts at ln(1 / init_t).

    Raises:
        ValueError: an unknown option.

    Source: arXiv 2206.03382, section 5.2; `moe_core.router.CosineRouter` has the formula.
    """

    def __init__(
        self,
        model_dim: int,
        num_global_experts: int,
        k: int = 1,
        fp32_gate: bool = False,
        proj_dim: int = 256,
        init_t: float = 0.5,
        **options,
    ) -> None:
        super().__init__()
        _check_options("cosine_top", options)
        self.top_k = min(num_global_experts, int(k))
        self.fp32_gate = fp32_gate
        self.temperature = nn.Parameter(torch.full([1], 1 / init_t).log())
        self.cosine_projector = nn.Linear(model_dim, proj_dim)
        # Drawn twice, as in Tutel, because values that are drawn later depend on it.
        self.sim_matrix = nn.Parameter(torch.randn(proj_dim, num_global_experts))
        nn.init.normal_(self.sim_matrix, 0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        if self.fp32_gate:
            _keep_in_fp32(self.cosine_projector)
        x = self.cosine_projector(x.to(self.cosine_projector.weight.dtype))
        directions = F.normalize(self.sim_matrix.to(x.dtype), dim=0)
        cosine = F.normalize(x, dim=1) @ directions
        return cosine * self.temperature.clamp(max=_MAX_TEMPERATURE).exp()


class GateRouter(nn.Module):
    """A gate with the interface of the engine's routers: tokens of at least fp32 -> logits of the
    same dtype."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, tokens: Tensor) -> Tensor:
        return gate_logits(self.gate, tokens).to(tokens.dtype)


def gate_logits(gate: nn.Module, tokens: Tensor) -> Tensor:
    """Logits [T, E] of tokens [T, M], which are cast to the dtype of the gate's parameters."""
    parameter = next(gate.parameters(), None)
    if parameter is not None and not getattr(gate, "fp32_gate", False):
        tokens = tokens.to(parameter.dtype)
    return gate(tokens)


def _keep_in_fp32(module: nn.Module) -> None:
    """Undo a cast of the whole model, before the first pass."""
    if next(module.parameters()).dtype != torch.float32:
        module.float()


def _check_options(gate_type: str, options: dict) -> None:
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ValueError(f"{name} ({value!r}) is not an option of gate type {gate_type!r}")
