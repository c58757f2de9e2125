"""The experts on a GPU with other tiles, and by F.grouped_mm: which is the fastest, for each shape.

    python benchmarks/tiles.py                     (a GPU; moe_ffn_triton.tiles has what is in use)

From tokens to tokens in bf16, forward alone and forward and backward, in interleaved rounds. `in
use`: what the layer takes; `F.grouped_mm`: dispatch, grouped products and combine as ops of their
own; the others replace one tile each, of the products with an activation (small) or of those
without (large). Rows x columns x depth, warps, stages.
"""

# T tokens, E experts, K top-k, M model dim

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
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
from swinv2_moe.measure.rounds import interleaved, median_and_spread, ratios

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


def arguments(command: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in Triton's interpreter"
    )
    parser.add_argument("--shapes", nargs="+", metavar="TxMxE[xK]", default=SHAPES["cuda"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser.parse_args(command)


def alternatives(rows: int) -> dict[str, tuple[Tile | None, Tile | None]]:
    """Tiles in place of the small and the large one, by name; as many rows as those in use have."""
    found: dict[str, tuple[Tile | None, Tile | None]] = {"in use": (None, None)}
    for i, (kind, tiles) in enumerate((("small", SMALL), ("large", LARGE))):
        for tile in tiles:
            tile = tile._replace(rows=rows)
            name = (
                f"{kind} {tile.rows}x{tile.columns}x{tile.depth}, {tile.warps} warps, {tile.stages}"
                " stages"
            )
            found[name] = (tile, None) if i == 0 else (None, tile)
    return found


def main(command: Sequence[str] | None = None) -> None:
    args = arguments(command)
    in_use, table, data, left_out = moe_ffn_triton.tiles, [], [], []
    for shape in args.shapes:
        tokens, model_dim, num_experts, *rest = map(int, shape.split("x"))
        config = MoEConfig(
            model_dim, 4 * model_dim, num_experts, top_k=rest[0] if rest else 1, capacity_factor=0.0
        )
        torch.manual_seed(0)
        layer = MoELayer(config).to(args.device)
        x = torch.randn(tokens, model_dim, device=args.device)
        with torch.no_grad():
            routing = route(layer.router(x), config, config.top_k, training=True)
            plan = make_plan(routing.expert_ids, num_experts, None)
        x, gates = x.to(getattr(torch, args.dtype)).requires_grad_(), routing.gates.requires_grad_()
        wanted, grad = (
            [x, gates, *layer.experts.parameters()],
            torch.randn(tokens, model_dim, device=args.device),
        )

        def between(
            tiles: tuple[Tile | None, Tile | None], layer=layer, x=x, gates=gates, plan=plan
        ) -> Tensor:
            moe_ffn_triton.tiles = lambda *sizes: tuple(
                new or old for new, old in zip(tiles, in_use(*sizes), strict=True)
            )
            return layer.experts(x, plan.offsets, gates=gates, plan=plan)

        def apart(layer=layer, x=x, gates=gates, plan=plan) -> Tensor:
            return combine(layer.experts(dispatch(x, plan), plan.offsets), gates, plan)

        def step(run: Callable[[], Tensor], wanted=wanted, grad=grad) -> None:
            torch.autograd.grad(run(), wanted, grad)

        rows = 128 if tokens * config.top_k / num_experts > 64 else 64
        runs: dict[str, Callable[[], Tensor]] = {
            n: partial(between, t) for n, t in alternatives(rows).items()
        }
        runs["F.grouped_mm"] = apart
        for name, run in list(runs.items()):
            try:
                step(run)
            except Exception as problem:  # a tile that this device has no room for
                del runs[name]
                left_out.append(
                    f"{shape}: {name} is not measured. {type(problem).__name__}: {problem}"
                )
        with torch.no_grad():
            forward = interleaved(runs, args.rounds)
        both = interleaved({name: partial(step, run) for name, run in runs.items()}, args.rounds)
        for name in runs:
            cells = []
            for times in (forward, both):
                ratio = ratios(times[name], times["in use"])
                cells += [median_and_spread(times[name], 3), median_and_spread(ratio, 3)]
                data.append({"shape": shape, "tiles": name, "ms": list(times[name])})
            table.append([shape, name, *cells])
    moe_ffn_triton.tiles = in_use
    columns = [
        "TxMxE(xK)",
        "tiles",
        "forward, ms",
        "to those in use",
        "forward + backward, ms",
        "to those in use",
    ]
    line = shlex.join(
        ["python", "benchmarks/tiles.py", *(sys.argv[1:] if command is None else command)]
    )
    publish(
        Table("Tiles of the experts", line, columns, table, left_out, data),
        args.device,
        args.output,
    )


if __name__ == "__main__":
    main()
