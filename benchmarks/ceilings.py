"""What this device reaches in plain operations: the ceilings of a MoE layer's parts.

    python benchmarks/ceilings.py                  (a GPU, 15 seconds)

A copy counts the bytes read and written. `a + a` of one element is the host's time of a launch.
Products are those of the layer's experts in bf16, by cuBLAS as one dense product, and by
`F.grouped_mm` with equal loads: M -> H (up), H -> M (down), and the gradient of a weight.
"""

# T tokens, E experts, M model dim, H hidden dim

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed

from swinv2_moe.measure.rounds import matrix_product
from swinv2_moe.measure.spread import median_and_spread

COPIES = {"cuda": 1 << 30, "cpu": 1 << 20}  # bytes
SHAPES = {"cuda": ("18432x512x2048", "73728x512x2048"), "cpu": ("64x16x32",)}  # TxMxH
EXPERTS = (8, 32)


class Ceiling(NamedTuple):
    name: str
    run: Callable[[], object]
    amount: float  # bytes or FLOPs of a call
    unit: str  # of a million millions a second; "": only the time counts


def simple(device: str) -> Iterator[Ceiling]:
    one = torch.ones(1, device=device)
    yield Ceiling("a + a", lambda: one + one, 0, "")
    size = COPIES[device]
    source = torch.ones(size // 4, device=device)
    copy = partial(torch.zeros_like(source).copy_, source)
    yield Ceiling(f"copy of {size >> 20} MiB", copy, 2 * size, "TB/s")
    product, flops = matrix_product(torch.bfloat16, torch.device(device))
    yield Ceiling("large matrix product", product, flops, "TFLOP/s")


def products(shape: str, device: str) -> Iterator[Ceiling]:
    """The three products of an expert's layer, as one dense product and grouped."""
    tokens, model_dim, hidden_dim = map(int, shape.split("x"))

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device).to(torch.bfloat16)

    x, h = random(tokens, model_dim), random(tokens, hidden_dim)
    up, down = random(model_dim, hidden_dim), random(hidden_dim, model_dim)
    flops = 2 * tokens * model_dim * hidden_dim
    calls = {"up": (x, up), "down": (h, down), "weight gradient": (x.t(), h)}
    for name, (a, b) in calls.items():
        yield Ceiling(f"{shape}, dense, {name}", lambda a=a, b=b: a @ b, flops, "TFLOP/s")
    for experts in EXPERTS:
        ends = torch.arange(1, experts + 1, device=device) * (tokens // experts)
        offs = ends.to(torch.int32)
        ups, downs = random(experts, *up.shape), random(experts, *down.shape)
        calls |= {"up": (x, ups), "down": (h, downs)}
        for name, (a, b) in calls.items():
            name = f"{shape}, grouped_mm, E = {experts}, {name}"

            def run(a=a, b=b, offs=offs) -> torch.Tensor:
                return F.grouped_mm(a, b, offs=offs)

            yield Ceiling(name, run, flops, "TFLOP/s")


def ceilings(device: str) -> Iterator[Ceiling]:
    yield from simple(device)
    for shape in SHAPES[device]:
        yield from products(shape, device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=COPIES, default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    command = shlex.join(["python", "benchmarks/ceilings.py", *sys.argv[1:]])
    rows: list[list[str]] = []
    data: list[dict] = []
    notes = [CALLS_NOTE]
    table = Table("Ceilings", command, ["", "us", "reached"], rows, notes, data)
    for name, run, amount, unit in ceilings(args.device):
        try:
            times = timed({name: run}, args.rounds, args.device)[name]
        except RuntimeError as error:  # an operator that this device does not have
            notes.append(f"{name} is not measured. {str(error).partition(chr(10))[0]}")
            continue
        rates = [amount / time / 1e9 for time in times]
        reached = f"{median_and_spread(rates, 2)} {unit}"
        if not unit:
            reached = ""
        rows.append([name, median_and_spread([1e3 * time for time in times], 1), reached])
        data.append({"name": name, "ms": list(times), "amount": amount, "unit": unit})
        keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    main()
