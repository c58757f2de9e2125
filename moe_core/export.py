"""MoELayer in standard operations, for export (torch.export, ONNX): evaluation in one process.

MoELayer uses one grouped matrix product with custom ops. Here each expert is an ordinary
feed-forward network. With a capacity of C, each expert has C rows, some of them empty. Every shape
is then fixed, and one batched product can compute all experts. Without a capacity (dropless), the
number of an expert's rows is known only at run time.
"""

# T tokens, E experts, K top-k, C capacity, N rows, M model dim, H hidden dim. For Soft MoE:
# B images, N tokens of an image, S slots of an image, p of them for each expert

import copy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core.activations import hidden_layer
from moe_core.capacity import expert_capacity
from moe_core.experts import Experts
from moe_core.layer import MoELayer
from moe_core.ops.ffn.reference import feed_forward, padded_linear
from moe_core.ops.soft.reference import soft_combine, soft_dispatch
from moe_core.routing import as_images, factor_by_image, route_by_experts, route_by_tokens


class StandardMoE(nn.Module):
    """`layer(x, capacity_factor=...)[0]` in evaluation mode, with copies of the layer's parameters.

    The input is x [..., M]; the output has the same shape and dtype. The choices and the dropped
    tokens are the same as the layer's; values are equal up to rounding. As in the layer, the router
    computes in at least fp32. The experts compute in the dtype of x, which must be the dtype of
    their parameters.

    Args:
        layer: a layer in one process, with the built-in experts and one router.
        capacity_factor: 0 is dropless. None: the configured one of evaluation.
        batched: with a capacity, compute all experts in batched products. On a CPU this is faster
            in torch (16% of a model with 8 experts, on one image), but slower in onnxruntime (12%).
        batch_prioritized: whether full experts keep the most probable tokens; None: as configured.

    Raises:
        ValueError: the layer has several ranks, several routers or custom experts.
    """

    def __init__(
        self,
        layer: MoELayer,
        capacity_factor: float | None = None,
        batched: bool = False,
        batch_prioritized: bool | None = None,
    ) -> None:
        super().__init__()
        if layer.group.size > 1:
            raise ValueError(
                f"a layer over {layer.group.size} ranks cannot be exported; load it in one process"
            )
        if isinstance(layer.router, nn.ModuleList) or not isinstance(layer.experts, Experts):
            raise ValueError(
                "only a layer with one router and the built-in experts has a form in standard"
                " operations"
            )
        if capacity_factor is None:
            capacity_factor = layer.config.capacity_factor_in(training=False)
        if batch_prioritized is None:
            batch_prioritized = layer.config.batch_prioritized
        self.config = replace(
            layer.config,
            capacity_factor=capacity_factor,
            batch_prioritized=batch_prioritized,
            aux_loss="none",
            z_loss_weight=0.0,
            kernels="torch",
        )
        self.router = copy.deepcopy(layer.router)
        self.balance = copy.deepcopy(layer.balance)
        self.experts: nn.Module = _OneByOne(layer.experts)
        has_fixed_sizes = capacity_factor != 0 or self.config.routing == "soft"
        if batched and has_fixed_sizes:
            self.experts = _Batched(layer.experts)
        self.shared: nn.Module | None = None
        if layer.shared is not None:
            self.shared = _FeedForward(layer.shared, 0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., M] -> [..., M]."""
        tokens = x.reshape(-1, self.config.model_dim)  # [T, M]
        # The router computes in at least fp32.
        logits = self.router(tokens.to(torch.promote_types(tokens.dtype, torch.float32)))
        num_images = as_images(x).shape[0]
        if self.config.routing == "soft":
            y = self._soft_moe(tokens, logits, num_images)
        elif self.config.routing == "expert_choice":
            y = self._chosen_by_experts(tokens, logits, num_images)
        else:
            y = self._chosen_by_tokens(tokens, logits)
        y = y.to(x.dtype)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view_as(x)

    def _chosen_by_tokens(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """tokens [T, M], logits [T, E] -> [T, M]."""
        config = self.config
        top_k = min(config.top_k, config.num_experts)
        routing = route_by_tokens(logits, config, top_k, training=False, balance=self.balance)
        capacity = expert_capacity(
            tokens.shape[0], config.num_experts, top_k, config.capacity_factor
        )
        priority = None
        if config.batch_prioritized:
            priority = routing.probs.amax(1)
        plan = _plan(routing.expert_ids, config.num_experts, capacity, priority)
        rows = self.experts(tokens.index_select(0, plan.tokens), plan.sizes)  # [N, M]
        # The last row, of zeros, is for dropped choices.
        rows = torch.cat([rows, rows.new_zeros(1, config.model_dim)])
        chosen = rows.index_select(0, plan.slots.flatten()).unflatten(0, (-1, top_k))  # [T, K, M]
        return (chosen * routing.gates.unsqueeze(-1)).sum(1)

    def _chosen_by_experts(self, tokens: Tensor, logits: Tensor, num_images: int) -> Tensor:
        """tokens [T, M], logits [T, E] -> [T, M]."""
        config = self.config
        num_tokens = tokens.shape[0]
        routing = route_by_experts(logits, config, num_images, training=False)
        top_k = min(config.top_k, config.num_experts)
        factor: float | Tensor = config.capacity_factor
        if config.choose_per_image:
            factor = factor_by_image(factor, num_images, num_tokens, config.num_experts)
        capacity = expert_capacity(num_tokens, config.num_experts, top_k, factor)
        assert capacity is not None
        assert routing.priority is not None
        num_chosen = min(capacity, num_tokens)
        order = routing.priority.t().argsort(dim=1, descending=True, stable=True)  # [E, T]
        chosen = order[:, :num_chosen]  # [E, C]
        gates = routing.gates.t().gather(1, chosen)  # [E, C]
        rows = tokens.index_select(0, chosen.flatten())
        rows = self.experts(rows, [num_chosen] * config.num_experts)  # [E * C, M]
        weighted = rows * gates.reshape(-1, 1)
        zeros = weighted.new_zeros(num_tokens, config.model_dim)
        return zeros.index_add(0, chosen.flatten(), weighted)

    def _soft_moe(self, tokens: Tensor, logits: Tensor, num_images: int) -> Tensor:
        """tokens [T, M], logits [T, S] -> [T, M]."""
        config = self.config
        num_experts, per_expert = config.num_experts, config.slots_per_expert
        tokens = tokens.unflatten(0, (num_images, -1))  # [B, N, M]
        logits = logits.unflatten(0, (num_images, -1))  # [B, N, S]
        slots = soft_dispatch(tokens, logits).unflatten(1, (num_experts, per_expert))
        rows = slots.transpose(0, 1).reshape(-1, config.model_dim)  # [E * B * p, M]
        rows = self.experts(rows, [num_images * per_expert] * num_experts)
        rows = rows.unflatten(0, (num_experts, num_images, per_expert))
        rows = rows.transpose(0, 1).flatten(1, 2)  # [B, S, M]
        return soft_combine(rows, logits).flatten(0, 1)


class _Plan(NamedTuple):
    """The row of every choice."""

    tokens: Tensor  # [N] int64: the token in each row; 0 for empty rows
    slots: Tensor  # [T, K] int64: the row of each choice; N for dropped choices
    sizes: list[int]  # [E]: rows of each expert


def _plan(
    expert_ids: Tensor, num_experts: int, capacity: int | None, priority: Tensor | None
) -> _Plan:
    """`ops.make_plan` in operations of ONNX, with the rows of each expert padded to the capacity.

    The arguments are those of `ops.make_plan`.
    """
    num_tokens, top_k = expert_ids.shape
    device = expert_ids.device
    # A choice is the flat index t * K + k
    choices = torch.arange(num_tokens * top_k, device=device)
    if capacity is not None:
        # In order of precedence: first choices, then second ones, and so on.
        order = torch.arange(num_tokens, device=device)
        if priority is not None:
            order = priority.argsort(descending=True, stable=True)
        choices = (order * top_k + torch.arange(top_k, device=device).unsqueeze(1)).flatten()
    experts = expert_ids.flatten().index_select(0, choices)  # [T * K]
    is_chosen = experts.unsqueeze(1) == torch.arange(num_experts, device=device)
    counts = is_chosen.long().cumsum(0)  # [T * K, E]: choices of each expert so far
    place = counts.gather(1, experts.unsqueeze(1)).squeeze(1) - 1
    if capacity is None:
        num_rows = choices.shape[0]
        totals = is_chosen.long().sum(0)
        sizes = totals.tolist()
        offsets = totals.cumsum(0) - totals
        row = offsets.index_select(0, experts) + place
    else:
        num_rows = num_experts * capacity
        sizes = [capacity] * num_experts
        row = torch.where(place < capacity, experts * capacity + place, num_rows)
    tokens = choices.new_zeros(num_rows + 1).scatter(0, row, choices // top_k)[:num_rows]
    slots = torch.zeros_like(row).scatter(0, choices, row).view(num_tokens, top_k)
    return _Plan(tokens, slots, sizes)


class _OneByOne(nn.ModuleList):
    """The experts as separate feed-forward networks."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(_FeedForward(experts, e) for e in range(len(experts.w1)))

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """rows [N, M], sorted by expert with `sizes` [E] rows each -> [N, M]."""
        parts = zip(self, rows.split(sizes), strict=True)
        return torch.cat([expert(expert_rows) for expert, expert_rows in parts])


class _FeedForward(nn.Module):
    def __init__(self, experts: Experts, e: int) -> None:
        super().__init__()
        weights = experts.parameters_by_field.map(lambda parameter: parameter[e])
        self.fc1 = _linear(weights.w1, weights.b1)
        self.fc2 = _linear(weights.w2.t(), weights.b2)
        self.fc3: nn.Linear | None = None
        if weights.w3 is not None:
            self.fc3 = _linear(weights.w3, weights.b3)
        self.hidden = partial(hidden_layer, experts.config.activation)

    def forward(self, x: Tensor) -> Tensor:
        if self.fc3 is None:
            return self.fc2(self.hidden(self.fc1(x)))
        return self.fc2(self.hidden(self.fc1(x), self.fc3(x)))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """weight [O, I], bias [O] or None.

    Both are copied: a view would be exported with the complete tensor that it refers to.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


class _Batched(nn.Module):
    """All experts in two batched products, with the same number of rows each."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = copy.deepcopy(experts)

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """rows [E * C, M] -> [E * C, M]."""
        weights = self.experts.parameters_by_field.map(lambda weight: weight.to(rows.dtype))
        rows = rows.unflatten(0, (len(sizes), -1))  # [E, C, M]
        activation = self.experts.config.activation
        return feed_forward(rows, weights, None, activation, linear=padded_linear).flatten(0, 1)
