"""The layer on a CUDA device: `pytest -m gpu`. Skipped, with this reason, where there is none."""

import pytest
import torch
from moe_cases import make_layer, plain_forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    {"model_dim": 64, "hidden_dim": 128, "num_experts": 8},
    {"model_dim": 6, "hidden_dim": 10, "num_experts": 4},  # strides that are no multiple of 16 bytes
]


@pytest.mark.parametrize("capacity_factor", [0.0, 0.5])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_equals_plain_torch(shape, top_k, capacity_factor):
    layer = make_layer(dtype=torch.float32, top_k=top_k, capacity_factor=capacity_factor, **shape).cuda()
    x = torch.randn(200, shape["model_dim"], device="cuda").requires_grad_()
    expected, _ = plain_forward(layer, x)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)  # bf16: 8 bits of mantissa
    torch.testing.assert_close(grad, expected_grad, rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize("capacity_factor", [0.0, 1.25])
def test_a_step_reads_nothing_back(capacity_factor):
    layer = make_layer(dtype=torch.float32, capacity_factor=capacity_factor, top_k=2, **SHAPES[0]).cuda()
    x = torch.randn(200, 64, device="cuda").requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            y, aux_loss = layer(x)
        (y.sum() + aux_loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_replays_from_a_cuda_graph():
    layer = make_layer(dtype=torch.float32, capacity_factor=0.0, **SHAPES[0]).cuda()
    x = torch.randn(200, 64, device="cuda")

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16):
            y, aux_loss = layer(x)
        (y.sum() + aux_loss).backward()
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    with torch.autocast("cuda", torch.bfloat16):
        expected, _ = layer(x)
    torch.testing.assert_close(y, expected)
