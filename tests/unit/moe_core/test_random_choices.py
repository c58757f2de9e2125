"""Random experts for a share of the tokens: which tokens, which experts, gate values and loss."""

import pytest
import torch
from moe_cases import TINY, make_layer

from moe_core import MoEConfig
from moe_core.balance import BalanceBias
from moe_core.router import route, with_random_choices

NUM_TOKENS = 4000
MANY = {"num_experts": 8, "gate_noise": 0.0}


def logits():
    """Logits by which all tokens choose expert 3, then expert 1."""
    values = torch.zeros(NUM_TOKENS, 8, dtype=torch.float64)
    values[:, 3] = 2.0
    values[:, 1] = 1.0
    return values.requires_grad_()


def test_all_choices_are_uniform_and_different():
    torch.manual_seed(0)
    chosen = torch.full((NUM_TOKENS, 2), 3)
    ids = with_random_choices(chosen, 8, 1.0)
    assert (ids[:, 0] != ids[:, 1]).all()
    for k in range(2):
        counts = ids[:, k].bincount(minlength=8).double()
        # the standard deviation of a count is 21
        assert (counts - NUM_TOKENS / 8).abs().max() < 5 * 21


@pytest.mark.parametrize("share", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_a_share_of_the_tokens(share):
    torch.manual_seed(0)
    ids = with_random_choices(torch.full((NUM_TOKENS, 1), 3), 8, share)
    changed = (ids != 3).double().mean()
    assert float(changed) == pytest.approx(0.25 * 7 / 8, abs=0.03)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gate_values_and_loss_are_the_routers(activation, normalize):
    options = {"normalize_gates": normalize, "gate_activation": activation}
    config = MoEConfig(**TINY | MANY | options, top_k=2)
    values = logits()
    torch.manual_seed(0)
    routing = route(values, config, 2, training=True, random_share=1.0)
    plain = route(values, config, 2, training=True)
    scores = values.softmax(1)
    if activation == "sigmoid":
        scores = values.sigmoid()
    gates = scores.gather(1, routing.expert_ids)
    if normalize:
        gates = gates / gates.sum(1, keepdim=True)
    torch.testing.assert_close(routing.gates, gates)
    assert routing.gates.requires_grad
    assert torch.equal(routing.aux_loss, plain.aux_loss)
    assert torch.equal(plain.expert_ids, torch.tensor([[3, 1]]).expand(NUM_TOKENS, 2))
    assert len(routing.expert_ids.unique()) == 8


@pytest.mark.parametrize("output_norm", [None, torch.nn.LayerNorm(6)], ids=["gates", "norm"])
def test_experts_without_any_probability_have_gates_and_gradients_that_are_numbers(output_norm):
    """The softmax of a decided router is exactly 0 for the experts that chance chose."""
    layer = make_layer(dtype=torch.float32, top_k=2, capacity_factor=0.0, num_experts=8)
    with torch.no_grad():
        layer.router.weight.mul_(1000)
    y, aux_loss = layer(torch.randn(50, 6), random_share=1.0, output_norm=output_norm)
    (y.sum() + aux_loss).backward()
    assert y.isfinite().all()
    assert layer.router.weight.grad.isfinite().all()


def test_biases_balance_the_choices_of_the_router():
    """Random ones would hide that all tokens choose experts 3 and 1."""
    balance = BalanceBias(8, 1e-3)
    config = MoEConfig(**TINY | MANY, top_k=2, balance="bias")
    route(logits(), config, 2, training=True, random_share=1.0, balance=balance)
    assert balance.load.tolist() == [0, NUM_TOKENS, 0, NUM_TOKENS, 0, 0, 0, 0]


def test_a_layer_with_equal_experts_and_gates_does_not_change():
    """Only the choice is random."""
    layer = make_layer(capacity_factor=0.0, num_experts=4)
    with torch.no_grad():
        layer.router.weight.zero_()
        for parameter in layer.experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x, random_share=1.0)[0], layer(x)[0])
    assert layer.last_routing.counts.tolist() == [12, 0, 0, 0]  # ties: the lowest index
    layer(x, random_share=1.0)
    assert int(layer.last_routing.counts.sum()) == 12
    assert int(layer.last_routing.counts[0]) < 12


@pytest.mark.parametrize(
    ("config", "share", "message"),
    [
        ({}, -0.1, r"random_share \(-0.1\) must be from 0 to 1"),
        ({}, 1.5, r"random_share \(1.5\) must be from 0 to 1"),
        ({}, torch.zeros(2), r"random_share has shape \[2\], it must be a scalar"),
        ({"router": "soft", "slots_per_expert": 1}, 0.5, "random_share needs tokens that choose"),
        ({"router": "expert_choice"}, torch.tensor(0.5), "needs .* not router 'expert_choice'"),
    ],
    ids=str,
)
def test_shares_that_cannot_be(config, share, message):
    layer = make_layer(**config)
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(4, 6, dtype=torch.float64), random_share=share)


def test_a_token_is_replaced_as_a_whole():
    """No expert comes twice, as where a random choice stands beside one of the router."""
    ids = with_random_choices(torch.tensor([[3, 1]]).repeat(NUM_TOKENS, 1), 8, 0.5)
    assert (ids[:, 0] != ids[:, 1]).all()
