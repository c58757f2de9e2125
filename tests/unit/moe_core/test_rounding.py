"""Token rounding: whole tiles by the definition, gates and gradients as plain torch has them,
evaluation untouched."""

# T tokens, E experts, K top-k

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import assert_equal_to_plain, make_layer, plain_logits, plain_rows

from moe_core import MoEConfig
from moe_core.capacity import expert_capacity
from moe_core.rounding import round_to_tiles
from moe_core.router import route


def tokens(num: int = 29, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_rows_are_those_of_the_definition(data):
    num_experts, num_tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 40))
    top_k, round_to = data.draw(st.integers(1, num_experts)), data.draw(st.integers(1, 9))
    capacity = data.draw(st.none() | st.integers(0, 20))
    config = MoEConfig(
        4, 4, num_experts, top_k, round_to=round_to, normalize_gates=data.draw(st.booleans())
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(num_tokens, num_experts, dtype=torch.float64, generator=generator)
    # some experts are chosen more often
    logits = logits + data.draw(st.integers(0, 3)) * torch.arange(num_experts)
    plain = route(logits, config, top_k, training=True)
    routing, plan = round_to_tiles(plain, config, capacity)

    ends = plan.offsets.tolist()
    rows = [plan.choices[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]
    width = routing.expert_ids.shape[1]
    expected = plain_rows(plain.probs, top_k, round_to, capacity)
    assert rows == [[t * width + k for t, k in those] for those in expected]
    assert plan.kept.sum() == sum(map(len, rows))
    assert ends[-1] <= len(plan.choices) <= num_tokens * top_k + num_experts * (round_to // 2)
    assert len(plan.choices) % round_to == 0

    counts = torch.bincount(plain.expert_ids.flatten(), minlength=num_experts)
    assert torch.equal(plan.counts, counts)
    for count, those in zip(counts.tolist(), rows, strict=True):
        assert len(those) % round_to == 0
        wanted = count if capacity is None else min(count, capacity)
        assert len(those) <= wanted + round_to // 2
        assert len(those) > wanted - round_to

    assert width == min(top_k + 1, num_experts)
    assert torch.equal(routing.expert_ids[:, :top_k], plain.expert_ids)
    assert all(len(set(visited)) == width for visited in routing.expert_ids.tolist())
    gates = routing.gates * plan.kept
    if config.normalize_gates and top_k > 1:
        torch.testing.assert_close(gates.sum(1), plan.kept.any(1).double())
    else:
        torch.testing.assert_close(gates, plain.probs.gather(1, routing.expert_ids) * plan.kept)
    assert routing.aux_loss == plain.aux_loss


CASES = [
    {"capacity_factor": 0.0, "top_k": 2, "round_to": 4},
    {"capacity_factor": 0.0, "top_k": 1, "round_to": 4, "batch_prioritized": True},
    {"capacity_factor": 0.8, "top_k": 2, "round_to": 3, "router": "cosine"},
    {"capacity_factor": 0.0, "top_k": 2, "round_to": 5, "normalize_gates": False},
    {"capacity_factor": 0.0, "top_k": 4, "round_to": 8},  # K = E: there is no next choice
    # more than there are tokens: nothing is kept
    {"capacity_factor": 0.0, "top_k": 2, "round_to": 64},
]


@pytest.mark.parametrize("config", CASES, ids=str)
def test_layer_equals_plain_torch(config):
    layer = make_layer(**config)
    assert_equal_to_plain(layer, tokens())
    for call in ({"capacity_factor": 1.0}, {"capacity_factor": 0.0}, {"top_k": 1}, {"top_k": 3}):
        assert_equal_to_plain(layer, tokens(seed=1), **call)


@pytest.mark.parametrize("config", CASES, ids=str)
def test_statistics_are_those_of_the_first_k_choices(config):
    layer, x = make_layer(**config), tokens()
    layer(x)
    top_k, num_choices = layer.config.top_k, layer.config.top_k * len(x)
    probs = plain_logits(layer, x).softmax(1)
    capacity = expert_capacity(len(x), 4, top_k, layer.config.capacity_factor)
    kept = sum(
        k < top_k
        for rows in plain_rows(probs, top_k, layer.config.round_to, capacity)
        for _, k in rows
    )
    found = layer.last_routing
    assert (
        found.counts.tolist() == probs.topk(top_k).indices.flatten().bincount(minlength=4).tolist()
    )
    assert found.dropped_share.item() == pytest.approx((num_choices - kept) / num_choices)


def test_a_multiple_of_one_changes_nothing():
    x = tokens()
    for config in (
        {"top_k": 2, "capacity_factor": 0.0},
        {"capacity_factor": 0.6, "batch_prioritized": True},
    ):
        torch.testing.assert_close(make_layer(round_to=1, **config)(x), make_layer(**config)(x))


@pytest.mark.parametrize("gate_activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("output_norm", [None, torch.nn.Identity()], ids=["gates", "norm"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_gate_values_are_those_of_the_router(top_k, output_norm, gate_activation):
    config = {"top_k": top_k, "normalize_gates": False, "gate_activation": gate_activation}
    outputs = []
    for round_to in (1, 0):
        layer = make_layer(round_to=round_to, capacity_factor=0.0, **config)
        outputs.append(layer(tokens(), output_norm=output_norm)[0])
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("aux_loss", ["gshard", "load_importance"])
def test_evaluation_and_the_auxiliary_loss_know_nothing_of_it(aux_loss):
    rounded, plain = (
        make_layer(round_to=r, top_k=2, gate_noise=0.5, aux_loss=aux_loss) for r in (4, 0)
    )
    losses = []
    for layer in (rounded, plain):
        torch.manual_seed(0)
        losses.append(layer(tokens())[1])
    assert torch.equal(*losses)
    for ours, theirs in zip(rounded.eval()(tokens()), plain.eval()(tokens()), strict=True):
        assert torch.equal(ours, theirs)


def test_the_least_probable_are_dropped_and_the_most_probable_added():
    # Logits of 5 tokens: 4 choose expert 0 and one expert 1; in tiles of 3 expert 0 loses one and
    # expert 1 stays empty.
    probs = torch.tensor(
        [[0.9, 0.06, 0.04], [0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.2, 0.7, 0.1]]
    )
    config = MoEConfig(4, 4, 3, round_to=3)
    _, plan = round_to_tiles(route(probs.log(), config, 1, training=True), config, None)
    assert plan.kept.tolist() == [
        [True, False],
        [False, False],
        [True, False],
        [True, False],
        [False, False],
    ]
    # In tiles of 2 it keeps its four; expert 1 rounds up to two, with the next choice of the
    # highest probability: 0.3.
    config = MoEConfig(4, 4, 3, round_to=2)
    routing, plan = round_to_tiles(route(probs.log(), config, 1, training=True), config, None)
    assert plan.kept[:, 0].all()
    assert plan.kept[:, 1].tolist() == [False, True, False, False, False]
    assert routing.expert_ids[:, 1].tolist() == [1, 1, 1, 2, 0]


def test_masked_tokens_fill_no_tile():
    layer, x = make_layer(round_to=4, top_k=2), tokens(20).view(2, 10, 6)
    mask = torch.rand(2, 10, generator=torch.Generator().manual_seed(0)) < 0.6
    y, aux_loss = layer(x, mask=mask)
    expected = layer(x[mask])
    torch.testing.assert_close((y[mask], aux_loss), expected)
    assert not y[~mask].any()
