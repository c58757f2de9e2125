"""`tutel.impls.fast_dispatch` and `tutel.impls.losses`: routing, auxiliary losses computed from
scores, and padded buffers `[E, C, M]` of each expert's tokens."""

# T tokens, E experts, C capacity, K top-k, M model dim

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.capacity import expert_capacity
from moe_core.compat.tutel.net import simple_all_reduce
from moe_core.losses import expected_load, gshard_sums, squared_variation
from moe_core.losses import gshard_loss as loss_of_sums


def gshard_loss(scores_w_noise: Tensor, top_ids: Tensor) -> Tensor:
    """GShard's loss, a scalar, from the probabilities [T, E] and the experts [T, K] chosen by them.

    Source: GShard, arXiv 2006.16668, section 2.2.
    """
    sums = gshard_sums(scores_w_noise, top_ids[:, 0].long())
    return loss_of_sums(sums, scores_w_noise.shape[0])


def load_importance_loss(
    scores_wo_noise: Tensor, topk_logits: Tensor, num_global_experts: int, gate_noise: float
) -> Tensor:
    """The mean of importance loss and load loss, a scalar.

    It compares a probability with a logit, as Tutel does (its issue 240). With one expert it is 0;
    Tutel's loss is NaN.

    Args:
        scores_wo_noise: softmax of the logits without noise [T, E].
        topk_logits: the chosen experts' logits with noise [T, K], in descending order.

    Raises:
        ValueError: `gate_noise` is not above 0.
    """
    if not gate_noise > 0:
        raise ValueError(f"gate_noise ({gate_noise}) must be above 0 for the load-importance loss")
    probs = scores_wo_noise.float()
    load = expected_load(probs, topk_logits[:, -1].float(), gate_noise / num_global_experts)
    return squared_variation(torch.stack([probs.sum(0), load])).mean()


class Critical(NamedTuple):
    """The routing of every token, in the order of Tutel's tuple."""

    num_global_experts: int
    indices: list[Tensor]  # K tensors [T] int32: the experts of each token
    locations: list[Tensor]  # K tensors [T] int32: the token's position among the expert's tokens
    gates: list[Tensor]  # K tensors [T]
    capacity: int
    counts: Tensor  # [E] choices of each expert before any drop


def extract_critical(
    scores: Tensor,
    top_k: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = gshard_loss,
    capacity_factor: float = 1.0,
    batch_prioritized_routing: bool = False,
    normalize_gate: bool = True,
    alignment: int = 1,
    group: dist.ProcessGroup | None = None,
    inequivalent_tokens: bool = False,
) -> tuple[Critical, Tensor | None]:
    """Choose `top_k` experts for every token from its probabilities [T, E].

    Args:
        loss_fn: computes the auxiliary loss from scores [T, E] and experts [T, K]; None: no loss.
        capacity_factor: f. For f > 0, C = K * floor(f * ceil(T / E)). For f = 0, C is the largest
            load of an expert on any rank of `group`. For f < 0, C is the smaller of this load and
            the value for |f|.
        batch_prioritized_routing: whether tokens with the highest probability get the first places
            of an expert.
        normalize_gate: whether the gate values of a token sum to 1; only for K above 1.
        alignment: C is rounded up to a multiple of this number.
        inequivalent_tokens: whether the ranks of `group` have different T. The largest T is used.

    Returns:
        The routing, and the loss.
    """
    num_tokens, num_experts = scores.shape
    top_k = min(top_k, num_experts)
    ids = scores.topk(top_k, dim=1).indices  # [T, K]
    gates = scores.gather(1, ids)
    if normalize_gate and top_k > 1:
        smallest = torch.finfo(gates.dtype).eps
        gates = gates / gates.sum(1, keepdim=True).clamp(min=smallest)
    loss = None
    if loss_fn is not None:
        loss = loss_fn(scores, ids)
    order = torch.arange(num_tokens, device=scores.device)
    if batch_prioritized_routing:
        order = scores.detach().amax(1).argsort(descending=True, stable=True)
    locations, counts = _locations(ids, order, num_experts)
    most_tokens = num_tokens
    if inequivalent_tokens:
        most_tokens = _group_maximum(torch.tensor(num_tokens, device=scores.device), group)
    capacity = expert_capacity(most_tokens, num_experts, top_k, capacity_factor)
    if capacity_factor <= 0:
        largest = _group_maximum(counts.max(), group)
        capacity = largest if capacity is None else min(capacity, largest)
    assert capacity is not None, "the factor is above 0"
    capacity = round_up(capacity, alignment)
    indices = list(ids.int().unbind(1))
    return Critical(num_experts, indices, locations, list(gates.unbind(1)), capacity, counts), loss


def _locations(ids: Tensor, order: Tensor, num_experts: int) -> tuple[list[Tensor], Tensor]:
    """The position of every choice among the choices of its expert, as K tensors [T] int32, and the
    number of choices of each expert [E].

    All first choices come before all second choices. Within these, tokens are in the given order
    [T].
    """
    by_choice = ids[order].t().flatten()  # [K * T]
    sorted_ids, positions = by_choice.sort(stable=True)
    counts = torch.bincount(by_choice, minlength=num_experts)  # [E]
    first = counts.cumsum(0) - counts
    places = torch.arange(len(by_choice), device=ids.device) - first[sorted_ids]
    in_order = torch.empty_like(places).scatter_(0, positions, places).view(ids.shape[1], -1)
    locations = torch.empty_like(in_order)
    locations[:, order] = in_order
    return list(locations.int().unbind(0)), counts


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _group_maximum(value: Tensor, group: dist.ProcessGroup | None) -> int:
    return int(simple_all_reduce(value, group=group, op=dist.ReduceOp.MAX))


def fast_encode(data: Tensor, critical: Critical | tuple, is_postscore: bool = True) -> Tensor:
    """Tokens [T, M] -> the tokens of each expert [E, C, M]. Empty places are 0.

    The computation is in at least fp32; the result has the dtype of `data`.

    Args:
        is_postscore: False: each copy of a token is multiplied by its gate value.
    """
    num_experts, indices, locations, gates, capacity = critical[:5]
    tokens = _wide(data)
    buffer = tokens.new_zeros(num_experts * capacity + 1, data.shape[1])
    for ids, places, gate in zip(indices, locations, gates, strict=True):
        rows = tokens
        if not is_postscore:
            rows = tokens * gate.to(tokens.dtype).unsqueeze(1)
        buffer = buffer.index_add(0, _rows_of(ids, places, capacity, num_experts), rows)
    return buffer[:-1].view(num_experts, capacity, data.shape[1]).to(data.dtype)


def fast_decode(data: Tensor, critical: Critical | tuple, is_postscore: bool = True) -> Tensor:
    """The experts' results [E, C, M] -> the sum of the results of each token [T, M].

    Args:
        is_postscore: True: each result is multiplied by the token's gate value.
    """
    num_experts, indices, locations, gates, capacity = critical[:5]
    results = _wide(data).flatten(0, 1)
    results = torch.cat([results, results.new_zeros(1, results.shape[1])])
    total: Tensor | None = None
    for ids, places, gate in zip(indices, locations, gates, strict=True):
        rows = results[_rows_of(ids, places, capacity, num_experts)]
        if is_postscore:
            rows = rows * gate.to(rows.dtype).unsqueeze(1)
        total = rows if total is None else total + rows
    assert total is not None, "at least one choice"
    return total.to(data.dtype)


def _wide(data: Tensor) -> Tensor:
    return data.to(torch.promote_types(data.dtype, torch.float32))


def _rows_of(ids: Tensor, places: Tensor, capacity: int, num_experts: int) -> Tensor:
    """The row of each choice [T] in the buffer [E * C]; E * C if the choice is dropped."""
    rows = ids.long() * capacity + places
    return torch.where(places < capacity, rows, num_experts * capacity)


def get_dispatch_count(critical: Critical | tuple) -> Tensor:
    """The number of choices of each expert [E], before any drop."""
    return critical[-1]


def get_topk_selection(critical: Critical | tuple) -> tuple[Tensor, Tensor]:
    """The experts of each token [T, K], and the result of `get_dispatch_count`."""
    return torch.stack(list(critical[1]), dim=1).long(), critical[-1]


def get_reversed_sample_ids(
    critical: Critical | tuple, return_id_type: str = "sample_id"
) -> Tensor:
    """The token or choice at each place [E, C], as int32; -1 for empty places.

    Args:
        return_id_type: "sample_id": the index of the token; "top_id": the index k of the token's
            choice, from 0 to K - 1.
    """
    if return_id_type not in ("sample_id", "top_id"):
        raise ValueError(f"return_id_type ({return_id_type!r}) must be 'sample_id' or 'top_id'")
    num_experts, indices, locations, _, capacity = critical[:5]
    top_k, num_tokens = len(indices), len(indices[0])
    device = indices[0].device
    out = torch.full((num_experts * capacity + 1,), -1, dtype=torch.int32, device=device)
    for k in range(top_k):
        values = torch.arange(num_tokens, dtype=torch.int32, device=device)
        if return_id_type == "top_id":
            values = torch.full_like(values, k)
        out[_rows_of(indices[k], locations[k], capacity, num_experts)] = values
    return out[:-1].view(num_experts, capacity)


def fast_cumsum_sub_one(data: Tensor, dim: int = 0) -> Tensor:
    """`cumsum(data, 0) - 1` of a 2-D tensor.

    Raises:
        ValueError: `data` is not 2-D, or `dim` is not 0.
    """
    if data.dim() != 2 or dim != 0:
        raise ValueError(f"data must be 2-D and dim 0, not {list(data.shape)} and {dim}")
    return data.cumsum(0) - 1


class TutelMoeFastDispatcher:
    """`fast_encode` and `fast_decode` with a routing that `update` sets.

    Args:
        capacity: the default capacity of `update`.
    """

    def __init__(
        self, num_global_experts: int, capacity: int, model_dim: int, dispatch_dtype: torch.dtype
    ) -> None:
        self.num_global_experts = int(num_global_experts)
        self.capacity = int(capacity)
        self.model_dim = int(model_dim)
        self.original_dtype = dispatch_dtype

    def update(
        self,
        indices_: Sequence[Tensor],
        locations_: Sequence[Tensor],
        gates_: Sequence[Tensor],
        capacity: int | None = None,
        is_postscore: bool = True,
    ) -> None:
        self.capacity = int(capacity or 0) or self.capacity
        self.is_postscore = is_postscore
        no_counts = indices_[0].new_zeros(0)
        self.critical = Critical(
            self.num_global_experts,
            [ids.flatten() for ids in indices_],
            list(locations_),
            list(gates_),
            self.capacity,
            no_counts,
        )

    def encode(self, data: Tensor) -> Tensor:
        """Tokens [T, M] -> rows [E * C, M]."""
        rows = fast_encode(data, self.critical, self.is_postscore)
        return rows.flatten(0, 1).to(self.original_dtype)

    def decode(self, data: Tensor) -> Tensor:
        """Rows [E * C, M] -> the sum of the rows of each token [T, M]."""
        rows = data.reshape(self.num_global_experts, -1, data.shape[-1])
        return fast_decode(rows, self.critical, self.is_postscore).to(self.original_dtype)


fast_dispatcher = TutelMoeFastDispatcher
