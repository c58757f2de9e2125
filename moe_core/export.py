"""MoELayer for programs that know no operation of ours (torch.export, ONNX): evaluation, in one
process.

Where the layer has one grouped product, here each expert is an ordinary feed-forward network on its
own rows. With a capacity of C these are C, empty ones included, so that every shape is fixed, and
one batched product can serve all experts; dropless they are as many as tokens chose the expert,
which the program finds out when it runs.
"""

# T tokens, E experts, K top-k, C capacity, N rows, M model dim, H hidden dim

import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_core.config import expert_capacity
from moe_core.experts import Experts
from moe_core.layer import MoELayer
from moe_core.router import route


class StandardMoE(nn.Module):
    """`layer(x, capacity_factor=...)[0]` in evaluation mode, with copies of its parameters: x [...,
    M] -> like x.

    The same choices, the same drops and, but for rounding, the same values. As in the layer, the
    router works in at least fp32, the experts in the dtype of x, which has to be theirs.

    Args:
        layer: of one process, with the built-in experts and one router.
        capacity_factor: None: the configured one; 0 is dropless.
        batched: with a capacity, batched products for all experts together. On a CPU torch is
            faster with them, onnxruntime without (by 16% and 12% of a whole model with 8 experts,
            on one image).

    Raises:
        ValueError: a layer over several ranks, with several routers or with an experts module of
            one's own.
    """

    def __init__(
        self, layer: MoELayer, capacity_factor: float | None = None, batched: bool = False
    ) -> None:
        super().__init__()
        if layer.group.size > 1:
            raise ValueError(
                f"a layer over {layer.group.size} ranks has no form for one; load it in one process"
            )
        if isinstance(layer.router, nn.ModuleList) or not isinstance(layer.experts, Experts):
            raise ValueError(
                "only a layer with one router and the built-in experts has a form in standard"
                " operations"
            )
        factor = layer.config.capacity_factor if capacity_factor is None else capacity_factor
        self.config = replace(layer.config, capacity_factor=factor, aux_loss="none")
        self.router = copy.deepcopy(layer.router)
        self.experts = _Batched(layer.experts) if batched and factor else _OneByOne(layer.experts)

    def forward(self, x: Tensor) -> Tensor:
        config, tokens = self.config, x.reshape(-1, self.config.model_dim)  # [T, M]
        top_k = min(config.top_k, config.num_experts)
        logits = self.router(tokens.to(torch.promote_types(tokens.dtype, torch.float32)))
        routing = route(logits, config, top_k, training=False, kernels="torch")
        capacity = expert_capacity(
            tokens.shape[0], config.num_experts, top_k, config.capacity_factor
        )
        priority = None
        if config.batch_prioritized:
            priority = routing.probs.amax(1)
        plan = _plan(routing.expert_ids, config.num_experts, capacity, priority)
        rows = self.experts(tokens.index_select(0, plan.tokens), plan.sizes)  # [N, M]
        # the last for dropped choices
        rows = torch.cat([rows, rows.new_zeros(1, config.model_dim)])
        chosen = rows.index_select(0, plan.slots.flatten()).unflatten(0, (-1, top_k))  # [T, K, M]
        return (chosen * routing.gates.unsqueeze(-1)).sum(1).to(x.dtype).view_as(x)


class _Plan(NamedTuple):
    """Where every choice goes."""

    tokens: Tensor  # [N] int64: the token in each row; 0 where there is none
    slots: Tensor  # [T, K] int64: the row of each choice; N where dropped
    sizes: list[int]  # [E]: rows of each expert


def _plan(
    expert_ids: Tensor, num_experts: int, capacity: int | None, priority: Tensor | None
) -> _Plan:
    """`ops.make_plan` in operations that ONNX has, the rows of each expert filled up to its
    capacity.

    Args: as there.
    """
    num_tokens, top_k = expert_ids.shape
    device = expert_ids.device
    # A choice is the flat index t * K + k
    choices = torch.arange(num_tokens * top_k, device=device)
    if capacity is not None:  # in order of precedence: first choices, then second ones, ...
        order = torch.arange(num_tokens, device=device)
        if priority is not None:
            order = priority.argsort(descending=True, stable=True)
        choices = (order * top_k + torch.arange(top_k, device=device).unsqueeze(1)).flatten()
    experts = expert_ids.flatten().index_select(0, choices)  # [T * K]
    # [T * K, E] so far
    counts = (experts.unsqueeze(1) == torch.arange(num_experts, device=device)).long().cumsum(0)
    place = counts.gather(1, experts.unsqueeze(1)).squeeze(1) - 1
    if capacity is None:
        num_rows, sizes = choices.shape[0], counts[-1].tolist()
        row = (counts[-1].cumsum(0) - counts[-1]).index_select(0, experts) + place
    else:
        num_rows, sizes = num_experts * capacity, [capacity] * num_experts
        row = torch.where(place < capacity, experts * capacity + place, num_rows)
    tokens = choices.new_zeros(num_rows + 1).scatter(0, row, choices // top_k)[:num_rows]
    slots = torch.zeros_like(row).scatter(0, choices, row).view(num_tokens, top_k)
    return _Plan(tokens, slots, sizes)


class _OneByOne(nn.ModuleList):
    """A feed-forward network for each expert."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(_FeedForward(experts, e) for e in range(len(experts.w1)))

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """rows [N, M], of each expert so many as `sizes` [E] says -> [N, M]."""
        return torch.cat([expert(own) for expert, own in zip(self, rows.split(sizes), strict=True)])


class _FeedForward(nn.Module):
    def __init__(self, experts: Experts, e: int) -> None:
        super().__init__()
        b1, b2 = (None if bias is None else bias[e] for bias in (experts.b1, experts.b2))
        self.fc1, self.fc2 = _linear(experts.w1[e], b1), _linear(experts.w2[e].t(), b2)
        self.activation = experts.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """weight [O, I], bias [O] or None; both are copied, for a view would be written with all that
    it looks into."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


class _Batched(nn.Module):
    """All experts in two batched products; each has as many rows."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = copy.deepcopy(experts)

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """rows [E * C, M] -> the same."""
        e = self.experts
        dtype = rows.dtype
        b1 = None
        if e.b1 is not None:
            b1 = e.b1.to(dtype)
        b2 = None
        if e.b2 is not None:
            b2 = e.b2.to(dtype)
        rows = rows.unflatten(0, (len(sizes), -1))  # [E, C, M]
        hidden = e.activation(_product(rows, e.w1.to(dtype).transpose(1, 2), b1))
        return _product(hidden, e.w2.to(dtype), b2).flatten(0, 1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [E, C, I], weight [E, I, O], bias [E, O] or None -> [E, C, O]."""
    if bias is None:
        return torch.bmm(x, weight)
    return torch.baddbmm(bias.unsqueeze(1), x, weight)
