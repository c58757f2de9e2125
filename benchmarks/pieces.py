"""What the parts of one MoE layer cost: router, plan, dispatch, experts, combine, each forward and
with its backward.

    python benchmarks/pieces.py                    (about a minute on two cores)

Each part gets what the one before it gave and is timed alone, beside the whole layer in the same
interleaved rounds; the shapes are those of layer.py. A part without a backward pass (the plan)
costs the same in both columns.
"""

# T tokens, E experts, K top-k, N rows, M model dim

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from layer import SHAPES
from results_file import Table, publish
from torch import Tensor

from moe_core import MoEConfig, MoELayer
from moe_core.ops import combine, dispatch, make_plan
from moe_core.precision import without_autocast
from moe_core.router import route
from swinv2_moe.measure.rounds import interleaved, median_and_spread, ratios


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--shapes", nargs="+", metavar="TxMxE[xK]", default=["4608x512x8", "1152x1024x32"]
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser.parse_args()


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def pieces(
    layer: MoELayer, x: Tensor, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """For each part a call that gives its differentiable output, and what the gradient is taken
    of."""
    config, tokens = layer.config, leaf(x.to(dtype))

    def router(x: Tensor) -> Tensor:
        with without_autocast(x):  # as in the layer
            routing = route(layer.router(x), config, config.top_k, training=True)
        return routing.gates.sum() + routing.aux_loss

    with torch.no_grad():
        routing = route(layer.router(x), config, config.top_k, training=True)
        ids = routing.expert_ids
        plan = make_plan(ids, config.num_experts, None)
    rows, gates = leaf(dispatch(tokens, plan)), leaf(routing.gates)
    weights = list(layer.experts.parameters())
    parts = {
        "router": (partial(router, x), [x, layer.router.weight]),
        "plan": (lambda: make_plan(ids, config.num_experts, None).choices, []),
        "dispatch": (lambda: dispatch(tokens, plan), [tokens]),
        "experts": (lambda: layer.experts(rows, plan.offsets), [rows, *weights]),
        "combine": (lambda: combine(rows, gates, plan), [rows, gates]),
        # In place of the three before. On a CPU these are three ops, too.
        "dispatch to combine as one": (
            lambda: layer.experts(tokens, plan.offsets, gates=gates, plan=plan),
            [tokens, gates, *weights],
        ),
        "the whole layer": (lambda: layer(x)[0], [x, *layer.parameters()]),
    }
    return parts


def main() -> None:
    args = arguments()
    table, data = [], []
    for shape in args.shapes:
        tokens, model_dim, num_experts, *rest = map(int, shape.split("x"))
        top_k = rest[0] if rest else 1
        config = MoEConfig(model_dim, 4 * model_dim, num_experts, top_k=top_k, capacity_factor=0.0)
        for dtype in args.dtypes:
            torch.manual_seed(0)
            layer, x = (
                MoELayer(config).to(args.device),
                torch.randn(tokens, model_dim, device=args.device),
            )
            parts = pieces(layer, leaf(x), getattr(torch, dtype))

            def step(
                call: Callable[[], Tensor],
                wanted: list[Tensor],
                dtype: str = dtype,
                grads: dict = {},  # noqa: B006 - one for all calls
            ) -> None:
                with torch.autocast(args.device, torch.bfloat16, enabled=dtype == "bfloat16"):
                    out = call()
                if wanted:
                    # drawing it takes longer than some parts
                    if (key := (out.shape, out.dtype)) not in grads:
                        grads[key] = torch.randn_like(out)
                    torch.autograd.grad(out, wanted, grads[key], allow_unused=True)

            @torch.no_grad()
            def forward(call: Callable[[], Tensor], dtype: str = dtype) -> None:
                with torch.autocast(args.device, torch.bfloat16, enabled=dtype == "bfloat16"):
                    call()

            forwards = interleaved(
                {name: partial(forward, call) for name, (call, _) in parts.items()}, args.rounds
            )
            steps = interleaved(
                {name: partial(step, *part) for name, part in parts.items()}, args.rounds
            )
            for name in parts:
                cells = []
                for times in (forwards, steps):
                    share = ratios(times[name], times["the whole layer"])
                    cells += [median_and_spread(times[name], 2), median_and_spread(share, 3)]
                    data.append(
                        {"shape": shape, "dtype": dtype, "part": name, "ms": list(times[name])}
                    )
                table.append([f"{shape}, {dtype}", name, *cells])
    columns = [
        "TxMxE(xK), dtype",
        "part",
        "forward, ms",
        "of the layer",
        "forward + backward, ms",
        "of the layer",
    ]
    command = shlex.join(["python", "benchmarks/pieces.py", *sys.argv[1:]])
    publish(
        Table("The parts of one MoE layer", command, columns, table, (), data),
        args.device,
        args.output,
    )


if __name__ == "__main__":
    main()
