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
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from torch import Tensor

from moe_core import MoEConfig, MoELayer
from moe_core.context import without_autocast
from moe_core.ops import combine, dispatch, make_plan
from moe_core.routing import route
from swinv2_moe.measure.rounds import capture
from swinv2_moe.measure.spread import Times, median_and_spread, ratios

LAYER = "the whole layer"

Calls = dict[str, Callable[[], object]]


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
    """For each part of the layer, a call that returns its differentiable output, and the tensors
    with respect to which gradients are taken."""
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
        # Replaces the three parts before. On a CPU it also consists of three ops.
        "dispatch to combine as one": (
            lambda: layer.experts(tokens, plan.offsets, gates=gates, plan=plan),
            [tokens, gates, *weights],
        ),
        LAYER: (lambda: layer(x)[0], [x, *layer.parameters()]),
    }
    return parts


class Bench:
    """The calls of one layer's parts, with and without their backward passes."""

    def __init__(self, shape: str, dtype: str, device: str) -> None:
        tokens, model_dim, num_experts, *rest = map(int, shape.split("x"))
        top_k = 1
        if rest:
            top_k = rest[0]
        config = MoEConfig(model_dim, 4 * model_dim, num_experts, top_k=top_k, capacity_factor=0.0)
        torch.manual_seed(0)
        layer = MoELayer(config).to(device)
        x = torch.randn(tokens, model_dim, device=device)
        self.parts = pieces(layer, leaf(x), getattr(torch, dtype))
        self.autocast = partial(torch.autocast, device, torch.bfloat16, enabled=dtype == "bfloat16")
        # By shape and dtype. They are kept because drawing a gradient takes longer than some parts.
        self.grads: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def step(self, call: Callable[[], Tensor], wanted: list[Tensor]) -> None:
        with self.autocast():
            out = call()
        if wanted:
            key = (out.shape, out.dtype)
            if key not in self.grads:
                self.grads[key] = torch.randn_like(out)
            torch.autograd.grad(out, wanted, self.grads[key], allow_unused=True)

    @torch.no_grad()
    def forward(self, call: Callable[[], Tensor]) -> None:
        with self.autocast():
            call()

    def forwards(self) -> Calls:
        return {name: partial(self.forward, call) for name, (call, _) in self.parts.items()}

    def steps(self) -> Calls:
        return {name: partial(self.step, *part) for name, part in self.parts.items()}


def replayed(calls: Calls) -> Calls:
    """The calls as CUDA graphs. Raises RuntimeError if a call cannot be captured."""
    return {name: capture(call) for name, call in calls.items()}


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, tuple[dict, dict]]:
    """For each kind of timing, the times of forward passes and of steps, by part."""
    measured = {}
    forwards, steps = bench.forwards(), bench.steps()
    kind = "many calls"
    measured[kind] = tuple(timed(calls, args.rounds, args.device) for calls in (forwards, steps))
    if args.device == "cuda":
        try:
            graphs = replayed(forwards), replayed(steps)
        # the capture failed; the times of the calls above remain valid
        except RuntimeError as error:
            print(f"no graph replay: {error}", file=sys.stderr, flush=True)
        else:
            kind = "graph replay"
            measured[kind] = tuple(timed(calls, args.rounds, args.device) for calls in graphs)
    return measured


def rows(label: str, kind: str, measured: tuple[dict[str, Times], dict[str, Times]]):
    """Rows for the parts: times, and their share of the layer's time."""
    for name in measured[0]:
        shown = name
        if kind == "graph replay":
            shown = f"{name}, {kind}"
        cells = []
        for times in measured:
            share = ratios(times[name], times[LAYER])
            cells += [median_and_spread(times[name], 3), median_and_spread(share, 3)]
        yield [label, shown, *cells]


def main() -> None:
    args = arguments()
    columns = ["TxMxE(xK), dtype", "part", "forward, ms", "of the layer"]
    columns += ["forward + backward, ms", "of the layer"]
    command = shlex.join(["python", "benchmarks/pieces.py", *sys.argv[1:]])
    lines: list[list[str]] = []
    data: list[dict] = []
    table = Table("The parts of one MoE layer", command, columns, lines, (CALLS_NOTE,), data)
    for shape in args.shapes:
        for dtype in args.dtypes:
            bench = Bench(shape, dtype, args.device)
            for kind, measured in measure(bench, args).items():
                lines += rows(f"{shape}, {dtype}", kind, measured)
                head = {"shape": shape, "dtype": dtype, "timing": kind}
                for pass_name, times in zip(("inference", "training"), measured, strict=True):
                    for name in times:
                        entry = {"part": name, "pass": pass_name, "ms": times[name]}
                        data.append(head | entry)
            keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    main()
