"""Configuration of one mixture-of-experts layer, with all checks of its values."""

import math
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

from moe_core.options import KERNELS, Option, check_integer, option, options
from moe_core.registry import LOSSES, ROUTERS, Registry, activations, check_activation

# The attribute `routing` of this package's routers. With this copy a configuration is checked
# without importing torch.
_ROUTING = {
    "linear": "token_choice",
    "cosine": "token_choice",
    "expert_choice": "expert_choice",
    "soft": "soft",
}


@dataclass(frozen=True)
class MoEConfig:
    """Shape and routing of one MoE layer.

    A `top_k` above `num_experts` means all experts. The capacity factor f limits the tokens that
    one rank may send to one expert to `K * floor(|f| * ceil(T / E))`; f = 0 is dropless. With
    `init_std` None, parameters are initialised as in nn.Linear.

    Source: Tutel, arXiv 2206.03382, section 4.1. There f = 0 and f < 0 adapt the size of a padded
    buffer. This engine has no padded buffer, so f < 0 has the same limit as f > 0.

    Raises:
        ValueError: a value is out of range. The message names the value and the allowed values.
    """

    model_dim: int = option(MISSING, "features of a token", least=1, is_key=False)
    hidden_dim: int = option(MISSING, "hidden units of an expert", least=1, is_key=False)
    num_experts: int = option(
        MISSING,
        "of the layer, over all ranks; without the shared experts",
        least=1,
        is_key=False,
    )
    top_k: int = option(1, "experts per token", least=1, affects="accuracy")
    capacity_factor: float = option(
        1.25,
        "limit of the tokens of an expert, in units of its even share; 0: dropless; negative:"
        " as its absolute value",
    )
    eval_capacity_factor: float = option(
        0.0,
        "as `capacity_factor`, in evaluation. At 0 a token's result does not depend on other"
        " tokens; with `expert_choice`, 0 means the factor of training",
        affects="accuracy",
    )
    router: str = option(
        "linear",
        "tokens choose: `linear`, `cosine`; experts choose: `expert_choice`; Soft MoE:"
        " `soft`; or a registered name",
        choices=ROUTERS,
        affects="accuracy",
    )
    slots_per_expert: int = option(
        0,
        "slots of an image per expert, for `soft`; 0: as many slots as tokens, if the model"
        " knows their number",
        least=0,
        is_key=False,
    )
    choose_per_image: bool = option(
        False,
        "for `expert_choice`: an expert chooses equally many tokens of each image, not from the"
        " whole batch",
        affects="accuracy",
    )
    gate_activation: str = option(
        "softmax",
        "function from logits to gate values",
        choices=("softmax", "sigmoid"),
        affects="accuracy",
    )
    balance: str = option(
        "loss",
        "`loss`: an auxiliary loss balances the load; `bias`: a bias per expert, which affects"
        " the choice but not the gate values",
        choices=("loss", "bias"),
        affects="accuracy",
    )
    balance_rate: float = option(
        1e-3,
        "change of an expert's bias in one step",
        least=0,
        is_key=False,
    )
    z_loss_weight: float = option(
        0.0,
        "weight of the router's z-loss within the auxiliary loss",
        least=0,
    )
    num_shared_experts: int = option(
        0,
        "experts that process every token, in addition to the `top_k` chosen experts",
        least=0,
        affects="accuracy",
    )
    gate_noise: float = option(
        0.0,
        "standard deviation of the noise on the logits in training, in units of 1 / `num_experts`",
        least=0,
    )
    normalize_gates: bool = option(
        True,
        "the gate values of a token sum to 1; only for `top_k` above 1",
        affects="accuracy",
    )
    batch_prioritized: bool = option(
        False,
        "a full expert keeps the tokens with the highest probability, not the first ones",
        affects="accuracy",
    )
    aux_loss: str = option(
        "gshard",
        "the loss that balances the load, or a registered name",
        choices=LOSSES,
    )
    global_balance: bool = option(
        False,
        "the auxiliary loss covers the tokens of all data-parallel ranks, not those of each rank",
    )
    activation: str = option(
        "gelu",
        "activation function of the experts, or a registered name",
        choices=activations,
        affects="accuracy",
    )
    gated: bool = option(
        False,
        "experts with a third weight: `(act(x w1^T + b1) * (x w3^T + b3)) w2 + b2`; with `silu`"
        " SwiGLU, with `gelu` GEGLU",
        affects="accuracy",
    )
    bias: bool = option(True, "the biases of each expert", is_key=False)
    output_bias: bool = option(
        True,
        "experts add a bias after their last product",
        affects="accuracy",
    )
    hidden_dropout: float = option(
        0.0,
        "dropout of the experts' hidden units. The published Swin-MoE is trained with 0.1",
        least=0,
        most=0.999,
    )
    kernels: str = option(
        "auto",
        "`auto`: Triton on CUDA, C++ on a CPU with its best instructions. `triton` and `torch`"
        " force one form, other names the CPU's instructions",
        choices=KERNELS,
        affects="",
    )
    init_std: float | None = option(
        None,
        "standard deviation of the experts' initial weights (truncated normal)",
        least=1e-09,
        affects="",
    )

    def __post_init__(self) -> None:
        section: type = type(self)
        for field, allowed in options(section):
            _check(field.name, getattr(self, field.name), field.type, allowed)
        check_activation(self.activation, self.gated)
        if self.init_std is not None and not 0 < self.init_std < math.inf:
            raise ValueError(f"init_std ({self.init_std}) must be finite and above 0, or None")
        if self.aux_loss == "load_importance_tutel" and self.gate_noise == 0:
            raise ValueError("aux_loss ('load_importance_tutel') needs gate_noise (0.0) above 0")
        self._check_routing()

    @property
    def routing(self) -> str:
        """The kind of routing of the router: "token_choice", "expert_choice" or "soft"."""
        if self.router in _ROUTING:
            return _ROUTING[self.router]
        return getattr(ROUTERS[self.router], "routing", "token_choice")

    @property
    def num_expert_weights(self) -> int:
        """The number of weight matrices of an expert."""
        if self.gated:
            return 3
        return 2

    def capacity_factor_in(self, training: bool) -> float:
        """The capacity factor in training or in evaluation."""
        if training:
            return self.capacity_factor
        if self.eval_capacity_factor == 0 and self.routing == "expert_choice":
            return self.capacity_factor
        return self.eval_capacity_factor

    def _check_routing(self) -> None:
        """Check the options that only some kinds of routing support."""
        if self.choose_per_image and self.routing != "expert_choice":
            raise ValueError(
                f"choose_per_image (True) needs a router of expert choice, not {self.router!r}"
            )
        if self.routing == "token_choice":
            return
        if self.routing == "expert_choice" and self.capacity_factor == 0:
            raise ValueError(
                f"capacity_factor (0) must not be 0 with router {self.router!r}: it says how many"
                " tokens an expert chooses"
            )
        unsupported: dict[str, object] = {"balance": "loss"}
        if self.routing == "soft":
            unsupported |= {"gate_activation": "softmax", "z_loss_weight": 0.0}
        for name, default in unsupported.items():
            value = getattr(self, name)
            if value != default:
                raise ValueError(
                    f"{name} ({value!r}) must be {default!r} with router {self.router!r}"
                )

    def shard(self, rank: int, group_size: int) -> "ExpertShard":
        """The experts of `rank` in an expert-parallel group of `group_size` ranks.

        With more ranks than experts, this is a part of one expert.

        Raises:
            ValueError: the experts do not divide over the ranks; or hidden_dim (model_dim, for the
                output bias) does not divide over the ranks of one expert.
        """
        experts = self.num_experts
        if max(experts, group_size) % min(experts, group_size):
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
        divided = ["hidden_dim"]
        if self.bias and self.output_bias:
            divided.append("model_dim")
        for name in divided:
            if getattr(self, name) % parts:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must be divisible by the {parts} ranks of one"
                    f" expert: num_experts ({experts}) over an expert-parallel size of {group_size}"
                )
        return ExpertShard(rank // parts, 1, rank % parts, parts)


def _check(name: str, value: Any, kind: object, allowed: Option) -> None:
    """Raise ValueError unless a field of the type `kind` may hold the value."""
    choices = allowed.choices
    if isinstance(choices, Registry):
        choices.check(value)
    elif isinstance(choices, tuple) and choices and value not in choices:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(choices)}")
    elif kind is int:
        check_integer(name, value, int(allowed.least))
    elif kind is float and not math.isfinite(value) and allowed.least < 0:
        raise ValueError(f"{name} ({value}) must be finite; 0 is dropless")
    elif kind is float and allowed.most < 1 and not 0 <= value < 1:
        raise ValueError(f"{name} ({value}) must be at least 0 and below 1")
    elif kind is float and not (math.isfinite(value) and value >= allowed.least):
        raise ValueError(f"{name} ({value}) must be finite and not negative")


class ExpertShard(NamedTuple):
    """The experts of a rank, and the rank's part of their hidden dim and output bias."""

    first_expert: int  # number of the rank's first expert
    num_experts: int  # experts of the rank; 1 where several ranks share an expert
    part: int  # the rank's part of its expert, from 0
    num_parts: int  # ranks that share an expert


ROUTING_CHOICES = {
    field.name: one.choices
    for field, one in options(MoEConfig)
    if field.name in ("gate_activation", "balance")
}
