"""Window attention on a GPU with other numbers of stages and warps: which is the fastest.

    python benchmarks/attention.py                     (a GPU, under a minute)

A shape is BxNxhxD: windows of the batch, tokens of a window, heads, channels of a head; shifted
windows, in bf16. `in use`: what the model takes. Forward alone and forward and backward, in
interleaved rounds. Registers and shared memory: docs/explanation/performance.md. On a CPU Triton's
interpreter runs the kernels, in float16: a dry run, whose times say nothing.
"""

# B windows, N tokens of a window, h heads, D channels of a head

import argparse
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from results_file import Table, publish
from timing import CALLS_NOTE, timed

from swinv2_moe.measure.spread import median_and_spread, ratios
from swinv2_moe.models import triton_window_attention as kernels
from swinv2_moe.models.window_attention import window_attention

# stages 2, 3 and 4 of SwinV2-B at 192 px and 128 images
SHAPES = ("512x144x8x32", "128x144x16x32", "128x36x32x32")
OPTIONS = [(warps, stages) for stages in (1, 2, 3) for warps in (4, 8)]
IN_USE = "in use"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--shapes", nargs="+", metavar="BxNxhxD", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    return parser.parse_args()


@contextmanager
def options(warps: int, stages: int) -> Iterator[None]:
    """Launch the kernels with these numbers of warps and stages."""
    original = kernels._OPTIONS
    kernels._OPTIONS = {"num_warps": warps, "num_stages": stages}
    try:
        yield
    finally:
        kernels._OPTIONS = original


class Subject:
    """The inputs of one shape."""

    def __init__(self, shape: str, device: str, dtype: torch.dtype) -> None:
        windows, tokens, heads, channels = map(int, shape.split("x"))
        torch.manual_seed(0)
        qkv = torch.randn(windows, tokens, 3, heads, channels, device=device, dtype=dtype)
        self.qkv = qkv.requires_grad_()
        self.bias = torch.randn(heads, tokens, tokens, device=device, requires_grad=True)
        self.mask = torch.zeros(4, tokens, tokens, device=device)
        self.scale = torch.full((heads,), 10.0, device=device, requires_grad=True)

    def forward(self) -> torch.Tensor:
        return window_attention(self.qkv, self.bias, self.mask, self.scale, True)

    def step(self) -> None:
        out = self.forward()
        torch.autograd.grad(out, [self.qkv, self.bias, self.scale], torch.ones_like(out))

    def run(self, warps: int, stages: int, backward: bool) -> None:
        with options(warps, stages):
            if backward:
                self.step()
            else:
                with torch.no_grad():
                    self.forward()


def run_interpreted() -> None:
    """Run this process with Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    importlib.import_module("triton_cases")  # repairs the interpreter


def main() -> None:
    args = arguments()
    dtype = torch.bfloat16
    if args.device == "cpu":
        run_interpreted()
        dtype = torch.float16  # numpy, which the interpreter uses, has no bf16
    rows: list[list[str]] = []
    data: list[dict] = []
    in_use = (kernels._OPTIONS["num_warps"], kernels._OPTIONS["num_stages"])
    names = {choice: f"{choice[0]} warps, {choice[1]} stages" for choice in OPTIONS}
    names[in_use] = f"{names[in_use]} ({IN_USE})"
    for shape in args.shapes:
        subject = Subject(shape, args.device, dtype)
        measured = []
        for backward in (False, True):
            runs = {name: partial(subject.run, *o, backward) for o, name in names.items()}
            measured.append(timed(runs, args.rounds, args.device))
        for name in names.values():
            cells = []
            for times in measured:
                ratio = ratios(times[name], times[names[in_use]])
                cells += [median_and_spread(times[name], 3), median_and_spread(ratio, 3)]
            rows.append([shape, name, *cells])
            times_of_name = [list(times[name]) for times in measured]
            data.append({"shape": shape, "options": name, "ms": times_of_name})
    columns = ["BxNxhxD", "", "forward, ms", "to in use", "forward + backward, ms", "to in use"]
    command = shlex.join(["python", "benchmarks/attention.py", *sys.argv[1:]])
    table = Table("Window attention", command, columns, rows, (CALLS_NOTE,), data)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    main()
