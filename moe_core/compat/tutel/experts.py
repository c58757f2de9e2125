"""Tutel's built-in experts, with its parameter names and initial values."""

# E experts on this rank, N rows, C rows of each expert (padded), M model dim, H hidden dim of this
# rank's experts (a part of the whole if s ranks share an expert)

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.activations import relu
from moe_core.compat.tutel.activations import KnownActivation, recognise
from moe_core.compat.tutel.groups import create_groups_from_world
from moe_core.compat.tutel.net import zero_gather
from moe_core.config import ExpertShard, MoEConfig
from moe_core.experts import Experts
from moe_core.ops import ExpertWeights
from moe_core.parallel.gather import gather_weights
from moe_core.prepared import PreparedValue


class FusedExpertsNetwork(Experts):
    """`y = act(x fc1_w^T + fc1_bias) fc2_w + fc2_bias` for each expert: Tutel's type "ffn".

    The parameters are those of `moe_core.experts.Experts`, with Tutel's names: batched_fc1_w
    [E, H, M], batched_fc1_bias [E, H], batched_fc2_w [E, H, output_dim] and batched_fc2_bias
    [E, output_dim / s].

    Args:
        hidden_size_per_expert: the hidden dim of a whole expert.
        sharded_count: s, the number of ranks that share an expert.
        activation_fn: the activation of the hidden layer; None: ReLU.
        activation_fn_with_self: an activation that gets this module as its second argument.
        output_dim: the dim of the output; None: `model_dim`.

    Raises:
        ValueError: `sharded_count` does not divide the hidden size, or both activation functions
            are given.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int,
        activation_fn: Callable | None = None,
        activation_fn_with_self: Callable | None = None,
        output_dim: int | None = None,
        has_fc1_bias: bool = True,
        has_fc2_bias: bool = True,
    ) -> None:
        nn.Module.__init__(self)  # Experts.__init__ would create parameters with other names
        if hidden_size_per_expert % sharded_count:
            raise ValueError(
                f"hidden_size_per_expert ({hidden_size_per_expert}) must be divisible by the"
                f" {sharded_count} ranks of one expert"
            )
        if activation_fn is not None and activation_fn_with_self is not None:
            raise ValueError("activation_fn and activation_fn_with_self are both given")
        if activation_fn_with_self is not None:
            with_self = activation_fn_with_self
            activation_fn = lambda x: with_self(x, self)  # noqa: E731
        self.activation_fn = activation_fn or relu
        self.model_dim = model_dim
        self.hidden_size_per_expert = hidden_size_per_expert
        self.hidden_size = hidden_size_per_expert // sharded_count
        self.local_experts = num_experts_per_device
        self.sharded_count = sharded_count
        self.output_dim = output_dim or model_dim
        self._make_parameters(has_fc1_bias, has_fc2_bias)
        self._copies: PreparedValue[ExpertWeights] = PreparedValue()
        self._casts = None
        self.reset_parameters()

    def _make_parameters(self, has_fc1_bias: bool, has_fc2_bias: bool) -> None:
        num_experts, hidden = self.local_experts, self.hidden_size
        self.batched_fc1_w = nn.Parameter(torch.empty(num_experts, hidden, self.model_dim))
        self.batched_fc2_w = nn.Parameter(torch.empty(num_experts, hidden, self.output_dim))
        self.batched_fc1_bias: nn.Parameter | None = None
        if has_fc1_bias:
            self.batched_fc1_bias = nn.Parameter(torch.empty(num_experts, hidden))
        self.batched_fc2_bias: nn.Parameter | None = None
        if has_fc2_bias:
            width = -(-self.output_dim // self.sharded_count)  # rounded up
            self.batched_fc2_bias = nn.Parameter(torch.empty(num_experts, width))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights as in nn.Linear, and biases with zeros.

        Values are drawn in fp32, one expert after the other.
        """
        for e in range(self.local_experts):
            for weight, fan_in in (
                (self.batched_fc1_w, self.model_dim),
                (self.batched_fc2_w, self.hidden_size),
            ):
                bound = 1 / math.sqrt(fan_in)
                values = torch.rand(weight.shape[1:], dtype=torch.float32, device=weight.device)
                weight[e] = (values * (2 * bound) - bound).to(weight.dtype)
        for bias in (self.batched_fc1_bias, self.batched_fc2_bias):
            if bias is not None:
                bias.zero_()

    # Attributes that the engine reads.

    w3 = None  # these experts are not gated
    b3 = None

    @property
    def w1(self) -> nn.Parameter:  # type: ignore[override]
        return self.batched_fc1_w

    @property
    def b1(self) -> nn.Parameter | None:  # type: ignore[override]
        return self.batched_fc1_bias

    @property
    def w2(self) -> nn.Parameter:  # type: ignore[override]
        return self.batched_fc2_w

    @property
    def b2(self) -> nn.Parameter | None:  # type: ignore[override]
        return self.batched_fc2_bias

    def attach(self, config: MoEConfig, shard: ExpertShard) -> None:
        """Set the configuration, which the layer's constructor creates.

        `config.model_dim` is the output dim here.
        """
        self.config = replace(config, model_dim=self.output_dim)
        self.shard = shard

    def known_activation(self) -> KnownActivation | None:
        """The activation for the engine's kernels; None if they do not support it."""
        known = recognise(self.activation_fn)
        if known is not None and known.dropout > 0 and not self.training:
            return None  # dropout in evaluation
        return known

    def use(self, known: KnownActivation | None) -> None:
        """Set the activation that the engine computes; None: the padded form, which needs only the
        weights."""
        settings: dict[str, Any] = {"kernels": "torch"}
        if known is not None:
            settings = {"kernels": "auto", "activation": known.name}
            settings["hidden_dropout"] = known.dropout
        if any(getattr(self.config, name) != value for name, value in settings.items()):
            self.config = replace(self.config, **settings)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Any, **options: Any
    ) -> Tensor:
        """Apply the experts to their rows, with the arguments of the engine or those of Tutel.

        The engine passes rows [N, M], their offsets [E] and the options of Experts.forward; the
        result is [N, M]. Tutel passes padded rows [E, C, M] and the layer; the result is
        [E, C, output_dim].
        """
        if isinstance(context, Tensor):
            return super().forward(x, context, **options)
        used = gather_weights(self, context.expert_group, context.adaptive_degree, x.dtype)
        hidden = x @ used.w1.to(x.dtype).transpose(1, 2)
        if used.b1 is not None:
            hidden = hidden + used.b1.to(x.dtype).unsqueeze(1)
        y = self.activation_fn(hidden) @ used.w2.to(x.dtype)
        if used.b2 is not None:
            y = y + used.b2.to(x.dtype).unsqueeze(1)
        return y

    def extra_repr(self) -> str:
        return (
            f"model_dim={self.model_dim}, hidden_size={self.hidden_size},"
            f" output_dim={self.output_dim}, num_experts_per_device={self.local_experts},"
            f" has_fc1_bias={self.batched_fc1_bias is not None},"
            f" has_fc2_bias={self.batched_fc2_bias is not None}"
        )


class LlamaFFNNetwork(nn.Module):
    """`y = (act(x W_fc1) * (x W_fc2)) W_fc3` for each expert: Tutel's type "llama_ffn".

    Every parameter is a flat part of the experts' tensor [E, M, H] or [E, H, M]. The s ranks that
    share an expert have equal parts.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int,
        activation_fn: Callable = F.silu,
    ) -> None:
        super().__init__()
        self.sharded_count = sharded_count
        self.activation_fn = activation_fn
        wide = torch.Size((num_experts_per_device, model_dim, hidden_size_per_expert))
        self.shape_in = wide
        self.shape_out = torch.Size((wide[0], wide[2], wide[1]))
        part = -(-wide.numel() // sharded_count)  # rounded up
        self.W_fc1 = nn.Parameter(torch.empty(part))
        self.W_fc2 = nn.Parameter(torch.empty(part))
        self.W_fc3 = nn.Parameter(torch.empty(part))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.W_fc1, self.W_fc2, self.W_fc3):
            nn.init.normal_(parameter, 0, 0.01)

    def forward(self, x: Tensor, layer: Any) -> Tensor:
        """Padded rows [E, C, M] -> [E, C, M]."""
        gate = self.activation_fn(x @ self._whole(self.W_fc1, self.shape_in, layer))
        up = x @ self._whole(self.W_fc2, self.shape_in, layer)
        return (gate * up) @ self._whole(self.W_fc3, self.shape_out, layer)

    def _whole(self, parameter: Tensor, shape: torch.Size, layer: Any) -> Tensor:
        group = create_groups_from_world(-self.sharded_count, parent_group=layer.group).model_group
        return zero_gather(parameter, shape, group=group)

    def extra_repr(self) -> str:
        return f"num_experts_per_device={self.shape_in[0]}, model_dim={self.shape_in[1]}"
