"""The fused attention against timm's own, and against a plain loop for the released form."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer_v2 import SwinTransformerV2Block, WindowAttention

from moe_core import prepared
from swinv2_moe.models import attention
from swinv2_moe.models.attention import DotProductWindowAttention, FusedWindowAttention
from swinv2_moe.models.window_attention import attention_on_cpu, plain_attention


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
    # of the largest value: the temperature of 100 amplifies rounding
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
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


# The training form on a CPU


def operands(windows, dtype=torch.float64):
    """qkv [windows, 5, 3, 2, 4], bias and scale, which need gradients. A token's query is zero."""
    torch.manual_seed(0)
    qkv = torch.randn(windows, 5, 3, 2, 4, dtype=dtype)
    if windows:
        qkv[0, 0, 0] = 0
    bias, scale = torch.randn(2, 5, 5, dtype=dtype), torch.tensor([0.5, 4.0], dtype=dtype)
    return [tensor.requires_grad_() for tensor in (qkv, bias, scale)]


def results_of(form, inputs, mask, cosine):
    """The output and all gradients, the former's with strides."""
    qkv, bias, scale = inputs
    y = form(qkv, bias, mask, scale, cosine)
    grad = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape[::-1]).permute(2, 1, 0)
    return [y, *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("masks", [0, 3, 6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]
)
def test_the_training_form_equals_plain_torch(cosine, masks, dtype, tolerance):
    """Of 6 windows: 3 masks are those of each image's windows, 6 those of each window."""
    inputs, mask = operands(6, dtype), None
    if masks:
        allowed = torch.rand(masks, 5, 5) < 0.5
        mask = torch.where(allowed | torch.eye(5, dtype=torch.bool), 0.0, -math.inf).to(dtype)
    before = inputs[0].detach().clone()
    found = results_of(attention_on_cpu, inputs, mask, cosine)
    assert torch.equal(inputs[0], before)
    for a, b in zip(found, results_of(plain_attention, inputs, mask, cosine), strict=True):
        assert a.dtype == dtype
        if len(a) == len(before):
            a, b = a[1:], b[1:]  # a zero query's gradient is 1e12 times as large
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


def test_the_training_form_of_no_window_and_of_one_token():
    found = results_of(attention_on_cpu, operands(0), torch.zeros(3, 5, 5).double(), True)
    assert [tensor.shape[0] for tensor in found] == [0, 0, 2, 2]
    assert not found[2].any()
    # its layout is that of the products already
    qkv = torch.randn(1, 1, 3, 2, 4, requires_grad=True)
    before = qkv.detach().clone()
    attention_on_cpu(qkv, torch.zeros(2, 1, 1), None, torch.ones(2), True).sum().backward()
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("cosine", [True, False])
def test_the_training_form_has_second_derivatives(cosine):
    inputs = operands(2)
    with torch.no_grad():
        inputs[0][0, 0, 0] = 1
    mask = torch.randn(2, 5, 5, dtype=torch.float64)

    def function(qkv, bias, scale):
        return attention_on_cpu(qkv, bias, mask, scale, cosine)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_a_compiled_training_form_is_one_graph(randomize):
    attn, x = randomize(FusedWindowAttention(12, (4, 4), 3)), torch.randn(4, 16, 12)
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (attn, compiled):
        attn.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in attn.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_torch_computes_what_is_not_trained(monkeypatch):
    """Inference, dropout of attention weights, and programs that are saved."""
    ways = []
    monkeypatch.setattr(attention, "attention_on_cpu", lambda qkv, *_: ways.append("training"))
    attn, x = FusedWindowAttention(12, (4, 4), 3, attn_drop=0.5), torch.randn(4, 16, 12)
    attn(x)
    attn.eval()
    with torch.no_grad():
        attn(x)
    torch.jit.trace(attn, x)
    torch.export.export(attn, (x,))
    assert ways == []
    with pytest.raises(TypeError):
        attn(x)
    assert ways == ["training"]


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
