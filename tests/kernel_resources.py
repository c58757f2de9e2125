"""Registers, spilled bytes and shared memory of every Triton kernel, compiled without a GPU.

    python tests/kernel_resources.py                  (prints the table)
    python tests/kernel_resources.py --write          (and writes docs/results/kernels.csv)

Shapes are those of SwinV2-MoE-B's third stage: M = 512, H = 2048, windows of 144 tokens. Registers
and the stack are cuobjdump's, from the cubin that ptxas makes. The stack holds the registers that
did not fit, so its bytes are called spilled. `programs` is how many fit on a multiprocessor at a
time, by registers, shared and tensor memory, warps and blocks. It takes a minute and a half. In the
table a cell is registers, spilled bytes, KiB of shared memory, programs.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import argparse
import csv
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
CSV = ROOT / "docs/results/kernels.csv"
M, H = 512, 2048


class Architecture(NamedTuple):
    """Limits of a multiprocessor (CUDA C++ programming guide, compute capabilities)."""

    shared_of_program: int  # bytes
    shared: int  # bytes of a multiprocessor
    registers: int = 65536
    warps: int = 64
    programs: int = 32


ARCHITECTURES = {
    80: Architecture(166912, 167936),
    90: Architecture(232448, 233472),
    100: Architecture(232448, 233472),
}
_SHARED_OF_SYSTEM = 1024  # bytes of shared memory that the system reserves for each program
_REGISTER_UNIT = 256  # the registers of a warp are rounded up to a multiple
_SCHEDULERS = 4  # schedulers of a multiprocessor; each has a quarter of the registers
_TENSOR_MEMORY = 512  # columns of a multiprocessor, from sm_100 on


class Usage(NamedTuple):
    """Resources of one compiled kernel: a row of the table."""

    kernel: str
    case: str
    sm: int
    num_warps: int
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per program
    programs: int  # programs per multiprocessor


# The compiled kernels


class Experts(NamedTuple):
    """A call of the fused experts, which maps tokens to tokens."""

    tokens: int
    experts: int
    dtype: torch.dtype
    dropout: float
    gated: bool = False  # gated experts have silu, others gelu

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        name = f"{dtype}, T = {self.tokens:,}, E = {self.experts}"
        if self.dropout:
            name = f"{name}, dropout"
        if self.gated:
            name = f"{name}, gated"
        return name


EXPERTS = (
    Experts(18432, 8, torch.bfloat16, 0.0),
    Experts(18432, 32, torch.bfloat16, 0.1),
    Experts(4608, 32, torch.bfloat16, 0.1),  # tiles of 64 rows
    Experts(18432, 8, torch.float32, 0.1),
    Experts(18432, 8, torch.bfloat16, 0.0, gated=True),
)


def cases() -> dict[str, Callable[[], None]]:
    """Functions that launch the kernels, by name. Tensors are on the meta device, since only their
    types matter."""
    launches: dict[str, Callable[[], None]] = {}
    for experts in EXPERTS:
        launches[f"{experts.name}, forward"] = partial(_run_experts, experts, False)
        launches[f"{experts.name}, backward"] = partial(_run_experts, experts, True)
    for num_experts in (8, 32):
        launches[f"E = {num_experts}"] = partial(_run_routing, num_experts)
        launches[f"bfloat16, E = {num_experts}, from fp32 tokens"] = partial(
            _run_tokens, num_experts
        )
    launches["bfloat16, K = 2"] = _run_rows
    launches["bfloat16, N = 144, shifted"] = _run_attention
    launches["P = 8, words of 8 bytes, with counts"] = _run_channels
    return launches


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _run_experts(case: Experts, backward: bool) -> None:
    from moe_core.ops import ExpertWeights
    from moe_core.ops.ffn import triton as moe_ffn
    from moe_core.ops.ffn.inputs import MoEFFNInputs

    dtype, num_experts = case.dtype, case.experts
    w, b = _meta(num_experts, H, M), _meta(num_experts, H)
    weights = ExpertWeights(w, b, w, _meta(num_experts, M))
    activation = "gelu"
    if case.gated:
        weights = weights._replace(w3=w, b3=b)
        activation = "silu"
    casts = [None, None, None]
    if dtype != torch.float32:
        cast = w.to(dtype)
        casts = [cast, cast, cast if case.gated else None]
    seed = None
    if case.dropout:
        seed = _meta(1, dtype=torch.int64)
    choices = _meta(case.tokens, dtype=torch.int64)
    inputs = MoEFFNInputs(
        _meta(case.tokens, M, dtype=dtype),
        _meta(case.tokens, 1),  # gates
        *weights,
        *casts,
        choices=choices,
        offsets=_meta(num_experts, dtype=torch.int32),
        slots=choices.unsqueeze(1),
        kept=_meta(case.tokens, 1, dtype=torch.bool),
        seed=seed,
        activation=activation,
        dropout=case.dropout,
        keep_hidden=True,
        kernels="triton",
        form="ffn.triton",
    )
    if backward:
        hidden = _meta(weights.num_kept * case.tokens, H, dtype=dtype)
        needs = [tensor is not None for tensor in (inputs.tokens, inputs.gates, *weights)]
        moe_ffn.backward(inputs, _meta(case.tokens, M), hidden, needs)
    else:
        moe_ffn.forward(inputs)


def _run_routing(num_experts: int) -> None:
    from moe_core.ops.plan import triton as plan

    logits, noise = _meta(18432, num_experts), _meta(18432, num_experts)
    ids = _run_route(logits, None, noise, "load_importance_tutel", num_experts)
    plan.make_plan(ids, num_experts, 23040 // num_experts, None, 18432)


def _run_tokens(num_experts: int) -> None:
    from moe_core.ops.route import loss_triton

    x, weight = _meta(18432, M), _meta(num_experts, M)
    noise = _meta(18432, num_experts)
    _run_route(x, weight, noise, "load_importance", num_experts, torch.bfloat16)
    sums = _meta(2, num_experts)
    value = loss_triton.loss_of_sums(sums, None, 18432, "load_importance")
    loss_triton.loss_of_sums_backward(value, sums, None, 18432, "load_importance")


def _run_route(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    noise: torch.Tensor,
    loss: str,
    num_experts: int,
    cast_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Both passes; returns the expert ids."""
    from moe_core.ops.route import triton as kernels

    stds = (1 / num_experts, 1 / num_experts)
    gates, ids, probs, sums, inputs, logits = kernels.forward(
        x, weight, noise, 1, False, loss, *stds, cast_to
    )
    if cast_to is None:
        inputs = None
    grads = (gates, None, sums, inputs)
    kernels.backward(x, weight, noise, ids, probs, logits, grads, False, loss, *stds)
    return ids


def _run_rows() -> None:
    from moe_core.ops.combine import triton as rows_of

    choices = _meta(36864, dtype=torch.int64)
    slots, kept = choices.view(18432, 2), _meta(18432, 2, dtype=torch.bool)
    tokens, gates = _meta(18432, M, dtype=torch.bfloat16), _meta(18432, 2)
    rows = rows_of.dispatch_rows(tokens, choices, 2)
    grad = rows_of.sum_rows(rows, slots, kept, gates)
    rows_of.combine_rows_backward(grad, rows, gates, choices, slots, kept)


def _run_attention() -> None:
    from swinv2_moe.models import triton_window_attention as attention

    half = torch.bfloat16
    qkv = _meta(512, 144, 3, 16, 32, dtype=half)
    inputs = (qkv, _meta(16, 144, 144, dtype=half), _meta(4, 144, 144, dtype=half), _meta(16))
    out, lse = attention.forward(*inputs, True)
    attention.backward(out, *inputs, out, lse, True)


def _run_channels() -> None:
    from moe_core.comm import triton_channel as channels

    everyone, block = range(8), 2**17
    words, table = _meta(8, block, dtype=torch.int64), _meta(8, dtype=torch.int64)
    flag = _meta(1, dtype=torch.int64)
    piece, rows = (0, block, block), (1024, 128)
    channels.put(words, table, table, table, flag, flag, everyone, (0, 0, 0), piece, rows, True)
    channels.signal(table, everyone, 0)
    channels.wait(table, table, flag, flag, everyone, 10**9)
    channels.read(words, words, table, flag, block, piece, 128)


# The resources of a kernel


def usages(case: str, sm: int) -> list[Usage]:
    """The kernels of a case, compiled for an architecture."""
    return [_usage(name, case, sm, kernel) for name, kernel in _compile(case, sm).items()]


def _compile(case: str, sm: int) -> dict:
    import pytest
    from triton_cases import compile_launches

    from moe_core.ops.ffn import triton as moe_ffn

    def shared_memory(tokens: torch.Tensor) -> int:
        if tokens.dtype == torch.float32:
            return 0
        return ARCHITECTURES[sm].shared_of_program

    with pytest.MonkeyPatch.context() as patch:
        compiled = compile_launches(patch, sm)
        patch.setattr(moe_ffn, "_shared_memory", shared_memory)
        cases()[case]()
    return compiled


def _usage(name: str, case: str, sm: int, kernel) -> Usage:
    registers, stack = _registers_and_stack(kernel.asm["cubin"])
    metadata = kernel.metadata
    tensor_memory = getattr(metadata, "tmem_size", 0)
    programs = programs_that_fit(
        ARCHITECTURES[sm], metadata.num_warps, registers, metadata.shared, tensor_memory
    )
    sizes = (metadata.num_warps, registers, stack, metadata.shared, programs)
    return Usage(name, case, sm, *sizes)


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert match is not None, report
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


def programs_that_fit(
    limits: Architecture, num_warps: int, registers: int, shared: int, tensor_memory: int = 0
) -> int:
    """Number of programs that fit on a multiprocessor at the same time. `tensor_memory` is in
    columns."""
    of_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    warps_of_scheduler = limits.registers // _SCHEDULERS // of_warp
    by_registers = warps_of_scheduler * _SCHEDULERS // num_warps
    by_shared = limits.shared // (shared + _SHARED_OF_SYSTEM)
    programs = min(limits.programs, limits.warps // num_warps, by_registers, by_shared)
    if tensor_memory:
        return min(programs, _TENSOR_MEMORY // tensor_memory)
    return programs


# The table


def markdown(rows: list[Usage]) -> str:
    """A table with a row for each kernel and case. For each architecture it has registers, spilled
    bytes (in bold), KiB of shared memory, and programs."""
    names = sorted({row.sm for row in rows})
    cells: dict[tuple, dict[int, str]] = {}
    for row in rows:
        spilled = str(row.spilled)
        if row.spilled:
            spilled = f"**{row.spilled}**"
        cell = f"{row.registers}, {spilled}, {row.shared / 1024:.0f}, {row.programs}"
        cells.setdefault((row.kernel, row.case, row.num_warps), {})[row.sm] = cell
    head = " | ".join(f"sm_{sm}" for sm in names)
    lines = [f"| kernel | case | warps | {head} |", "|" + " --- |" * (3 + len(names))]
    for (kernel, case, num_warps), of_kernel in cells.items():
        figures = " | ".join(of_kernel.get(sm, "") for sm in names)
        lines.append(f"| `{kernel}` | {case} | {num_warps} | {figures} |")
    return "\n".join(lines)


def write(rows: list[Usage]) -> None:
    import triton

    with CSV.open("w", newline="") as file:
        file.write(f"# triton {triton.__version__}\n")
        file.write("# python tests/kernel_resources.py --write\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Usage._fields)
        writer.writerows(rows)


def read() -> tuple[str, list[Usage]]:
    """Triton's version and the rows of the file."""
    with CSV.open() as file:
        version = file.readline().removeprefix("# triton ").strip()
        file.readline()
        rows = []
        for row in csv.DictReader(file):
            numbers = {name: int(row[name]) for name in Usage._fields[2:]}
            rows.append(Usage(row["kernel"], row["case"], **numbers))
    return version, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sm", nargs="+", type=int, default=list(ARCHITECTURES), metavar="SM")
    parser.add_argument("--write", action="store_true", help="docs/results/kernels.csv, too")
    args = parser.parse_args()
    rows = []
    for case in cases():
        for sm in args.sm:
            rows += usages(case, sm)
    print(markdown(rows))
    if args.write:
        write(rows)


if __name__ == "__main__":
    main()
