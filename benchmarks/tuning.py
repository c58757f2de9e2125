"""Triton kernels on a GPU with other tiles, warps and stages: which is the fastest, for each shape.

    python benchmarks/tuning.py experts            (a GPU; ops/ffn/triton.py's tiles are in use)
    python benchmarks/tuning.py attention          (a GPU, under a minute)

Forward alone and forward and backward, in bf16, as CUDA graphs and in interleaved rounds. `in use`:
what the model takes. On a CPU it is a dry run in float16, whose times say nothing.

experts: from tokens to tokens, a shape is TxMxE[xK]. `F.grouped_mm`: dispatch, torch's grouped
products and combine as ops of their own. `64 rows` and `128 rows` change both tiles. The others
replace one tile each, of the products with an activation (small) or of those without (large):
columns x depth, warps, stages.

attention: shifted windows, a shape is BxNxhxD: windows of the batch, tokens of a window, heads,
channels of a head. Registers and shared memory: docs/log.md.
"""

# T tokens, E experts, K top-k, M model dim; B windows, N tokens of a window, h heads, D channels of
# a head

import argparse
import copy
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from ahead import compile_in_another_process, compile_works
from layer import SHAPES
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from torch import Tensor

from moe_core import MoEConfig, MoELayer
from moe_core.ops import combine, dispatch, make_plan
from moe_core.ops.ffn import triton as ffn_triton
from moe_core.ops.ffn.triton import Tile
from moe_core.routing import route_by_tokens
from swinv2_moe.measure.rounds import capture
from swinv2_moe.measure.spread import median_and_spread, ratios
from swinv2_moe.models import triton_window_attention
from swinv2_moe.models.window_attention import window_attention

IN_USE = "in use"
# alternatives to the tiles in use; their rows are replaced by those of the tiles in use
SMALL = (
    Tile(128, 128, 64, 4, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 256, 64, 8, 3),
)
LARGE = (
    Tile(128, 128, 64, 4, 3),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 256, 32, 8, 4),
)
# stages 2, 3 and 4 of SwinV2-B at 192 px and 128 images
WINDOWS = ("512x144x8x32", "128x144x16x32", "128x36x32x32")
OPTIONS = [(warps, stages) for stages in (1, 2, 3) for warps in (4, 8)]

Tiles = tuple[Tile, Tile]  # small, large
Context = Callable[[], AbstractContextManager]  # in which a kernel runs in another way


@dataclass
class Subject:
    """The computation of one shape, its differentiable inputs and the gradient of its output."""

    run: Callable[[], Tensor]
    inputs: list[Tensor]
    grad: Tensor
    contexts: dict[str, Context]  # of each alternative
    others: dict[str, Callable[[], Tensor]]  # alternatives that compute with other operators

    def names(self) -> list[str]:
        return [*self.contexts, *self.others]

    def forward(self, name: str) -> None:
        with self.contexts.get(name, nullcontext)(), torch.no_grad():
            self.others.get(name, self.run)()

    def step(self, name: str) -> None:
        with self.contexts.get(name, nullcontext)():
            out = self.others.get(name, self.run)()
            torch.autograd.grad(out, self.inputs, self.grad.to(out.dtype))


# Experts


def experts(shape: str, device: str, dtype: torch.dtype) -> Subject:
    """The experts of one layer, and the tokens, gate values and plan of one batch."""
    tokens, model_dim, num_experts, *rest = map(int, shape.split("x"))
    top_k = rest[0] if rest else 1
    kernels = "triton"
    if device == "cpu":
        kernels = "auto"  # for a dry run, in which tiles have no effect
    config = MoEConfig(
        model_dim, 4 * model_dim, num_experts, top_k=top_k, capacity_factor=0.0, kernels=kernels
    )
    layer = MoELayer(config).to(device)
    x = torch.randn(tokens, model_dim, device=device)
    with torch.no_grad():
        routing = route_by_tokens(layer.router(x), config, top_k, training=True)
        plan = make_plan(routing.expert_ids, num_experts, None)
    x, gates = x.to(dtype).requires_grad_(), routing.gates.requires_grad_()
    # the same parameters, computed by torch's form, which is F.grouped_mm on a GPU in bf16
    grouped = copy.copy(layer.experts)
    grouped.config = replace(config, kernels="torch")

    def by_grouped_mm() -> Tensor:
        return combine(grouped(dispatch(x, plan), plan.offsets), gates, plan)

    return Subject(
        lambda: layer.experts(x, plan.offsets, gates=gates, plan=plan),
        [x, gates, *layer.experts.parameters()],
        torch.randn(tokens, model_dim, device=device),
        {name: partial(changed_tiles, change) for name, change in tile_changes().items()},
        {"F.grouped_mm": by_grouped_mm},
    )


def tile_changes() -> dict[str, Callable[[Tiles], Tiles]]:
    """Functions that change the tiles in use to other tiles, by name."""
    changes: dict[str, Callable[[Tiles], Tiles]] = {IN_USE: lambda tiles: tiles}
    for rows in (64, 128):
        changes[f"{rows} rows"] = partial(_with_rows, rows)
    for tile in SMALL:
        changes[f"small {_name(tile)}"] = partial(_with_small, tile)
    for tile in LARGE:
        changes[f"large {_name(tile)}"] = partial(_with_large, tile)
    return changes


def changed_tiles(change: Callable[[Tiles], Tiles]) -> AbstractContextManager:
    original = ffn_triton.tiles
    return mock.patch.object(ffn_triton, "tiles", lambda *sizes: change(original(*sizes)))


def _with_rows(rows: int, tiles: Tiles) -> Tiles:
    small, large = tiles
    return small._replace(rows=rows), large._replace(rows=rows)


def _with_small(tile: Tile, tiles: Tiles) -> Tiles:
    small, large = tiles
    return tile._replace(rows=small.rows), large


def _with_large(tile: Tile, tiles: Tiles) -> Tiles:
    small, large = tiles
    return small, tile._replace(rows=large.rows)


def _name(tile: Tile) -> str:
    return f"{tile.columns}x{tile.depth}, {tile.warps} warps, {tile.stages} stages"


# Window attention


def attention(shape: str, device: str, dtype: torch.dtype) -> Subject:
    windows, tokens, heads, channels = map(int, shape.split("x"))
    qkv = torch.randn(windows, tokens, 3, heads, channels, device=device, dtype=dtype)
    qkv = qkv.requires_grad_()
    bias = torch.randn(heads, tokens, tokens, device=device, requires_grad=True)
    mask = torch.zeros(4, tokens, tokens, device=device)
    scale = torch.full((heads,), 10.0, device=device, requires_grad=True)
    contexts = {}
    for warps, stages in OPTIONS:
        name, options = (
            f"{warps} warps, {stages} stages",
            {"num_warps": warps, "num_stages": stages},
        )
        if options == triton_window_attention._OPTIONS:
            name = f"{IN_USE}: {name}"
        contexts[name] = partial(mock.patch.object, triton_window_attention, "_OPTIONS", options)
    grad = torch.ones(windows, tokens, heads * channels, device=device, dtype=dtype)
    return Subject(
        lambda: window_attention(qkv, bias, mask, scale, True),
        [qkv, bias, scale],
        grad,
        contexts,
        {},
    )


def run_interpreted() -> None:
    """Run this process with Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    importlib.import_module("triton_cases")  # repairs the interpreter


# The table


def measure(subject: Subject, shape: str, rounds: int, device: str) -> tuple[list, list, list]:
    """Rows of the table, their times, and the omitted alternatives, for one shape."""
    left_out, calls = [], {}
    for name in subject.names():
        works = [partial(subject.forward, name), partial(subject.step, name)]
        try:
            if device == "cuda":
                works = [capture(work) for work in works]
            works[1]()
        except Exception as problem:  # the tile does not fit on this device
            reason = f"{type(problem).__name__}: {problem}"
            left_out.append(f"{shape}: {name} is not measured. {reason}")
        else:
            calls[name] = works
    names = list(calls)
    measured = [
        timed({name: works[i] for name, works in calls.items()}, rounds, device) for i in (0, 1)
    ]
    in_use = next(name for name in names if name.startswith(IN_USE))
    rows, data = [], []
    for name in names:
        cells = []
        for times in measured:
            ratio = ratios(times[name], times[in_use])
            cells += [median_and_spread(times[name], 3), median_and_spread(ratio, 3)]
        rows.append([shape, name, *cells])
        ms = [list(times[name]) for times in measured]
        data.append({"shape": shape, "options": name, "ms": ms})
    return rows, data, left_out


def works(subjects: Iterable[Subject]) -> Iterator[Callable[[], None]]:
    """Each pass of each alternative."""
    for subject in subjects:
        for name in subject.names():
            yield partial(subject.forward, name)
            yield partial(subject.step, name)


SUBJECTS = {
    "experts": ("Tiles of the experts", "TxMxE(xK)", SHAPES["cuda"], experts),
    "attention": ("Window attention", "BxNxhxD", WINDOWS, attention),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=SUBJECTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--shapes", nargs="+", metavar="SIZExSIZE...")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    parser.add_argument("--compile", action="store_true", help="compile all kernels, and end")
    args = parser.parse_args()
    title, sizes, shapes, make = SUBJECTS[args.what]
    dtype = torch.bfloat16
    if args.device == "cpu":
        dtype = torch.float16  # numpy, which the interpreter uses, has no bf16
        if args.what == "attention":
            run_interpreted()
    if args.compile:
        compile_works(works(make(shape, args.device, dtype) for shape in args.shapes or shapes))
        return
    if args.device == "cuda":
        compile_in_another_process()
    rows, data, notes = [], [], [CALLS_NOTE]
    columns = [sizes, "", "forward, ms", "to in use", "forward + backward, ms", "to in use"]
    command = shlex.join(["python", "benchmarks/tuning.py", *sys.argv[1:]])
    table = Table(title, command, columns, rows, notes, data)
    for shape in args.shapes or shapes:
        torch.manual_seed(0)
        subject = make(shape, args.device, dtype)
        found = measure(subject, shape, args.rounds, args.device)
        for kept, more in zip((rows, data, notes), found, strict=True):
            kept += more
        keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    main()
