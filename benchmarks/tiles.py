"""The experts on a GPU with other tiles, and by F.grouped_mm: which is the fastest, for each shape.

    python benchmarks/tiles.py                     (a GPU; moe_ffn_triton.tiles has what is in use)

From tokens to tokens in bf16, forward alone and forward and backward, in interleaved rounds. `in
use`: what the layer takes; `F.grouped_mm`: dispatch, torch's grouped products and combine as ops of
their own. `64 rows` and `128 rows` change both tiles. The others replace one tile each, of the
products with an activation (small) or of those without (large): columns x depth, warps, stages.
"""

# T tokens, E experts, K top-k, M model dim

import argparse
import copy
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from layer import SHAPES
from results_file import Table, publish
from torch import Tensor

from moe_core import MoEConfig, MoELayer
from moe_core.ops import combine, dispatch, make_plan
from moe_core.ops.moe_ffn import triton as moe_ffn_triton
from moe_core.ops.moe_ffn.triton import Tile
from moe_core.router import route
from swinv2_moe.measure.rounds import interleaved
from swinv2_moe.measure.spread import median_and_spread, ratios

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
Tiles = tuple[Tile, Tile]  # small, large


def arguments(command: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--shapes", nargs="+", metavar="TxMxE[xK]", default=SHAPES["cuda"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser.parse_args(command)


def alternatives() -> dict[str, Callable[[Tiles], Tiles]]:
    """Functions that change the tiles in use to other tiles, by name."""
    changes: dict[str, Callable[[Tiles], Tiles]] = {"in use": lambda tiles: tiles}
    for rows in (64, 128):
        changes[f"{rows} rows"] = partial(_with_rows, rows)
    for tile in SMALL:
        changes[f"small {_name(tile)}"] = partial(_with_small, tile)
    for tile in LARGE:
        changes[f"large {_name(tile)}"] = partial(_with_large, tile)
    return changes


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


class Subject:
    """The experts of one layer, and the tokens, gate values and plan of one batch."""

    def __init__(self, shape: str, device: str, dtype: torch.dtype) -> None:
        tokens, model_dim, num_experts, *rest = map(int, shape.split("x"))
        top_k = 1
        if rest:
            top_k = rest[0]
        kernels = "triton"
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            kernels = "auto"  # for a dry run, in which tiles have no effect
        config = MoEConfig(
            model_dim,
            4 * model_dim,
            num_experts,
            top_k=top_k,
            capacity_factor=0.0,
            kernels=kernels,
        )
        torch.manual_seed(0)
        layer = MoELayer(config).to(device)
        x = torch.randn(tokens, model_dim, device=device)
        with torch.no_grad():
            routing = route(layer.router(x), config, top_k, training=True)
            self.plan = make_plan(routing.expert_ids, num_experts, None)
        self.x = x.to(dtype).requires_grad_()
        self.gates = routing.gates.requires_grad_()
        self.experts = layer.experts
        # the same parameters, computed by torch's form, which is F.grouped_mm on a GPU in bf16
        self.grouped = copy.copy(layer.experts)
        self.grouped.config = replace(config, kernels="torch")
        self.inputs = [self.x, self.gates, *layer.experts.parameters()]
        self.grad = torch.randn(tokens, model_dim, device=device)

    def fused(self, change: Callable[[Tiles], Tiles]) -> Tensor:
        """Map tokens to tokens in one op, with changed tiles."""
        original = moe_ffn_triton.tiles
        moe_ffn_triton.tiles = lambda *sizes: change(original(*sizes))
        try:
            return self.experts(self.x, self.plan.offsets, gates=self.gates, plan=self.plan)
        finally:
            moe_ffn_triton.tiles = original

    def by_grouped_mm(self) -> Tensor:
        """Map tokens to tokens with separate ops: dispatch, grouped products and combine."""
        rows = dispatch(self.x, self.plan)
        return combine(self.grouped(rows, self.plan.offsets), self.gates, self.plan)

    def step(self, run: Callable[[], Tensor], change: Callable[[Tiles], Tiles] | None) -> None:
        """Forward and backward pass, both with the same tiles."""
        original = moe_ffn_triton.tiles
        if change is not None:
            moe_ffn_triton.tiles = lambda *sizes: change(original(*sizes))
        try:
            torch.autograd.grad(run(), self.inputs, self.grad)
        finally:
            moe_ffn_triton.tiles = original


def measure(shape: str, args: argparse.Namespace) -> tuple[list[list], list[dict], list[str]]:
    """Rows of the table, their times, and the omitted alternatives, for one shape."""
    subject = Subject(shape, args.device, getattr(torch, args.dtype))
    forward_runs: dict[str, Callable] = {}
    steps: dict[str, Callable] = {}
    for name, change in alternatives().items():
        forward_runs[name] = partial(subject.fused, change)
        fused = partial(subject.fused, lambda tiles: tiles)
        steps[name] = partial(subject.step, fused, change)
    forward_runs["F.grouped_mm"] = subject.by_grouped_mm
    steps["F.grouped_mm"] = partial(subject.step, subject.by_grouped_mm, None)
    left_out = []
    for name in list(steps):
        try:
            steps[name]()
        except Exception as problem:  # the tile does not fit on this device
            del steps[name], forward_runs[name]
            reason = f"{type(problem).__name__}: {problem}"
            left_out.append(f"{shape}: {name} is not measured. {reason}")
    with torch.no_grad():
        forward = interleaved(forward_runs, args.rounds)
    both = interleaved(steps, args.rounds)
    table = []
    data = []
    for name in steps:
        cells = []
        for times in (forward, both):
            ratio = ratios(times[name], times["in use"])
            cells += [median_and_spread(times[name], 3), median_and_spread(ratio, 3)]
            data.append({"shape": shape, "tiles": name, "ms": list(times[name])})
        table.append([shape, name, *cells])
    return table, data, left_out


def main(command: Sequence[str] | None = None) -> None:
    args = arguments(command)
    table: list[list] = []
    data: list[dict] = []
    left_out: list[str] = []
    for shape in args.shapes:
        rows, times, missing = measure(shape, args)
        table += rows
        data += times
        left_out += missing
    columns = [
        "TxMxE(xK)",
        "tiles",
        "forward, ms",
        "to those in use",
        "forward + backward, ms",
        "to those in use",
    ]
    if command is None:
        command = sys.argv[1:]
    line = shlex.join(["python", "benchmarks/tiles.py", *command])
    publish(
        Table("Tiles of the experts", line, columns, table, left_out, data),
        args.device,
        args.output,
    )


if __name__ == "__main__":
    main()
