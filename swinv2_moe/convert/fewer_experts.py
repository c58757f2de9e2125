"""Fewer experts in place of a layer's experts, from a sample of its tokens.

1. Prune. The expert whose removal changes the layer's output least is removed, then the next one.
   Its tokens go to the experts that the router ranks next. An expert with few tokens changes
   little, so the load counts. This is the criterion of "Not All Experts are Equal" (arXiv
   2402.14800, section 3.1), one expert at a time instead of all subsets.
2. Fit. The second weight and bias of each expert (not of gated ones) become those that give the
   layer's original output with the least squares, near to what they were (ridge regression). How
   near is decided by tokens that the regression has not seen, also whether it helps at all. Fitting
   experts to outputs by least squares: MergeMoE, arXiv 2510.14436.

A short distillation from the original model follows.
"""

# T tokens, E experts, N experts left, K top-k, H hidden dim of an expert, M model dim

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core import ACTIVATIONS, MoEConfig, MoELayer
from moe_core.ops.route.reference import gate_scores, gates_of, largest

# The parameter of a router that has an entry for each expert, and its dim.
ROUTERS = {"linear": ("weight", 0), "cosine": ("sim_matrix", 1)}
RIDGE = (1e-3, 1e-2, 1e-1, 1.0)  # weights of the start in a regression


class Compressed(NamedTuple):
    """A layer's tensors by name, the share of its output that has changed (0: none, 1: all), and
    the experts that stay."""

    tensors: dict[str, Tensor]
    change: float
    kept: list[int]


def choices(logits: Tensor, config: MoEConfig, bias: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> the experts of each token [T, K] and their gate values, as in evaluation.

    Args:
        bias: [E], added to the scores for the choice.
    """
    scores = gate_scores(logits, config.gate_activation)
    ranked = logits
    if config.balance == "bias":
        ranked = scores + bias
    top_k = min(config.top_k, logits.shape[1])
    ids = largest(ranked, top_k)
    normalize = config.normalize_gates and top_k > 1
    return ids, gates_of(scores, logits, ids, config.gate_activation, normalize)


def change_of(target: Tensor, y: Tensor) -> tuple[float, float]:
    """The relative squared error of c * y [T, M] with the factor c that makes it smallest, and c.

    With fewer experts the gate values are larger, and so is y.
    """
    product, square = float((target * y).sum()), float(y.square().sum())
    total = float(target.square().sum())
    if product <= 0 or total == 0:
        return 1.0, 1.0
    return max(0.0, 1 - product**2 / (square * total)), product / square


@dataclass
class Sample:
    """Tokens [T, M] of a layer in one process, and what each expert makes of them."""

    layer: MoELayer
    tokens: Tensor

    @cached_property
    def bias(self) -> Tensor:
        """The bias of each expert in the choice, [E]; 0 without `balance="bias"`."""
        if self.layer.balance is None:
            return self.tokens.new_zeros(self.layer.config.num_experts)
        return self.layer.balance.bias

    @cached_property
    def logits(self) -> Tensor:
        """[T, E]."""
        return self.layer.router(self.tokens)

    @cached_property
    def outputs(self) -> Tensor:
        """The output of each expert for each token, [E, T, M]."""
        num, count = self.layer.config.num_experts, len(self.tokens)
        offsets = torch.arange(1, num + 1, dtype=torch.int32) * count
        return self.layer.experts(self.tokens.repeat(num, 1), offsets).view(num, count, -1)

    @cached_property
    def target(self) -> Tensor:
        """The layer's output without shared experts, [T, M]."""
        return self.mixture(list(range(self.layer.config.num_experts)))

    def mixture(self, kept: list[int]) -> Tensor:
        """The layer's output [T, M] if it had these experts, without shared ones."""
        ids, gates = choices(self.logits[:, kept], self.layer.config, self.bias[kept])
        rows = torch.tensor(kept)[ids]  # [T, K]
        chosen = self.outputs[rows, torch.arange(len(rows))[:, None]]  # [T, K, M]
        return torch.einsum("tk,tkm->tm", gates, chosen)


@torch.no_grad()
def fewer_experts(layer: MoELayer, tokens: Tensor, num_experts: int) -> Compressed:
    """The layer with `num_experts` of its experts, from tokens [T, M] (see the module).

    The other parameters and shared experts stay.
    """
    sample = Sample(layer, tokens)
    kept = _kept(sample, num_experts)
    router, dim = ROUTERS[layer.config.router]
    part = _Part(sample, kept)
    change = part.fit()
    tensors = dict(layer.state_dict())
    tensors[f"router.{router}"] = tensors[f"router.{router}"].index_select(dim, torch.tensor(kept))
    tensors |= {f"experts.{name}": tensor for name, tensor in part.experts.items()}
    if layer.balance is not None:
        tensors["balance.bias"] = sample.bias[kept]
    return Compressed(tensors, change, kept)


def _kept(sample: Sample, num_experts: int) -> list[int]:
    """The experts that are left when those with the least change of output are removed."""
    kept = list(range(sample.layer.config.num_experts))
    while len(kept) > num_experts:
        changes = []
        for expert in kept:
            y = sample.mixture([e for e in kept if e != expert])
            changes.append(change_of(sample.target, y)[0])
        del kept[changes.index(min(changes))]
    return kept


class _Part:
    """The experts that are left."""

    def __init__(self, sample: Sample, kept: list[int]) -> None:
        self.sample, self.kept = sample, kept
        experts = sample.layer.experts.named_parameters()
        self.experts = {name: parameter[kept].clone() for name, parameter in experts}

    def fit(self) -> float:
        """Scale or fit the second weights and biases to the original output. Returns the change of
        the output: after a fit, that of tokens that it has not seen."""
        target = self.sample.target
        change, scale = change_of(target, self.sample.mixture(self.kept))
        for name in self.experts.keys() & {"w2", "b2"}:
            self.experts[name] *= scale  # gate values of fewer experts are larger
        if self.sample.layer.config.gated:
            return change
        all_tokens = torch.ones(len(target), dtype=torch.bool)
        fitted = torch.arange(len(target)) % 2 == 0
        unseen = ~fitted
        _, y = self._fitted(~all_tokens, 0.0)  # without a fit
        changes = {0.0: change_of(target[unseen], y[unseen])[0]}
        for ridge in RIDGE:
            _, y = self._fitted(fitted, ridge)
            changes[ridge] = change_of(target[unseen], y[unseen])[0]
        best = min(changes, key=changes.__getitem__)
        if best:
            seconds, _ = self._fitted(all_tokens, best)
            hidden_dim = self.experts["w1"].shape[1]
            self.experts["w2"] = torch.stack([second[:hidden_dim] for second in seconds])
            if "b2" in self.experts:
                self.experts["b2"] = torch.stack([second[-1] for second in seconds])
        return changes[best]

    def _fitted(self, chosen: Tensor, ridge: float) -> tuple[list[Tensor], Tensor]:
        """The second weights, each with the bias as its last row, fitted to the tokens where
        `chosen` [T] is true, and the output for all tokens [T, M].

        Experts are fitted one after the other. With K above 1 this is repeated, since a token's
        output is the sum of several.
        """
        sample, config = self.sample, self.sample.layer.config
        logits = sample.logits[:, self.kept]
        ids, gates = choices(logits, config, sample.bias[self.kept])
        weights = torch.zeros_like(logits).scatter(1, ids, gates)  # [T, N]
        rows, seconds, tokens = [], [], []
        y = torch.zeros_like(sample.target)
        for e in range(len(self.kept)):
            mine = (weights[:, e] > 0).nonzero().squeeze(1)
            expert = {name: tensor[e] for name, tensor in self.experts.items()}
            row, second = _linear_part(expert, sample.tokens[mine], config)
            rows.append(weights[mine, e, None] * row)
            seconds.append(second)
            tokens.append(mine)
            y[mine] += rows[e] @ second
        for _ in range(min(config.top_k, 2) * int(chosen.any())):
            for e, mine in enumerate(tokens):
                used = chosen[mine]
                rest = sample.target[mine] - y[mine] + rows[e] @ seconds[e]
                second = _regression(rows[e][used], rest[used], seconds[e], ridge)
                y[mine] += rows[e] @ (second - seconds[e])
                seconds[e] = second
        return seconds, y


def _linear_part(
    expert: dict[str, Tensor], tokens: Tensor, config: MoEConfig
) -> tuple[Tensor, Tensor]:
    """The hidden units of an expert [T, H] and its second weight [H, M]. With a second bias, a
    column of ones and the bias are appended."""
    activation = ACTIVATIONS[config.activation]
    hidden = activation(F.linear(tokens, expert["w1"], expert.get("b1")))
    if "b2" not in expert:
        return hidden, expert["w2"]
    ones = hidden.new_ones(len(hidden), 1)
    return torch.cat([hidden, ones], 1), torch.cat([expert["w2"], expert["b2"][None]])


def _regression(rows: Tensor, target: Tensor, start: Tensor, ridge: float) -> Tensor:
    """The weight [D, M] with the least squares of `rows @ weight - target` [T, M] plus `ridge`
    times those of its distance from the start, in float64.

    `ridge` is in units of the mean square of a column of rows.
    """
    rows64, start64 = rows.double(), start.double()
    gram = rows64.T @ rows64
    gram.diagonal().add_(ridge * gram.diagonal().mean() + 1e-12)
    moved = torch.linalg.solve(gram, rows64.T @ (target.double() - rows64 @ start64))
    return (start64 + moved).to(start.dtype)
