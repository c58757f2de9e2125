"""Soft MoE, expert choice, balancing biases, sigmoid gates, z-loss and shared experts: layers
against loops in plain torch, in fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_core import MoEConfig, MoELayer
from moe_core.balance import BalanceBias, update_balance
from moe_core.export import StandardMoE
from moe_core.routing import route_by_tokens

B, N, E, M, H = 3, 8, 4, 8, 16  # images, tokens of an image, experts, model dim, hidden dim
KINDS = {
    "soft": {"router": "soft", "slots_per_expert": 2},
    "expert_choice": {"router": "expert_choice", "capacity_factor": 1.0},
    "expert_choice_per_image": {
        "router": "expert_choice", "capacity_factor": 1.0, "choose_per_image": True
    },
    "bias": {"balance": "bias", "capacity_factor": 0.0},
    "sigmoid": {"gate_activation": "sigmoid", "top_k": 2, "capacity_factor": 0.0},
    "sigmoid_unnormalised": {
        "gate_activation": "sigmoid", "top_k": 2, "normalize_gates": False, "capacity_factor": 0.0
    },
    "z_loss": {"z_loss_weight": 0.5, "aux_loss": "none", "capacity_factor": 0.0},
    "shared": {"num_shared_experts": 2, "capacity_factor": 0.0},
}  # fmt: skip


def make_layer(name: str, **changes) -> MoELayer:
    torch.manual_seed(0)
    options = KINDS.get(name, {"capacity_factor": 0.0}) | {"kernels": "torch"} | changes
    layer = MoELayer(MoEConfig(M, H, E, **options)).double()
    if layer.balance is not None:
        layer.balance.bias.copy_(torch.linspace(0.2, -0.2, E))
    return layer


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(B, N, M, dtype=torch.float64, requires_grad=True)


def feed_forward(experts, e: int, x: Tensor) -> Tensor:
    hidden = F.gelu(x @ experts.w1[e].T + experts.b1[e])
    return hidden @ experts.w2[e] + experts.b2[e]


def expected_soft(layer: MoELayer, x: Tensor) -> Tensor:
    router = layer.router
    images = []
    for image in x:  # [N, M]
        directions = F.normalize(router.slots, dim=0)
        logits = F.normalize(image, dim=1) @ directions * router.scale  # [N, S]
        slots = logits.softmax(0).T @ image  # [S, M]
        rows = []
        for s, slot in enumerate(slots):
            expert = s // layer.config.slots_per_expert
            rows.append(feed_forward(layer.experts, expert, slot))
        images.append(logits.softmax(1) @ torch.stack(rows))
    return torch.stack(images)


def expected_expert_choice(layer: MoELayer, x: Tensor, per_image: bool) -> Tensor:
    flat = x.flatten(0, 1)
    scores = (flat @ layer.router.weight.T).softmax(1)  # [T, E]
    capacity = len(flat) // E
    out = torch.zeros_like(flat)
    for e in range(E):
        if per_image:
            order = scores[:, e].view(B, N).argsort(1, descending=True)
            ranks = order.argsort(1).flatten()
            chosen = ranks.argsort(stable=True)[:capacity]
        else:
            chosen = scores[:, e].argsort(descending=True)[:capacity]
        rows = feed_forward(layer.experts, e, flat[chosen]) * scores[chosen, e].unsqueeze(1)
        out = out.index_add(0, chosen, rows)
    return out.view_as(x)


def expected_token_choice(layer: MoELayer, x: Tensor) -> Tensor:
    config = layer.config
    out = []
    for token in x.flatten(0, 1):
        logits = layer.router.weight @ token
        scores = logits.softmax(0)
        if config.gate_activation == "sigmoid":
            scores = logits.sigmoid()
        choice_scores = scores
        if layer.balance is not None:
            choice_scores = scores + layer.balance.bias
        ids = choice_scores.topk(config.top_k).indices
        gates = scores[ids]
        if config.normalize_gates and config.top_k > 1:
            gates = gates / gates.sum()
        y = sum(
            gate * feed_forward(layer.experts, int(e), token)
            for gate, e in zip(gates, ids, strict=True)
        )
        if layer.shared is not None:
            y = y + feed_forward(layer.shared, 0, token)
        out.append(y)
    return torch.stack(out).view_as(x)


def expected(name: str, layer: MoELayer, x: Tensor) -> Tensor:
    if name == "soft":
        return expected_soft(layer, x)
    if name.startswith("expert_choice"):
        return expected_expert_choice(layer, x, name.endswith("per_image"))
    return expected_token_choice(layer, x)


def assert_same_output_and_gradients(y: Tensor, reference: Tensor, inputs: list[Tensor]) -> None:
    weight = torch.randn_like(y)
    found = torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True)
    gradients = torch.autograd.grad((reference * weight).sum(), inputs)
    torch.testing.assert_close([y, *found], [reference, *gradients])


@pytest.mark.parametrize("name", KINDS)
def test_output_and_gradients(name):
    layer, x = make_layer(name), tokens()
    inputs = [x, *layer.parameters()]
    assert_same_output_and_gradients(layer(x)[0], expected(name, layer, x), inputs)


@pytest.mark.parametrize("name", ["soft", "expert_choice_per_image", "bias", "shared"])
def test_compiled_layer(name):
    torch.compiler.reset()
    layer = make_layer(name)
    x = tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])


@pytest.mark.parametrize("name", KINDS)
def test_standard_operations(name):
    layer = make_layer(name).eval()
    x = tokens().detach()
    for batched in (False, True):
        torch.testing.assert_close(StandardMoE(layer, batched=batched)(x), layer(x)[0])


def test_z_loss():
    layer = make_layer("z_loss")
    x = tokens()
    logits = x.flatten(0, 1) @ layer.router.weight.T
    torch.testing.assert_close(layer(x)[1], 0.5 * logits.logsumexp(1).square().mean())


def test_soft_layers_have_no_auxiliary_loss_and_equal_loads_and_refuse_masks():
    layer = make_layer("soft")
    _, aux_loss = layer(tokens())
    assert aux_loss == 0
    assert layer.last_routing.counts.tolist() == [2 * B] * E
    assert layer.last_routing.dropped_share == 0
    with pytest.raises(ValueError, match="mask"):
        layer(tokens(), mask=torch.ones(B, N, dtype=torch.bool))


def test_expert_choice_reports_tokens_without_an_expert():
    layer = make_layer("expert_choice")
    x = tokens()
    layer(x)
    stats = layer.last_routing
    capacity = B * N // E
    assert stats.counts.tolist() == [capacity] * E
    scores = (x.flatten(0, 1) @ layer.router.weight.T).softmax(1)
    chosen = scores.topk(capacity, dim=0).indices.flatten()
    num_dropped = B * N - len(chosen.unique())
    torch.testing.assert_close(float(stats.dropped_share), num_dropped / (B * N))
    with pytest.raises(ValueError, match="capacity_factor"):
        layer(x, capacity_factor=0.0)


def test_an_expert_chooses_equally_many_tokens_of_each_image():
    layer = make_layer("expert_choice_per_image", capacity_factor=2.0)
    x = tokens().detach()
    x[0] *= 100  # by score, the first image would get all rows or none
    layer.experts.b2.data.fill_(1)
    with torch.no_grad():
        for parameter in (layer.experts.w1, layer.experts.b1, layer.experts.w2):
            parameter.zero_()
    y, _ = layer(x)  # [B, N, M]: the sum of a token's scores with the experts that chose it
    capacity = 2 * (B * N // E)
    assert ((y[..., 0] > 0).sum(1) >= capacity // B).all()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "expert_choice"])
def test_evaluation_does_not_depend_on_the_batch(name):
    layer = make_layer(name, capacity_factor=1.25).eval()
    for length in (8, 11):
        x = torch.randn(6, length, M, dtype=torch.float64)
        x[3:] = x[3:] * 0.01 + 1  # alike: they crowd a few experts
        for run in (StandardMoE(layer), lambda x: layer(x)[0]):
            with torch.no_grad():
                together = run(x)
                for i, image in enumerate(x):
                    torch.testing.assert_close(run(image[None])[0], together[i])


def test_bias_balances_the_load():
    layer = make_layer("bias", balance_rate=0.002)
    layer.balance.bias.zero_()
    torch.manual_seed(2)
    x = torch.randn(400, M, dtype=torch.float64) + 1  # a common part, which one expert likes best
    layer(x)
    first = layer.last_routing.counts
    for _ in range(200):
        layer(x)
        update_balance(layer)
    layer(x)
    last = layer.last_routing.counts
    assert first.max() > 1.4 * 100
    assert last.max() < 1.1 * 100
    update_balance(layer)
    layer.eval()(tokens())
    assert layer.balance.load.sum() == 0  # does not count in evaluation


@pytest.mark.parametrize("name", ["bias", "sigmoid"])
def test_gates_that_are_all_zero_leave_numbers(name):
    layer = make_layer(name, top_k=2).float()
    if layer.balance is not None:
        layer.balance.bias.copy_(torch.tensor([-3.0, 0.0, 0.0, 0.0]))
    with torch.no_grad():
        layer.router.weight.fill_(-100.0)  # sigmoids of logits below -104 are 0
        if layer.balance is not None:
            layer.router.weight[0].fill_(100.0)  # and so is the softmax of the others
    y, aux_loss = layer(torch.ones(5, M))
    (y.sum() + aux_loss).backward()
    assert y.isfinite().all()
    assert layer.router.weight.grad.isfinite().all()


@pytest.mark.parametrize("shift", [0.0, -60.0, -75.0, -90.0, -200.0])
def test_normalised_gates_at_any_logits(shift):
    """exp(logit) for sigmoids far below 0, and for softmax whatever the largest logit is."""
    logits = torch.tensor([[0.0, 1.0, -1.0]], dtype=torch.float64) + shift
    config = MoEConfig(M, 4, 3, top_k=2, gate_activation="sigmoid")
    total = logits.double().sigmoid()[0, :2].sum()
    expected = logits.sigmoid()[:, [1, 0]] / total  # fp64 has numbers down to exp(-700)
    gates = route_by_tokens(logits.float(), config, 2, False).gates
    torch.testing.assert_close(gates, expected.float())

    config = MoEConfig(M, 4, 3, top_k=2, balance="bias", aux_loss="none")
    balance = BalanceBias(3, 0.1)
    balance.bias.copy_(torch.tensor([-3.0, 0.0, 0.0]))
    logits = torch.tensor([[0.0, 1.0 + shift, shift]])
    gates = route_by_tokens(logits, config, 2, False, balance=balance).gates
    torch.testing.assert_close(gates, torch.tensor([[1.0, 0.0]]).softmax(1))


@pytest.mark.parametrize("name", KINDS)
def test_no_tokens(name):
    layer = make_layer(name)
    y, aux_loss = layer(torch.empty(0, N, M, dtype=torch.float64, requires_grad=True))
    assert y.shape == (0, N, M)
    (y.sum() + aux_loss).backward()


def test_z_loss_of_expert_choice():
    layer = make_layer("expert_choice", z_loss_weight=0.5)
    x = tokens()
    logits = x.flatten(0, 1) @ layer.router.weight.T
    torch.testing.assert_close(layer(x)[1], 0.5 * logits.logsumexp(1).square().mean())
