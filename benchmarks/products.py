"""The products of an expert network by this project's kernels, by QuACK's, by F.grouped_mm and, as
one dense product, by cuBLAS.

    python benchmarks/products.py                  (a GPU: seven shapes, 100 s)
    python benchmarks/products.py --check          (results against fp64, 40 s)
    ncu python benchmarks/products.py --bare       (the kernels with an activation, twice)

A shape is TxMxE[xK[xH]], as in layer.py. Ours and QuACK's read rows by their indices and compute
bias, activation and what the gates and biases need; QuACK's sums over the rows of a token are
torch's. F.grouped_mm and cuBLAS multiply rows that are sorted already, and do nothing else. Times
are of CUDA graphs over copies of the inputs that together exceed the L2 cache. --check: loads that
grow with the expert's number, two experts without a row, memory that holds NaN before. What is
wrong, cannot run or is not there is named in its row. QuACK's kernels: quack_kernels.py.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from campaign_sections import SEVEN_SHAPES
from layer import completed, shapes_of
from quack_kernels import LIBRARIES, Quack
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from torch import Tensor

from moe_core.ops import make_plan
from moe_core.ops.ffn.inputs import MoEFFNInputs
from moe_core.ops.ffn.triton import _Launches
from moe_core.ops.ffn.triton_kernels import hidden_grad_kernel, hidden_kernel
from swinv2_moe.measure.rounds import capture
from swinv2_moe.measure.spread import median_and_spread

SHAPES = {"cuda": SEVEN_SHAPES, "cpu": "70x64x6x2"}
ROTATED = 128 << 20  # bytes of tokens and a weight; L2 has 50 MB on an H100, 60 on an H200
TOLERANCE = 3e-2  # of 16-bit results, relative to the largest value
UP, DOWN, HIDDEN, TOKENS, W1, W2 = PRODUCTS = (
    "up", "down", "hidden gradient", "token gradient", "gradient of w1", "gradient of w2",
)  # fmt: skip
WITH_ACTIVATION = (UP, HIDDEN)
WAYS = ("ours", "QuACK", "F.grouped_mm", "cuBLAS, dense")

Work = Callable[[], Tensor]


class Inputs:
    """Operands of one shape; rows are sorted by expert.

    Args:
        is_uneven: the loads grow with the number of the expert, and the first and the last have
            none; else every expert is equally likely.
    """

    def __init__(
        self, shape: tuple[int, ...], device: str, dtype: torch.dtype, is_uneven: bool = False
    ) -> None:
        tokens, model_dim, num_experts, top_k, hidden_dim = completed(shape)
        torch.manual_seed(0)

        def random(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(*sizes, device=device).to(kind)

        self.x, self.grad = random(tokens, model_dim), random(tokens, model_dim)
        self.w1, self.w2 = (random(num_experts, hidden_dim, model_dim) / 16 for _ in range(2))
        self.b1 = random(num_experts, hidden_dim, kind=torch.float32)
        self.b2 = random(num_experts, model_dim, kind=torch.float32)
        self.gates = torch.rand(tokens, top_k, device=device)
        odds = torch.ones(num_experts, device=device)
        if is_uneven:
            odds = torch.arange(num_experts, device=device).float()
            odds[-1] = 0
        ids = torch.multinomial(odds.expand(tokens, -1), top_k)  # [T, K]
        self.plan = make_plan(ids, num_experts, None)
        self.token_ids = (self.plan.choices // top_k).int()  # [N], of each row
        self.gate = self.gates.flatten()[self.plan.choices]  # [N]
        self.ends = F.pad(self.plan.offsets, (1, 0))  # [E + 1] int32
        rows, self.dz = len(self.token_ids), random(tokens * top_k, hidden_dim)
        self.z, self.h = random(rows, hidden_dim), random(rows, hidden_dim)
        ids = self.token_ids.long()
        self.rows, self.grad_rows = self.x[ids], self.grad[ids]  # [N, M]

    def flops(self) -> int:
        return 2 * self.z.numel() * self.x.shape[1]


# Each way: from the name of a product to a function that computes it


def ours(inputs: Inputs) -> dict[str, Work]:
    i, plan = inputs, inputs.plan
    weights = (i.w1, i.b1, i.w2, i.b2, None, None, i.w1, i.w2, None)
    where = (plan.choices, plan.offsets, plan.slots, plan.kept, None)
    call = _Launches(
        MoEFFNInputs(i.x, i.gates, *weights, *where, "gelu", 0.0, True, "auto", "triton")
    )

    def up() -> Tensor:
        z, h = torch.empty_like(i.z), torch.empty_like(i.z)
        arguments = (i.x, call.choices, call.blocks, i.w1, i.b1, None, None, None, z, h)
        constants = (call.top_k, call.num_rows, *call.constants)
        call.over_blocks(hidden_kernel, call.for_hidden, call.hidden_dim, arguments, constants)
        return h

    def hidden() -> Tensor:
        grad_z, weighted = torch.empty_like(i.z), torch.empty_like(i.z)
        dots = call.new(True, call.num_rows, -(-call.hidden_dim // call.small.columns))
        sums = call.new(True, 1, call.num_blocks, call.hidden_dim)
        arguments = (i.grad_rows, call.choices, call.blocks, i.w2, i.z, None, i.gates)
        call.over_blocks(
            hidden_grad_kernel, call.small, call.hidden_dim,
            (*arguments, grad_z, weighted, dots, sums),
            (call.num_rows, False, *call.constants), **call.hidden_grad_options,
        )  # fmt: skip
        return grad_z

    return {
        UP: up,
        DOWN: lambda: call.to_tokens([(i.h, i.w2)], i.b2, i.gates, plan.kept),
        HIDDEN: hidden,
        TOKENS: lambda: call.to_tokens([(i.dz, i.w1)], None, None, plan.kept),
        W1: lambda: call.weight_grad(i.dz, i.rows, torch.float32),
        W2: lambda: call.weight_grad(i.h, i.grad_rows, torch.float32),
    }


def grouped(inputs: Inputs) -> dict[str, Work]:
    i, ends = inputs, inputs.plan.offsets
    operands = {
        UP: (i.rows, i.w1.transpose(1, 2)), DOWN: (i.h, i.w2),
        HIDDEN: (i.grad_rows, i.w2.transpose(1, 2)), TOKENS: (i.dz, i.w1),
        W1: (i.dz.t(), i.rows), W2: (i.h.t(), i.grad_rows),
    }  # fmt: skip
    return {name: partial(F.grouped_mm, a, b, offs=ends) for name, (a, b) in operands.items()}


def dense(inputs: Inputs) -> dict[str, Work]:
    i, w1, w2 = inputs, inputs.w1[0], inputs.w2[0]
    operands = {
        UP: (i.rows, w1.t()), DOWN: (i.h, w2), HIDDEN: (i.grad_rows, w2.t()),
        TOKENS: (i.dz, w1), W1: (i.dz.t(), i.rows), W2: (i.h.t(), i.grad_rows),
    }  # fmt: skip
    return {name: partial(torch.mm, a, b) for name, (a, b) in operands.items()}


@torch.no_grad()
def reference(inputs: Inputs) -> dict[str, Tensor]:
    """The results in fp64."""
    i, ids = inputs, inputs.token_ids.long()
    found = {name: [] for name in PRODUCTS}
    for e, (start, end) in enumerate(zip(i.ends[:-1].tolist(), i.ends[1:].tolist(), strict=True)):
        rows = slice(start, end)
        w1, w2 = i.w1[e].double(), i.w2[e].double()
        x, grad, z = i.rows[rows].double(), i.grad_rows[rows].double(), i.z[rows].double()
        cdf = 0.5 * (1 + torch.erf(z / 2**0.5))
        slope = cdf + z * torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
        found[UP].append(F.gelu(x @ w1.t() + i.b1[e].double()))
        found[DOWN].append(i.h[rows].double() @ w2 + i.b2[e].double())
        found[HIDDEN].append(grad @ w2.t() * i.gate[rows].double().unsqueeze(1) * slope)
        found[TOKENS].append(i.dz[rows].double() @ w1)
        found[W1].append(i.dz[rows].double().t() @ x)
        found[W2].append(i.h[rows].double().t() @ grad)
    results = {name: torch.cat(found[name]) for name in (UP, HIDDEN)}
    results |= {name: torch.stack(found[name]) for name in (W1, W2)}
    for name in (DOWN, TOKENS):
        rows = torch.cat(found[name])
        weighted = rows * i.gate.double().unsqueeze(1) if name == DOWN else rows
        results[name] = torch.zeros_like(i.x, dtype=torch.float64).index_add(0, ids, weighted)
    return results


def ways(inputs: Inputs, quack: Quack) -> Iterator[tuple[str, dict[str, Work] | str]]:
    """Each way with its products, or the reason why there are none."""
    makers = (ours, quack.products, grouped, dense)
    for name, make in zip(WAYS, makers, strict=True):
        try:
            yield name, make(inputs)
        except Exception as error:  # of another library, or of a kernel that does not compile
            yield name, reason(error)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]


def checked(inputs: Inputs, quack: Quack) -> Iterator[list[str]]:
    """The largest error of each product of ours and of QuACK's, relative to the largest value."""
    expected = reference(inputs)
    for way, products in ways(inputs, quack):
        if isinstance(products, str):
            yield [way, "all", products]
            continue
        for name, work in products.items():
            if way == WAYS[3] or (way == WAYS[2] and name not in (W1, W2)):
                continue  # without bias, activation and gates
            try:
                difference = (work().double() - expected[name]).abs().max()
                error = (difference / expected[name].abs().max()).item()
                verdict = "right" if error < TOLERANCE else "WRONG"
                yield [way, name, f"{verdict}: {error:.1e}"]
            except Exception as problem:
                yield [way, name, reason(problem)]


def times_of(
    shape: tuple[int, ...], args, quack: Quack, notes: dict[str, str]
) -> Iterator[tuple[list[str], dict]]:
    """A row for each product: microseconds and TFLOP/s of each way. What is not there is noted."""
    first = Inputs(shape, args.device, args.dtype)
    copies = [first]
    if args.device == "cuda":
        once = first.x.nbytes + first.w1.nbytes
        while len(copies) < max(2, ROTATED / once):
            copies.append(Inputs(shape, args.device, args.dtype))
    found = [dict(ways(inputs, quack)) for inputs in copies]
    for name in PRODUCTS:
        cells, ms = [], {}
        for way in WAYS:
            if isinstance(found[0][way], str):
                cells.append("-")  # a note has the reason
                notes[way] = f"{way} is not measured. {found[0][way]}"
                continue
            try:
                works = [products[way][name] for products in found]
                run = partial(run_all, works)
                if args.device == "cuda":
                    run = capture(run)
                times = timed({name: run}, args.rounds, args.device)[name]
                ms[way] = [time / len(works) for time in times]
                rates = [first.flops() / time / 1e9 for time in ms[way]]
                us = median_and_spread([1e3 * time for time in ms[way]], 1)
                cells.append(f"{us}; {sorted(rates)[len(rates) // 2]:.0f}")
            except Exception as error:
                cells.append(reason(error))
        label = "x".join(map(str, shape))
        yield [label, name, *cells], {"shape": shape, "product": name, "ms": ms}


def run_all(works: list[Work]) -> None:
    for work in works:
        work()


def run_interpreted() -> None:
    """Run this process with Triton's interpreter, for the kernels on a CPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    __import__("triton_cases")  # repairs the interpreter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SHAPES, default="cuda", help="cpu: a dry run")
    parser.add_argument("--shapes", nargs="+", metavar="TxMxE[xK[xH]]")
    parser.add_argument("--check", action="store_true", help="compare with fp64")
    parser.add_argument("--bare", action="store_true", help="run the kernels twice, and end")
    parser.add_argument("--libraries", type=Path, default=LIBRARIES, help="of QuACK's kernels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    args.dtype = torch.bfloat16
    if args.device == "cpu":
        args.dtype = torch.float16  # numpy, which the interpreter uses, has no bf16
        run_interpreted()
    quack = Quack(args.libraries)
    reasons: dict[str, str] = {}
    columns = ["TxMxE(xK(xH))", "product", *(f"{way}, us; TFLOP/s" for way in WAYS)]
    if args.check:  # then torch fills what is allocated with NaN
        torch.use_deterministic_algorithms(True, warn_only=True)
        columns = ["TxMxE(xK(xH))", "", "product", "largest error, to the largest value"]
    rows: list[list[str]] = []
    data: list[dict] = []
    command = shlex.join(["python", "benchmarks/products.py", *sys.argv[1:]])
    title = "Products against fp64" if args.check else "Products"
    for shape in shapes_of(args.shapes or SHAPES[args.device].split()):
        if args.bare:
            bare(Inputs(shape, args.device, args.dtype), quack)
            continue
        if args.check:
            cases = checked(Inputs(shape, args.device, args.dtype, is_uneven=True), quack)
            entries = ((["x".join(map(str, shape)), *row], {"row": row}) for row in cases)
        else:
            entries = times_of(shape, args, quack, reasons)
        for row, numbers in entries:
            rows.append(row)
            data.append(numbers)
            print(" | ".join(row), file=sys.stderr, flush=True)
            notes = [quack.note, *reasons.values(), CALLS_NOTE]
            table = Table(title, command, columns, rows, notes, data)
            keep(table, args.device, args.output)
    if not args.bare:
        publish(table, args.device, args.output)
    if any("WRONG" in row[-1] for row in rows):
        sys.exit("a product is wrong: see its row")


def bare(inputs: Inputs, quack: Quack) -> None:
    """Run ours and QuACK's kernels with an activation twice, for other profilers."""
    for way, products in dict(ways(inputs, quack)).items():
        if way not in WAYS[:2]:
            continue
        if isinstance(products, str):
            print(f"{way}: {products}")
            continue
        for name in WITH_ACTIVATION:
            run_all([products[name]] * 2)
            print(f"{way}, {name}", flush=True)


if __name__ == "__main__":
    main()
