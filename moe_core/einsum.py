"""The einsum form of an MoE layer: padded buffers that are filled and read with one-hot tensors.

It is the baseline of measurements. fairseq uses this form, and the Tutel paper compares Tutel with
fairseq. The results are the same as those of the other forms.

Source: GShard, arXiv 2006.16668, algorithm 1.
"""

# T tokens, W ranks, E experts, E_l experts of a rank, K top-k, C capacity, N rows, M model dim, H
# hidden dim

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core.activations import hidden_layer
from moe_core.capacity import expert_capacity
from moe_core.config import MoEConfig
from moe_core.context import without_autocast
from moe_core.experts import Experts
from moe_core.layer import MoELayer
from moe_core.ops import DispatchPlan, ExpertWeights
from moe_core.parallel import ExpertGroup, ParallelStrategy, flexible_all_to_all
from moe_core.parallel.exchange import Agreement, Exchange


def use_einsum(layer: MoELayer) -> None:
    """Make `layer` compute with einsums. Its parameters do not change; its strategy becomes the
    default one, the exchange of tokens.

    Raises:
        ValueError: the layer has a custom experts module, or fewer experts than ranks.
    """
    if not isinstance(layer.experts, Experts):
        raise ValueError("the einsum form needs the built-in experts")
    if layer.shard.num_parts > 1:
        raise ValueError(
            f"the einsum form needs num_experts ({layer.config.num_experts}) to be at least the"
            f" expert-parallel size ({layer.group.size})"
        )
    layer.strategy = ParallelStrategy()
    layer._exchanges[layer.strategy] = EinsumExchange(layer.config, layer.group)


class EinsumExchange(Exchange):
    """Sends a buffer [E_l, C, M] to every rank. Rows without a choice are zero."""

    def __init__(self, config: MoEConfig, group: ExpertGroup) -> None:
        self.config = config
        self.group = group

    def agree(self, expert_ids: Tensor, top_k: int, capacity_factor: float) -> Agreement:
        num_tokens = expert_ids.shape[0]
        if capacity_factor != 0:
            num_tokens = self.group.most_tokens(num_tokens, expert_ids.device)
        num_experts = self.config.num_experts
        return Agreement(expert_capacity(num_tokens, num_experts, top_k, capacity_factor))

    def __call__(
        self,
        experts: nn.Module,
        tokens: Tensor,
        gates: Tensor,
        plan: DispatchPlan,
        agreement: Agreement,
    ) -> Tensor:
        assert isinstance(experts, Experts)
        capacity = agreement.capacity
        if capacity is None:
            capacity = self.group.ranks.max(int(plan.counts.max()), tokens.device)
        capacity = max(int(capacity), 1)  # no dim of size 0
        combine_weights = combine_tensor(gates, plan, self.config.num_experts, capacity)
        combine_weights = combine_weights.to(tokens.dtype)
        mask = (combine_weights.detach() != 0).to(tokens.dtype)
        buffers = torch.einsum("tec,tm->ecm", mask, tokens)
        buffers = flexible_all_to_all(buffers, self.group)  # [E_l, W C, M]
        buffers = _padded_ffn(experts, buffers)
        buffers = flexible_all_to_all(buffers, self.group, back=True)  # [E, C, M]
        return torch.einsum("tec,ecm->tm", combine_weights, buffers.to(tokens.dtype))


def combine_tensor(gates: Tensor, plan: DispatchPlan, num_experts: int, capacity: int) -> Tensor:
    """The combine tensor [T, E, C]: the gate value of each choice at its expert and place, else 0.

    Args:
        gates: [T, K].
    """
    ends = plan.offsets.long()
    ids = torch.searchsorted(ends, plan.slots, right=True).clamp(max=num_experts - 1)  # [T, K]
    starts = F.pad(ends, (1, -1))
    places = (plan.slots - starts[ids]).clamp(0, capacity - 1)
    if plan.kept is not None:
        gates = gates * plan.kept
    combine_weights = gates.new_zeros(len(gates), num_experts, capacity)
    with without_autocast(gates):
        for k in range(gates.shape[1]):
            expert = F.one_hot(ids[:, k], num_experts) * gates[:, k : k + 1]  # [T, E]
            place = F.one_hot(places[:, k], capacity).to(gates.dtype)  # [T, C]
            combine_weights = combine_weights + torch.einsum("te,tc->tec", expert, place)
    return combine_weights


def _padded_ffn(experts: Experts, buffers: Tensor) -> Tensor:
    """Apply each expert's network to its rows: [E_l, N, M] -> [E_l, N, M]."""
    weights = experts.weights(buffers.dtype, packed=False)
    assert isinstance(weights, ExpertWeights), "not packed, so not in int8"
    weights = weights.map(lambda weight: weight.to(buffers.dtype))
    products = [_product("enm,ehm->enh", buffers, weights.w1, weights.b1)]
    if weights.w3 is not None:
        products.append(_product("enm,ehm->enh", buffers, weights.w3, weights.b3))
    hidden = hidden_layer(experts.config.activation, *products)
    hidden = F.dropout(hidden, experts.config.hidden_dropout, experts.training)
    return _product("enh,ehm->enm", hidden, weights.w2, weights.b2)


def _product(equation: str, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.einsum(equation, rows, weight)
    if bias is None:
        return out
    return out + bias.unsqueeze(1)
