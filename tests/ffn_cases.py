"""Inputs of experts, their outcome in plain torch, and comparisons with it, for the tests of
moe_core."""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import random

import torch
import torch.nn.functional as F

from moe_core.ops import ExpertWeights, make_plan, moe_ffn

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
FP64 = (torch.float64, torch.float64)
FP32 = (torch.float32, torch.float32)
BF16 = (torch.bfloat16, torch.bfloat16)
MIXED = (torch.bfloat16, torch.float32)  # rows and weights under autocast
DTYPES = {"fp64": FP64, "fp32": FP32, "bf16": BF16, "mixed": MIXED}
# Of the largest value. fp32 (eps 6e-8): sums of at most 9,000 terms. Halves (eps 5e-4 and 4e-3):
# the rows, each hidden value, its gradient and the result are rounded.
TOLERANCES = {
    torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2,
}  # fmt: skip
# Of the largest value, with tokens in bf16 and sums in fp32. Weights, hidden values and gradients
# of these are rounded, each by at most 2^-9: at most four of them in a term, in sums that cancel to
# half of their terms' size.
BF16_PRODUCTS = 4 * 2**-8
MASK_32 = 2**32 - 1


def ffn_inputs(
    sizes, model_dim=24, hidden_dim=40, dtypes=FP64, bias=True, gated=True, spare=0, seed=0
):
    """rows [N, M], the weights, the rows' ends [E] and a gradient of the output [N, M].

    `sizes`: each expert's number of rows. `spare` more rows belong to no expert; they hold NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, dtype=dtypes[1]):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_experts, num_rows = len(sizes), sum(sizes)
    matrix = (num_experts, hidden_dim, model_dim)
    w1, w3 = random(*matrix) / model_dim**0.5, random(*matrix) / model_dim**0.5
    w2 = random(*matrix) / hidden_dim**0.5
    b1, b2, b3 = random(*matrix[:2]), random(num_experts, model_dim), random(*matrix[:2])
    rows, grad = (random(num_rows + spare, model_dim, dtype=dtypes[0]) for _ in range(2))
    rows[num_rows:], grad[num_rows:] = float("nan"), float("nan")
    weights = ExpertWeights(w1, b1, w2, b2, w3, b3)
    if not gated:
        weights = weights._replace(w3=None, b3=None)
    if not bias:
        weights = weights._replace(b1=None, b2=None, b3=None)
    return rows, weights, torch.tensor(sizes).cumsum(0).int(), grad


def outcome(function, rows, weights, grad) -> list[torch.Tensor]:
    """The output and all gradients of `function(rows, weights)`."""
    rows = rows.detach().requires_grad_()
    weights = weights.map(lambda weight: weight.detach().requires_grad_())
    out = function(rows, weights)
    inputs = [rows, *weights.tensors()]
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype), materialize_grads=True)]


def plain_hidden(activation: str, z, u):
    """The hidden layer of products z and, for gated experts, u."""
    if activation == "clamped_swiglu":
        z, u = z.clamp(max=7), u.clamp(-7, 7)
        return (u + 1) * (z * torch.sigmoid(z * 1.702))
    hidden = ACTIVATIONS[activation](z)
    return hidden if u is None else hidden * u


def plain_experts(rows, weights, ends, activation="silu", kept=None) -> torch.Tensor:
    """The networks in torch's linear layers, expert by expert, of the rows that belong to one.

    kept [N, H]: dropout's factors. `activation`: a name, or a function of z and u.
    """
    parts, start = [], 0
    for e, end in enumerate(ends.tolist()):
        w1, b1, w2, b2, w3, b3 = (None if weight is None else weight[e] for weight in weights)
        x = rows[start:end]
        z, u = F.linear(x, w1, b1), None if w3 is None else F.linear(x, w3, b3)
        hidden = activation(z, u) if callable(activation) else plain_hidden(activation, z, u)
        if kept is not None:
            hidden = hidden * kept[start:end]
        parts.append(F.linear(hidden, w2.T, b2))
        start = end
    return torch.cat(parts)


def by_reference(rows, weights, ends, grad, activation="silu", kept=None) -> list[torch.Tensor]:
    """The outcome of `plain_experts` in fp64, of the rows that belong to an expert."""
    used = int(ends[-1])

    def plain(rows, weights):
        return plain_experts(rows, weights, ends, activation, kept)

    doubles = weights.map(torch.Tensor.double)
    return outcome(plain, rows[:used].double(), doubles, grad[:used].double())


def assert_close(found, expected, dtype, tolerance=None) -> None:
    """Of the output and the gradient of the rows, the rows in `expected` count."""
    tolerance = tolerance or TOLERANCES[dtype]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if i < 2:
            a = a[: len(b)]
        largest = b.abs().max().item() if b.numel() else 0.0
        limit = tolerance * max(largest, 1.0)  # a sum may cancel
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=limit)


class MoECase:
    """Inputs of `moe_ffn` in fp32, or with tokens in bf16, and the gradient of its output.

    skewed: the last experts are chosen by all tokens.
    """

    factors: torch.Tensor | None = None  # of dropout, [T K, H]

    def __init__(
        self, num_tokens=40, num_experts=4, top_k=2, capacity=None, model_dim=24, hidden_dim=40,
        gated=False, bias=True, gates=True, skewed=False, by_priority=False, seed=0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        priority = torch.rand(num_tokens, generator=generator) if by_priority else None
        choices = scores + torch.arange(num_experts) * 10 * skewed
        values, ids = choices.topk(top_k)
        self.plan = make_plan(ids, num_experts, capacity, priority)
        self.gates = values % 10 if gates else None
        sizes = [num_tokens] + [0] * (num_experts - 1)
        inputs = ffn_inputs(sizes, model_dim, hidden_dim, FP32, bias, gated, seed=seed)
        self.tokens, self.weights, _, self.grad = inputs
        self.activation = "silu" if gated else "gelu"

    def in_dtype(self, dtype: torch.dtype) -> "MoECase":
        """With tokens and the gradient of the output in `dtype`."""
        self.tokens, self.grad = self.tokens.to(dtype), self.grad.to(dtype)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """What a call is differentiated in."""
        return [t for t in (self.tokens, self.gates, *self.weights) if t is not None]

    def run(self, tensors, kernels="auto", plan=None, activation="") -> torch.Tensor:
        """The output, of other `tensors`."""
        tokens, *rest = tensors
        gates = None if self.gates is None else rest.pop(0)
        weights = self.weights.with_tensors(rest)
        activation = activation or self.activation
        return moe_ffn(tokens, gates, weights, plan or self.plan, activation, 0.0, kernels)

    def outcome(self, kernels="auto", activation="", dtype=None) -> list[torch.Tensor]:
        """The output and all gradients, with all inputs in `dtype`."""
        tensors = [t.detach().to(dtype or t.dtype, copy=True) for t in self.tensors()]
        tensors = [tensor.requires_grad_() for tensor in tensors]
        out = self.run(tensors, kernels, None, activation)
        grad = self.grad.to(out.dtype)
        return [out, *torch.autograd.grad(out, tensors, grad, materialize_grads=True)]

    def exact(self) -> list[torch.Tensor]:
        """The output and all gradients of torch's linear layers in fp64."""
        tensors = [t.detach().double().requires_grad_() for t in self.tensors()]
        tokens, *rest = tensors
        gates = None if self.gates is None else rest.pop(0)
        choices = self.plan.choices[: self.plan.offsets[-1]]
        token = choices // self.plan.slots.shape[1]
        factors = None if self.factors is None else self.factors[choices]
        weights = self.weights.with_tensors(rest)
        rows = plain_experts(tokens[token], weights, self.plan.offsets, self.activation, factors)
        if gates is not None:
            rows = rows * gates.flatten()[choices].unsqueeze(1)
        out = torch.zeros_like(tokens).index_add(0, token, rows)
        grad = self.grad.double()
        return [out, *torch.autograd.grad(out, tensors, grad, materialize_grads=True)]

    def assert_equals_the_specification(self, kernels="auto", activation="") -> None:
        found = self.outcome(kernels, activation)
        assert all(tensor.isfinite().all() for tensor in found)
        self.assert_close(found, self.outcome("torch", activation, torch.float64))

    def assert_close(self, found, expected) -> None:
        tolerance = BF16_PRODUCTS if self.tokens.dtype == torch.bfloat16 else None
        if self.gates is not None and len(found) > 2:
            # A gate's gradient is a sum over the model dim, which may cancel in all of a few.
            unit = self.tokens.shape[1] ** 0.5
            found, expected = (
                [*tensors[:2], tensors[2] / unit, *tensors[3:]] for tensors in (found, expected)
            )
        assert_close(found, expected, torch.float32, tolerance)


def random_moe_case(seed: int, most_tokens: int = 1500) -> MoECase:
    """Sizes at and beside those of vectors, ranges and parts; sometimes wide ones."""
    draw = random.Random(seed)
    num_experts = draw.choice([1, 2, 3, 5, 8, 16, 33, 128])
    sizes = [0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 700, 1500]
    num_tokens = draw.choice([size for size in sizes if size <= most_tokens])
    model_dim = draw.choice([1, 2, 5, 15, 16, 17, 31, 33, 48, 70, 130])
    hidden_dim = draw.choice([1, 2, 7, 15, 16, 17, 24, 33, 40, 100])
    if draw.random() < 0.03:
        num_tokens, num_experts, model_dim, hidden_dim = min(num_tokens, 33), 2, 4500, 70
    elif draw.random() < 0.2:  # sizes that weights may be packed with
        model_dim, hidden_dim = draw.choice([(32, 32), (64, 96), (96, 32), (32, 160), (1312, 192)])
    top_k = draw.randint(1, min(num_experts, 8))
    capacity = draw.choice([None, None, 0, 1, 3, 50])
    gated, bias, skewed, by_priority = (draw.random() < share for share in (0.5, 0.6, 0.3, 0.5))
    gates = top_k > 1 or capacity is not None or draw.random() < 0.5
    return MoECase(
        num_tokens, num_experts, top_k, capacity, model_dim, hidden_dim, gated, bias, gates,
        skewed, by_priority, seed,
    )  # fmt: skip


def seeded_noise(seed: torch.Tensor, num_rows: int, hidden_dim: int) -> torch.Tensor:
    """The noise, int16 [num_rows, hidden_dim], of a seed: the specification for the kernels.

    A hash of (seed, row) is the state of a row. The noise is the upper half of a hash of the state
    and the column. This takes a tenth of the instructions of Philox (triton.language.rand). Philox
    would take longer than the experts' products (docs/log.md).
    """
    row = torch.arange(num_rows, device=seed.device).unsqueeze(1)
    column = torch.arange(hidden_dim, device=seed.device)
    state = hash_32(hash_32(row) ^ seed)
    noise = hash_32((state + column * 0x9E3779B9) & MASK_32) >> 16
    return (noise - 32768).to(torch.int16)


def hash_32(x: torch.Tensor) -> torch.Tensor:
    """A hash of 32-bit integers, stored in int64: "lowbias32" of C. Wellons' hash-prospector."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)
