"""Masked tokens: the layer does as if they were not there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import all_gradients, make_layer, plain_forward

from moe_core.capacity import expert_capacity

NOISELESS = [
    {"capacity_factor": 0.0, "top_k": 2},
    {"capacity_factor": 0.5, "batch_prioritized": True},
    {"capacity_factor": 1.25, "top_k": 2, "router": "cosine", "normalize_gates": False},
    {"capacity_factor": -0.75},
]


def some_tokens(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def outcome(forward, layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y, aux_loss = forward(x)
    weight = torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y).sin()
    return {"y": y, "aux_loss": aux_loss, **all_gradients((y * weight).sum() + aux_loss, x, layer)}


@pytest.mark.parametrize("config", NOISELESS, ids=str)
@pytest.mark.parametrize("counted", [True, False])
def test_equals_plain_torch_of_the_others(config, counted):
    """Output, loss and every gradient, whatever the masked tokens hold."""
    layer, x = make_layer(**config), some_tokens(17)
    mask = torch.rand(17, generator=torch.Generator().manual_seed(3)) < 0.6
    x[~mask] = float("nan")
    call = {"mask": mask, "num_tokens": int(mask.sum()) if counted else None}

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux_loss = plain_forward(layer, x[mask])
        return torch.zeros_like(x).masked_scatter(mask.unsqueeze(1), y), aux_loss

    found, expected = outcome(lambda x: layer(x, **call), layer, x), outcome(plain, layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert not found["y"][~mask].any()
    assert not found["x"][~mask].any()


@settings(max_examples=60, deadline=None)
@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=40),
    top_k=st.integers(1, 4),
    capacity_factor=st.sampled_from([0.0, 0.3, 1.0, -1.5]),
    batch_prioritized=st.booleans(),
    aux_loss=st.sampled_from(["gshard", "load_importance", "none"]),
    seed=st.integers(0, 5),
)
def test_any_mask(mask, top_k, capacity_factor, batch_prioritized, aux_loss, seed):
    """To the bit what the others alone give, with noise; the statistics and the capacity are theirs
    too."""
    layer = make_layer(
        top_k=top_k,
        capacity_factor=capacity_factor,
        batch_prioritized=batch_prioritized,
        aux_loss=aux_loss,
        gate_noise=1.0,
    )
    x, mask = some_tokens(len(mask), seed), torch.tensor(mask)
    torch.manual_seed(seed)
    alone, aux_alone = layer(x[mask])
    statistics = layer.last_routing
    torch.manual_seed(seed)
    y, aux = layer(x, mask=mask)
    assert torch.equal(y[mask], alone)
    assert not y[~mask].any()
    assert torch.equal(aux, aux_alone)
    assert all(torch.equal(a, b) for a, b in zip(layer.last_routing, statistics, strict=True))
    capacity = expert_capacity(int(mask.sum()), 4, top_k, capacity_factor)
    kept = layer.last_routing.counts.clamp(max=len(mask) * top_k if capacity is None else capacity)
    assert int(layer.last_routing.counts.sum()) == int(mask.sum()) * top_k
    share = 1 - float(kept.sum()) / max(int(mask.sum()) * top_k, 1) if mask.any() else 0.0
    assert float(layer.last_routing.dropped_share) == pytest.approx(share, abs=1e-6)


def test_shapes():
    layer, x = make_layer(), some_tokens(12).view(2, 3, 2, 6)
    mask = torch.ones(2, 3, 2, dtype=torch.bool)
    mask[1, 2] = False
    y, _ = layer(x, mask=mask)
    assert torch.equal(y[mask], layer(x[mask])[0])
    with pytest.raises(ValueError, match=r"mask has shape \[2, 3\], the tokens of x \[2, 3, 2\]"):
        layer(x, mask=mask[:, :, 0])


def test_all_true_is_no_mask():
    layer, x = make_layer(batch_prioritized=True, capacity_factor=0.5), some_tokens(9)
    everywhere = torch.ones(9, dtype=torch.bool)
    torch.testing.assert_close(layer(x, mask=everywhere), layer(x), rtol=0, atol=0)


def test_a_given_number_is_not_counted():
    """On the meta device nothing can be read back."""
    layer = make_layer(dtype=torch.float32, capacity_factor=1.25).to("meta")
    x, mask = torch.empty(5, 6, device="meta"), torch.empty(5, dtype=torch.bool, device="meta")
    y, _ = layer(x, mask=mask, num_tokens=3)
    assert y.shape == x.shape
