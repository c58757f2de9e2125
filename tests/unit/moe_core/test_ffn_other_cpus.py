"""The experts' kernels as a program of their own: for Arm in qemu's emulator, with AMX's tiles
emulated in C++, and with the address sanitizer."""

import numpy as np
import pytest
import torch
from ffn_cases import plain_experts, random_moe_case
from kernel_programs import KernelProgram, raw, run_program

from moe_core.ops import ExpertWeights
from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.ffn.inputs import hidden_rows
from moe_core.ops.native.instruction_sets import sets_of_cpu

PROGRAM = KernelProgram("experts.cpp", "ffn.cpp")
FUSED = KernelProgram("moe_experts.cpp", "moe_ffn.cpp")
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2}  # of the largest value


def run_case(
    command: list[str], generator: np.random.Generator, dtypes, packed: bool, gated: bool
) -> None:
    """A random problem, forward and backward, against plain products in fp64."""
    dtype, weight_dtype = dtypes
    sizes = generator.integers(0, 45, generator.integers(1, 5)).tolist()
    sizes[0] += 1  # the kernels are not called without rows
    model_dim, hidden_dim = generator.integers(1, 75, 2).tolist()
    if packed:
        model_dim, hidden_dim = 32, 64
    experts, num_rows = len(sizes), sum(sizes)
    activation = int(generator.integers(3 + gated))
    layout = 0 if packed else int(generator.integers(3))
    if dtype == torch.bfloat16 and KERNEL_ACTIVATIONS[activation] == "relu":
        activation = 0  # a sum near 0 may round to the other side, where relu's slope differs
    threads = int(generator.integers(1, 4))

    def random(*shape: int) -> torch.Tensor:
        return torch.tensor(generator.random(shape, np.float32) * 2 - 1)

    rows, grad = random(num_rows, model_dim).to(dtype), random(num_rows, model_dim).to(dtype)
    w1 = (random(experts, hidden_dim, model_dim) / model_dim**0.5).to(weight_dtype)
    w2 = (random(experts, hidden_dim, model_dim) / hidden_dim**0.5).to(weight_dtype)
    w3 = (random(experts, hidden_dim, model_dim) / model_dim**0.5).to(weight_dtype)
    b1, b2 = random(experts, hidden_dim), random(experts, model_dim)
    b3 = random(experts, hidden_dim)
    ends = torch.tensor(sizes).cumsum(0).int()
    header = [experts, num_rows, model_dim, hidden_dim, activation]
    header += [dtype == torch.bfloat16, weight_dtype == torch.bfloat16, threads, packed]
    header += [gated, layout]
    if layout == 0:
        tensors = [rows, w1, b1, w2, b2]
    elif layout == 1:
        tensors = [rows, torch.stack([w1, w3], 1), b1, w2.mT, b2]
    else:
        tensors = [rows, torch.stack([w1.mT, w3.mT], 3), b1, w2.mT, b2]
    if gated:
        tensors += [b3] if layout else [w3, b3]
    problem = np.array(header, np.int64).tobytes()
    problem += b"".join(map(raw, (*tensors, ends, grad)))
    output = run_program(command, problem)
    used_weights = (rows, w1, b1, w2, b2, w3, b3) if gated else (rows, w1, b1, w2, b2)
    leaves = [t.double().requires_grad_() for t in used_weights]
    out = plain_experts(leaves[0], ExpertWeights(*leaves[1:]), ends, KERNEL_ACTIVATIONS[activation])
    by_rows, by_w1, by_b1, by_w2, by_b2, *by_gate = torch.autograd.grad(out, leaves, grad.double())
    if layout > 0:
        by_w2 = by_w2.mT
    if layout == 2:
        by_w1 = by_w1.mT
        by_gate = [gradient.mT if gradient.dim() == 3 else gradient for gradient in by_gate]
    expected = [(out, dtype)] * (1 + packed)
    expected += [(by_rows, dtype), (by_w1, weight_dtype), (by_w2, weight_dtype)]
    expected += [(by_b1, torch.float32), (by_b2, torch.float32)]
    expected += list(zip(by_gate, (weight_dtype, torch.float32), strict=False))
    used = torch.tensor(sizes) > 0  # what belongs to no row is left to Python
    start = 0
    for number, (wanted, kind) in enumerate(expected):
        size = wanted.numel() * kind.itemsize
        found = torch.frombuffer(bytearray(output[start : start + size]), dtype=kind)
        found, wanted = found.view(wanted.shape).double(), wanted.detach()
        if wanted.shape[0] == experts and number > 1 + packed:
            found, wanted = found[used], wanted[used]
        limit = TOLERANCES[dtype] * max(float(wanted.abs().max()), 1.0)
        assert float((found - wanted).abs().max()) <= limit, (number, header, sizes)
        start += size
    assert start == len(output)


def run_cases(command: list[str], count: int) -> None:
    generator = np.random.default_rng(0)
    for number in range(count):
        packed = number % 5 == 4
        dtypes = DTYPES[number % (2 if packed else 3)]
        run_case(command, generator, dtypes, packed, gated=number % 2 == 1)


def run_moe_case(command: list[str], seed: int, most_tokens: int, dtype: torch.dtype) -> None:
    """A random problem from tokens to tokens, forward and backward, against plain torch in fp64."""
    case = random_moe_case(seed, most_tokens).in_dtype(dtype)
    (num_tokens, top_k), ends = case.plan.slots.shape, case.plan.offsets
    num_experts, hidden_dim, model_dim = case.weights.w1.shape
    spare = seed % 3  # rows that belong to no expert
    choices = torch.cat([case.plan.choices[: ends[-1]], torch.full((spare,), -1)])
    header = [num_tokens, top_k, num_experts, model_dim, hidden_dim]
    header += [hidden_rows(len(choices), num_experts)]
    header += [KERNEL_ACTIVATIONS.index(case.activation), 1 + seed % 4, len(choices)]
    weights = case.weights
    header += [tensor is not None for tensor in (case.gates, weights.b1, weights.w3)]
    header.append(dtype == torch.bfloat16)
    problem = np.array(header, np.int64).tobytes()
    problem += b"".join(map(raw, (*case.tensors(), choices, ends, case.grad)))
    output = np.frombuffer(run_program(command, problem), np.float32)
    expected, found, start = case.outcome("torch", dtype=torch.float64), [], 0
    for tensor in expected:
        numbers = torch.tensor(output[start : start + tensor.numel()])
        found.append(numbers.view(tensor.shape))
        start += tensor.numel()
    assert start == len(output)
    case.assert_close(found, expected)


def dtype_of(instructions: str, seed: int) -> torch.dtype:
    """Every second problem is in bf16, where an instruction set has products of it."""
    has_bf16 = instructions in ("amx", "avx512_bf16", "neon_bf16")
    return torch.bfloat16 if has_bf16 and seed % 2 else torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neon", "neon_bf16"])
def test_arm(name, tmp_path):
    run_cases(PROGRAM.on_arm(tmp_path, name), 60)
    fused = FUSED.on_arm(tmp_path, name)
    for seed in range(60):
        run_moe_case(fused, seed, 130, dtype_of(name, seed))


@pytest.mark.slow
def test_amx_with_emulated_tiles(tmp_path):
    run_cases(PROGRAM.with_emulated_tiles(tmp_path), 60)
    fused = FUSED.with_emulated_tiles(tmp_path)
    for seed in range(60):
        run_moe_case(fused, seed, 130, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling with the sanitizers takes minutes
@pytest.mark.parametrize("name", [known.name for known in sets_of_cpu()])
def test_random_shapes_under_the_sanitizers(name, tmp_path):
    """No access outside of the tensors, whatever their sizes."""
    run_cases(PROGRAM.with_sanitizers(tmp_path, name), 2000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [known.name for known in sets_of_cpu()])
def test_random_shapes_from_tokens_to_tokens_under_the_sanitizers(name, tmp_path):
    command = FUSED.with_sanitizers(tmp_path, name)
    for seed in range(2000):
        run_moe_case(command, seed, 1500, dtype_of(name, seed))
