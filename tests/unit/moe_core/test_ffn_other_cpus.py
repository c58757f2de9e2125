"""The experts' kernel as a program of its own: for Arm in qemu's emulator, with AMX's tiles
emulated in C++, and with the sanitizers. Each problem is computed by two numbers of threads."""

import random

import numpy as np
import pytest
import torch
from ffn_cases import MASK_32, random_moe_case, seeded_noise
from kernel_programs import KernelProgram, raw, run_program

from moe_core.ops.backend import KERNEL_ACTIVATIONS
from moe_core.ops.ffn.dropout import Dropout
from moe_core.ops.ffn.inputs import hidden_rows
from moe_core.ops.native.instruction_sets import sets_of_cpu

PROGRAM = KernelProgram("experts.cpp", "ffn.cpp")


def run_case(command: list[str], seed: int, most_tokens: int, dtype: torch.dtype) -> None:
    """A random problem, forward and backward, against plain torch in fp64."""
    draw = random.Random(seed)
    case = random_moe_case(seed, most_tokens).in_dtype(dtype)
    (num_tokens, top_k), ends = case.plan.slots.shape, case.plan.offsets
    num_experts, hidden_dim, model_dim = case.weights.w1.shape
    packed = hidden_dim % 32 == 0 and model_dim % 32 == 0
    in_bf16 = not packed and draw.random() < 0.3
    transposed = not packed and draw.random() < 0.3
    share = draw.choice([0.0, 0.0, 0.4])
    weights = case.weights
    if in_bf16:
        rounded = weights.matrices().map(torch.Tensor.bfloat16)
        case.weights = weights = weights._replace(w1=rounded.w1, w2=rounded.w2, w3=rounded.w3)
    spare = seed % 3  # rows that belong to no expert
    choices = torch.cat([case.plan.choices[: ends[-1]], torch.full((spare,), -1)])
    rule, noise_seed = Dropout.of(share), seed * 12345 & MASK_32
    header = [num_tokens, top_k, num_experts, model_dim, hidden_dim]
    header += [hidden_rows(len(choices), num_experts)]
    header += [KERNEL_ACTIVATIONS.index(case.activation), 1 + seed % 4, len(choices)]
    header += [tensor is not None for tensor in (case.gates, weights.b1, weights.w3)]
    header += [dtype == torch.bfloat16, in_bf16, transposed, packed, noise_seed, rule.threshold]
    problem = np.array(header, np.int64).tobytes() + np.float64(share and rule.scale).tobytes()
    tensors = [t.mT if transposed and t.dim() == 3 else t for t in case.tensors()]
    problem += b"".join(map(raw, (*tensors, choices, ends, case.grad)))
    output = np.frombuffer(run_program(command, problem), np.float32)
    if share:
        noise = seeded_noise(torch.tensor([noise_seed]), num_tokens * top_k, hidden_dim)
        case.factors = (noise >= rule.threshold).double() * rule.scale
    expected, found, start = case.exact(), [], 0
    for tensor in expected[:1] * packed + expected:
        numbers = torch.tensor(output[start : start + tensor.numel()])
        found.append(numbers.view(tensor.shape))
        start += tensor.numel()
    assert start == len(output)
    if packed:
        case.assert_close([found.pop(0)], expected[:1])
    case.assert_close(found, expected)


def run_cases(command: list[str], name: str, count: int, most_tokens: int = 130) -> None:
    """Every second problem is in bf16, where an instruction set has products of it."""
    has_bf16 = name in ("amx", "avx512_bf16", "neon_bf16")
    for seed in range(count):
        run_case(
            command, seed, most_tokens, torch.bfloat16 if has_bf16 and seed % 2 else torch.float32
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["neon", "neon_bf16"])
def test_arm(name, tmp_path):
    run_cases(PROGRAM.on_arm(tmp_path, name), name, 60)


@pytest.mark.slow
def test_amx_with_emulated_tiles(tmp_path):
    run_cases(PROGRAM.with_emulated_tiles(tmp_path), "amx", 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compiling with the sanitizers takes minutes
@pytest.mark.parametrize("name", [known.name for known in sets_of_cpu()])
def test_random_shapes_under_the_sanitizers(name, tmp_path):
    """No access outside of the tensors, whatever their sizes."""
    run_cases(PROGRAM.with_sanitizers(tmp_path, name), name, 400, 1500)
