"""Soft dispatch and soft combine against their specification."""

import pytest
import torch
from torch import Tensor

from moe_core.ops.soft import op, reference

# B images, N tokens, S slots, M model dim
SHAPES = [(2, 5, 4, 3), (1, 1, 1, 1), (3, 4, 8, 2), (0, 4, 2, 3)]
OPS = ["soft_dispatch", "soft_combine"]


def inputs(name: str, shape: tuple[int, ...], dtype=torch.float64) -> tuple[Tensor, Tensor]:
    num_images, num_tokens, num_slots, model_dim = shape
    torch.manual_seed(0)
    length = num_tokens if name == "soft_dispatch" else num_slots
    values = torch.randn(num_images, length, model_dim).to(dtype).requires_grad_()
    logits_dtype = torch.promote_types(dtype, torch.float32)
    logits = (3 * torch.randn(num_images, num_tokens, num_slots)).to(logits_dtype)
    return values, logits.requires_grad_()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPS)
def test_equal_to_the_specification(name, shape):
    values, logits = inputs(name, shape)
    out = getattr(op, name)(values, logits)
    expected = getattr(reference, name)(values, logits)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(expected)
    grads = torch.autograd.grad((out * weight).sum(), [values, logits])
    expected_grads = torch.autograd.grad((expected * weight).sum(), [values, logits])
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("name", OPS)
def test_numerical_gradient(name):
    assert torch.autograd.gradcheck(getattr(op, name), inputs(name, (2, 3, 4, 2)))


@pytest.mark.parametrize("name", OPS)
def test_large_logits_neither_overflow_nor_vanish(name):
    values, logits = inputs(name, (1, 4, 4, 3))
    logits = (logits * 1e3).detach().requires_grad_()
    out = getattr(op, name)(values, logits)
    torch.testing.assert_close(out, getattr(reference, name)(values, logits))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [values, logits]))


@pytest.mark.parametrize("name", OPS)
def test_bf16_values_with_fp32_logits(name):
    values, logits = inputs(name, (2, 6, 4, 8), torch.bfloat16)
    out = getattr(op, name)(values, logits)
    assert out.dtype == torch.bfloat16
    exact = getattr(reference, name)(values.double(), logits.double())
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    grad_values, grad_logits = torch.autograd.grad(out.float().sum(), [values, logits])
    assert (grad_values.dtype, grad_logits.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("name", OPS)
def test_op_is_valid_for_compilation_and_autograd(name):
    values, logits = inputs(name, (2, 5, 4, 3))
    if name == "soft_dispatch":
        logits = logits.transpose(1, 2)
    torch.library.opcheck(torch.ops.moe_core.soft_combine.default, (values, logits))


@pytest.mark.parametrize("name", OPS)
def test_keeps_its_inputs_and_no_softmax(name):
    """The backward pass keeps one number per slot or token besides tensors that exist anyway."""
    values, logits = inputs(name, (2, 16, 8, 4))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = getattr(op, name)(values, logits)
    existing = {values.data_ptr(), logits.data_ptr(), out.data_ptr()}
    new_tensors = [tensor for tensor in saved if tensor.data_ptr() not in existing]
    assert sum(tensor.numel() for tensor in new_tensors) in (2 * 8, 2 * 16)
