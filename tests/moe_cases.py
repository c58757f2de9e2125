"""The whole layer in plain torch, and comparisons with it, for the tests of moe_core."""

# T tokens, E experts, K top-k, M model dim

import math

import torch
import torch.nn.functional as F
from ffn_cases import plain_hidden
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer, moe_layers, ops
from moe_core.losses import RoutingScores, expert_sums
from moe_core.parallel import ParallelStrategy

# odd widths: nothing here is a multiple of 16 bytes
TINY = {"model_dim": 6, "hidden_dim": 10, "num_experts": 4}


def make_layer(
    seed: int = 0,
    dtype=torch.float64,
    group=None,
    strategy=ParallelStrategy(),  # noqa: B008
    **config,
) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(MoEConfig(**{**TINY, **config}), group, strategy=strategy).to(dtype)


def plain_logits(layer: MoELayer, x: Tensor) -> Tensor:
    router = layer.router
    if layer.config.router == "linear":
        return x @ router.weight.t()
    projected = x @ router.projector.weight.t() + router.projector.bias
    directions = router.sim_matrix / router.sim_matrix.norm(dim=0, keepdim=True)
    scale = router.temperature.clamp(max=math.log(100)).exp()
    return projected / projected.norm(dim=1, keepdim=True) @ directions * scale


def plain_forward(
    layer: MoELayer,
    x: Tensor,
    top_k: int | None = None,
    capacity_factor: float | None = None,
    most_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """y and the GShard loss of tokens x [T, M], one token at a time; `most_tokens`: the group's
    largest T."""
    config = layer.config
    num_experts = config.num_experts
    top_k = top_k or config.top_k
    f = config.capacity_factor if capacity_factor is None else capacity_factor
    probs = plain_logits(layer, x).softmax(1)
    gates, ids = probs.topk(min(top_k, num_experts))
    per_expert = math.ceil(max(most_tokens, len(x)) / num_experts)
    capacity = top_k * math.floor(abs(f) * per_expert) if f else None
    priority = probs.max(1).values if config.batch_prioritized else None
    if top_k > 1 and config.normalize_gates:
        gates = gates / gates.sum(1, keepdim=True)
    weights = layer.experts.parameters_by_field
    y = plain_moe(x, ids, gates, weights, config.activation, capacity, priority)
    share = F.one_hot(ids[:, 0], num_experts).to(x.dtype).mean(0)
    return y, num_experts * (probs.mean(0) * share).sum()


def plain_moe(
    x: Tensor, ids: Tensor, gates: Tensor, weights, activation: str, capacity=None, priority=None
) -> Tensor:
    """The layer after routing, one choice at a time: x [T, M], ids and gates [T, K] -> [T, M]."""
    tokens = list(range(len(ids)))
    if priority is not None:
        tokens = sorted(tokens, key=lambda t: -priority[t].item())  # Python's sort is stable
    filled = [0] * len(weights.w1)
    y = [torch.zeros_like(x[0]) for _ in tokens]
    for k in range(ids.shape[1]):
        for t in tokens:
            e = int(ids[t, k])
            filled[e] += 1
            if capacity is None or filled[e] <= capacity:
                w1, b1, w2, b2, w3, b3 = (None if w is None else w[e] for w in weights)
                u = None if w3 is None else w3 @ x[t] + b3
                hidden = plain_hidden(activation, w1 @ x[t] + b1, u)
                y[t] = y[t] + gates[t, k] * (hidden @ w2 + b2)
    return torch.stack(y)


def all_gradients(loss: Tensor, x: Tensor, layer: MoELayer) -> dict[str, Tensor]:
    named = {"x": x, **dict(layer.named_parameters())}
    return dict(
        zip(
            named,
            torch.autograd.grad(loss, list(named.values()), materialize_grads=True),
            strict=True,
        )
    )


def assert_equal_to_plain(layer: MoELayer, x: Tensor, **call) -> None:
    """Output, auxiliary loss and every gradient, to 1e-10."""
    x = x.detach().requires_grad_()
    weight = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    outcomes = []
    for forward in (layer, lambda x, **call: plain_forward(layer, x, **call)):
        y, aux_loss = forward(x, **call)
        gradients = all_gradients((y * weight).sum() + aux_loss, x, layer)
        outcomes.append({"y": y, "aux_loss": aux_loss, **gradients})
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-10, atol=1e-10)


def assert_experts_are_the_dense_ffns(model: nn.Module, dense: nn.Module) -> None:
    """Every expert of `model`, to the bit, the feed-forward network of its block in `dense`."""
    for name, layer in moe_layers(model).items():
        ffn, experts = dense.get_submodule(name.removesuffix(".moe")), layer.experts
        for e in range(len(experts.w1)):
            assert torch.equal(experts.w1[e], ffn.fc1.weight)
            assert torch.equal(experts.b1[e], ffn.fc1.bias)
            assert torch.equal(experts.w2[e], ffn.fc2.weight.T)
            assert experts.b2 is None or torch.equal(experts.b2[e], ffn.fc2.bias)


def owned(whole: Tensor, layer: MoELayer, name: str) -> Tensor:
    """What of a parameter (or its gradient) of the one-process layer belongs to this rank's."""
    if not name.startswith("experts."):
        return whole
    first, count, part, num_parts = layer.shard
    return whole[first : first + count].chunk(num_parts, 1)[part]


def step_of(layer: MoELayer, num_tokens: int, strategy: ParallelStrategy) -> dict[str, Tensor]:
    """The output of one call on as many tokens, other ones on each rank, and every gradient."""
    layer.zero_grad()
    generator = torch.Generator().manual_seed(layer.group.rank)
    shape, dtype = (num_tokens, layer.config.model_dim), next(layer.parameters()).dtype
    x = torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True)
    y, aux_loss = layer(x, strategy=strategy)
    (y.square().sum() + aux_loss).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def route_by_torch(logits, noise, top_k, normalize, loss, noise_std):
    """gates, ids, probs and the sums of the loss; noise [T, E] or None."""
    settings = ops.RouteSettings(top_k, normalize, loss, noise_std, noise_std, "torch")
    routed = ops.route(logits, noise, settings)
    scores = RoutingScores(logits, routed.noisy, routed.probs, routed.ids, noise_std)
    return *routed[:3], expert_sums(loss, scores)


def route_by_triton(logits, noise, top_k, normalize, loss, noise_std):
    """As `route_by_torch`."""
    settings = ops.RouteSettings(top_k, normalize, loss, noise_std, noise_std, "triton")
    return ops.route(logits, noise, settings)[:4]
