"""The fused attention against timm's own, and against a plain loop for the released form."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2Block, WindowAttention

from moe_core import prepared
from swinv2_moe.models.attention import DotProductWindowAttention, FusedWindowAttention


def copy_of(attn: WindowAttention) -> FusedWindowAttention:
    fused = FusedWindowAttention.like(attn)
    fused.load_state_dict(attn.state_dict(), strict=True)
    return fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "shifted"])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("pretrained_window", [(0, 0), (6, 6)])
def test_fused_equals_timm(dtype, masked, qkv_bias, pretrained_window, randomize):
    attn = WindowAttention(
        12, (4, 4), 3, qkv_bias, pretrained_window_size=pretrained_window, dtype=dtype
    )
    randomize(attn)
    with torch.no_grad():
        attn.logit_scale[0] = 10.0  # above the clamp
    fused = copy_of(attn)
    mask = None
    if masked:
        block = SwinTransformerV2Block(12, (8, 8), 3, window_size=4, shift_size=2, dtype=dtype)
        mask = block.attn_mask
        assert mask.shape == (4, 16, 16)
        assert mask.any()
    torch.manual_seed(0)
    x = torch.randn(3 * 4, 16, 12, dtype=dtype)
    results = []
    for module in (attn, fused):
        images = x.clone().requires_grad_()
        y = module(images, mask)
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
        results.append([y, images.grad, *(p.grad for p in module.parameters())])
    # of the largest value: at a temperature of 100 a score is rounded by 4e-6, several times
    tolerance = 2e-4 if dtype == torch.float32 else 1e-12
    for name, expected, found in zip(
        ["output", "input", *dict(attn.named_parameters())], *results, strict=True
    ):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max(), name
    assert results[0][0].abs().max() > 0.1


def test_fused_under_autocast_and_dropout(randomize):
    attn = randomize(WindowAttention(12, (4, 4), 3, attn_drop=0.5, proj_drop=0.5))
    fused, x = copy_of(attn), torch.randn(4, 16, 12)
    assert not torch.equal(fused(x), fused(x))
    attn.eval(), fused.eval()
    torch.testing.assert_close(fused(x), attn(x), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(x).dtype == torch.bfloat16
        torch.testing.assert_close(fused(x).float(), attn(x).float(), rtol=0.05, atol=0.05)


def test_the_released_form_by_hand(randomize):
    """One window, one head at a time: dot products over sqrt(D), a bias on q, k and v, the position
    bias as it is."""
    dim, heads, side = 8, 2, 3
    attn = randomize(DotProductWindowAttention(dim, (side, side), heads, qkv_bias=True)).double()
    names = {name for name, _ in attn.named_parameters()}
    cpb = {"cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight"}
    assert names == cpb | {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    x = torch.randn(2, side * side, dim, dtype=torch.float64)
    mask = torch.randn(2, side * side, side * side, dtype=torch.float64)  # two windows of one image
    p = dict(attn.named_parameters())
    table = torch.empty(heads, side * side, side * side, dtype=torch.float64)
    for i in range(side * side):
        for j in range(side * side):
            offsets = (
                torch.tensor([i // side - j // side, i % side - j % side]).double() / (side - 1) * 8
            )
            coords = offsets.sign() * (offsets.abs() + 1).log2() / math.log2(8)
            hidden = torch.relu(p["cpb_mlp.0.weight"] @ coords + p["cpb_mlp.0.bias"])
            table[:, i, j] = p["cpb_mlp.2.weight"] @ hidden
    for bias in (None, mask):
        expected = torch.empty_like(x)
        for window in range(2):
            q, k, v = F.linear(x[window], p["qkv.weight"], p["qkv.bias"]).chunk(3, dim=-1)
            out = []
            for head in range(heads):
                part = slice(head * dim // heads, (head + 1) * dim // heads)
                scores = q[:, part] @ k[:, part].T / math.sqrt(dim // heads) + table[head]
                scores = scores if bias is None else scores + bias[window]
                out.append(scores.softmax(-1) @ v[:, part])
            expected[window] = F.linear(torch.cat(out, 1), p["proj.weight"], p["proj.bias"])
        # the coordinates are kept in fp32
        torch.testing.assert_close(attn(x, bias), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [FusedWindowAttention, DotProductWindowAttention])
def test_the_position_bias_is_kept_within_prepared_alone(kind, randomize, monkeypatch):
    attn, x = randomize(kind(12, (4, 4), 3)).eval(), torch.randn(4, 16, 12)
    runs = []
    monkeypatch.setattr(
        attn.cpb_mlp, "forward", lambda t, run=attn.cpb_mlp.forward: runs.append(1) or run(t)
    )
    with torch.no_grad():
        wanted = attn(x)
        attn(x)
    assert len(runs) == 2
    with prepared(attn), torch.inference_mode():
        torch.testing.assert_close(attn(x), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(attn(x), wanted, rtol=1e-4, atol=1e-5)
        assert len(runs) == 3
        with torch.autocast("cpu", torch.bfloat16):
            assert attn(x).dtype == torch.bfloat16
        assert len(runs) == 4
    attn.cpb_mlp[2].weight.data.mul_(2)
    with prepared(attn), torch.no_grad():
        changed = attn(x)
    assert (changed - wanted).abs().max() > 1e-3
    with prepared(attn):
        attn(x).sum().backward()
    assert attn.cpb_mlp[2].weight.grad is not None


def test_a_compiled_attention_is_one_graph(randomize):
    attn, x = randomize(FusedWindowAttention(12, (4, 4), 3)), torch.randn(4, 16, 12)
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (attn, compiled):
        attn.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in attn.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_batched_gradients_are_those_of_each():
    attention = FusedWindowAttention(32, (4, 4), 2).train()
    out = attention(torch.randn(3, 16, 32))
    parameters, grads = list(attention.parameters()), torch.randn(2, *out.shape)

    def gradients(grad, batched):
        return torch.autograd.grad(
            out, parameters, grad, True, is_grads_batched=batched, allow_unused=True
        )

    each = [gradients(grad, False) for grad in grads]
    for found, *expected in zip(gradients(grads, True), *each, strict=True):
        if found is not None:
            # sums of fewer than 200 products; eps 6e-8
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
