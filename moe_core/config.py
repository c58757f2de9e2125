"""What one mixture-of-experts layer is; every check on it happens here, once."""

import math
from dataclasses import dataclass
from typing import NamedTuple, overload

from torch import Tensor

from moe_core.ops.backend import KERNELS
from moe_core.registry import ACTIVATIONS, LOSSES, ROUTERS


@dataclass(frozen=True)
class MoEConfig:
    """Shape and routing of one MoE layer.

    `top_k` above `num_experts` means all experts. `capacity_factor` f limits the tokens that one
    rank may send to one expert to `K * floor(|f| * ceil(T / E))`; 0 is dropless (Tutel, arXiv
    2206.03382, section 4.1, whose f = 0 and f < 0 adapt the size of a padded buffer: rows need no
    such buffer, so here f < 0 limits like f > 0).

    Raises:
        ValueError: a value out of range; the message names it and what is allowed.
    """

    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int = 1
    capacity_factor: float = 1.25
    router: str = "linear"  # as registered: see moe_core.registry
    # std of the noise on the logits in training, in units of 1 / num_experts
    gate_noise: float = 0.0
    normalize_gates: bool = True  # gate values of a token sum to 1; only for top_k > 1
    # when an expert is full, keep the tokens the router is surest of
    batch_prioritized: bool = False
    # in training each expert's rows are a multiple of it (moe_core.rounding), say 128; 0: off
    round_to: int = 0
    aux_loss: str = "gshard"
    # the loss of the tokens of all data-parallel ranks, not of each rank's own
    global_balance: bool = False
    activation: str = "gelu"
    bias: bool = True
    output_bias: bool = True  # with bias: the second one, b2, too
    input_jitter: float = 0.0  # the router sees x * U(1 - j, 1 + j) in training
    input_dropout: float = 0.0  # of the router's input, in training
    hidden_dropout: float = 0.0  # after the activation, in training
    # "triton" and "torch" force one; "auto": Triton on CUDA, C++ on x86, where they work
    kernels: str = "auto"
    init_std: float | None = None  # of the expert weights (truncated normal); None: as nn.Linear

    def __post_init__(self) -> None:
        for name in ("model_dim", "hidden_dim", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        for registry in (ROUTERS, LOSSES, ACTIVATIONS):
            registry.check(getattr(self, registry.kind))
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels ({self.kernels!r}) must be one of {', '.join(KERNELS)}")
        for name in ("input_jitter", "input_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0 and below 1")
        if not math.isfinite(self.capacity_factor):
            raise ValueError(
                f"capacity_factor ({self.capacity_factor}) must be finite; 0 is dropless"
            )
        if self.round_to < 0:
            raise ValueError(f"round_to ({self.round_to}) must not be negative; 0 is off")
        if self.gate_noise < 0:
            raise ValueError(f"gate_noise ({self.gate_noise}) must not be negative")
        if self.aux_loss == "load_importance_tutel" and self.gate_noise == 0:
            raise ValueError("aux_loss ('load_importance_tutel') needs gate_noise (0.0) above 0")

    def shard(self, rank: int, group_size: int) -> "ExpertShard":
        """What `rank` of an expert-parallel group owns: whole experts, or a part of one where ranks
        are more.

        Raises:
            ValueError: experts that do not divide over the ranks, or a hidden_dim (model_dim, for
                its output bias) that does not divide over the ranks of one expert.
        """
        experts, large, small = (
            self.num_experts,
            *sorted((self.num_experts, group_size), reverse=True),
        )
        if large % small:
            relation = "a divisor of"
            if experts > group_size:
                relation = "divisible by"
            raise ValueError(
                f"num_experts ({experts}) must be {relation} the expert-parallel size"
                f" ({group_size})"
            )
        if experts >= group_size:
            owned = experts // group_size
            return ExpertShard(rank * owned, owned, 0, 1)
        parts = group_size // experts
        for name in ("hidden_dim", *(["model_dim"] if self.bias and self.output_bias else [])):
            if getattr(self, name) % parts:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must be divisible by the {parts} ranks of one"
                    " expert:"
                    f" num_experts ({experts}) over an expert-parallel size of {group_size}"
                )
        return ExpertShard(rank // parts, 1, rank % parts, parts)


class ExpertShard(NamedTuple):
    """A rank's own experts, and which part of their hidden dim (and of the output bias) it owns."""

    first_expert: int
    num_experts: int
    part: int
    num_parts: int


@overload
def expert_capacity(
    num_tokens: int, num_experts: int, top_k: int, capacity_factor: float
) -> int | None: ...
@overload
def expert_capacity(
    num_tokens: Tensor, num_experts: int, top_k: int, capacity_factor: float
) -> Tensor | None: ...
def expert_capacity(
    num_tokens: int | Tensor, num_experts: int, top_k: int, capacity_factor: float
) -> int | Tensor | None:
    """Rows that one rank may send to one expert: `K * floor(|f| * ceil(T / E))`; None (no limit)
    for f = 0.

    `num_tokens` is the group's maximum when ranks hold unequal counts. From an int64 tensor follows
    an int64 tensor, the same number.
    """
    if capacity_factor == 0:
        return None
    if isinstance(num_tokens, Tensor):
        per_expert = (num_tokens + num_experts - 1) // num_experts
        # fp64, as Python's numbers are
        return top_k * (per_expert.double() * abs(capacity_factor)).floor().long()
    return top_k * math.floor(abs(capacity_factor) * math.ceil(num_tokens / num_experts))
