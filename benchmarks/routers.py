"""One MoE layer by who chooses, at equal MACs: top-1, expert choice and Soft MoE, the latter two
also as plain einsums.

    python benchmarks/routers.py                        (about 5 minutes on two cores)
    python benchmarks/routers.py --shapes 8x144x512x8 --dtypes float32 --rounds 15

A shape is BxNxMxE: images, tokens of an image, model dim, experts; hidden dim is 4 M. Every form
gives the experts T = B N rows: top-1 drops nothing, experts choose T / E tokens each, and Soft MoE
has N slots in an image. bfloat16: autocast over fp32 weights. Outputs and gradients of the einsum
forms are compared with the layer's before anything is timed. "Kept" is what a forward pass keeps
for the backward pass besides the weights.
"""

# B images, N tokens of an image, T = B N tokens, E experts, C tokens of an expert, S slots of an
# image, M model dim, H hidden dim

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from memory import kept_bytes
from peers import padded_experts
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from torch import Tensor

from moe_core import MoEConfig, MoELayer, prepared
from swinv2_moe.measure.spread import median_and_spread, ratios

SHAPES = {
    "cpu": ("8x144x512x8", "32x144x512x8"),
    "cuda": ("128x144x512x8", "128x144x512x32"),
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to the largest value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--shapes", nargs="+", metavar="BxNxMxE")
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    args.shapes = [
        tuple(map(int, shape.split("x"))) for shape in args.shapes or SHAPES[args.device]
    ]
    return args


def einsum_soft(layer: MoELayer, x: Tensor) -> Tensor:
    """Soft MoE as algorithm 1 of arXiv 2308.00951: x [B, N, M] -> [B, N, M]."""
    num_images, _, model_dim = x.shape
    num_experts = layer.config.num_experts
    with torch.autocast(x.device.type, enabled=False):
        logits = layer.router(x.flatten(0, 1)).view(*x.shape[:2], num_experts, -1)  # [B, N, E, P]
    dispatch = logits.softmax(1)
    combine = logits.flatten(2).softmax(2).view_as(logits)
    slots = torch.einsum("bnm,bnep->ebpm", x, dispatch)
    rows = padded_experts(layer, slots.reshape(num_experts, -1, model_dim))
    rows = rows.view(num_experts, num_images, -1, model_dim)
    return torch.einsum("ebpm,bnep->bnm", rows, combine.to(rows.dtype))


def einsum_expert_choice(layer: MoELayer, x: Tensor) -> Tensor:
    """Expert choice as in section 3.2 of arXiv 2202.09368: x [B, N, M] -> [B, N, M]."""
    tokens = x.flatten(0, 1)
    num_tokens = len(tokens)
    with torch.autocast(x.device.type, enabled=False):
        scores = layer.router(tokens).softmax(1)  # [T, E]
    gates, chosen = scores.t().topk(num_tokens // layer.config.num_experts)  # [E, C]
    permutation = F.one_hot(chosen, num_tokens).to(scores.dtype)  # [E, C, T]
    rows = padded_experts(layer, torch.einsum("ect,tm->ecm", permutation, tokens))
    y = torch.einsum("ect,ec,ecm->tm", permutation, gates, rows.to(gates.dtype))
    return y.view_as(x)


class Case:
    """The forms of one shape in one dtype, on the same input."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str) -> None:
        num_images, num_tokens, model_dim, num_experts = shape
        self.dtype, self.device = dtype, device
        torch.manual_seed(0)
        self.x = torch.randn(num_images, num_tokens, model_dim, device=device).requires_grad_()
        self.grad = torch.randn_like(self.x)
        make = partial(MoEConfig, model_dim, 4 * model_dim, num_experts)
        top_1 = MoELayer(make(capacity_factor=0.0)).to(device)
        chosen = MoELayer(make(router="expert_choice", capacity_factor=1.0, gate_noise=0.0))
        soft = MoELayer(make(router="soft", slots_per_expert=num_tokens // num_experts))
        chosen, soft = chosen.to(device), soft.to(device)
        self.layers = [top_1, chosen, soft]
        self.forms: dict[str, Callable[[Tensor], Tensor]] = {
            "top-1": lambda x: top_1(x)[0],
            "expert choice": lambda x: chosen(x)[0],
            "expert choice, einsum": partial(einsum_expert_choice, chosen),
            "Soft MoE": lambda x: soft(x)[0],
            "Soft MoE, einsum": partial(einsum_soft, soft),
        }
        self.kept: dict[str, int] = {}

    def run(self, name: str, x: Tensor) -> Tensor:
        is_half = self.dtype == "bfloat16"
        with torch.autocast(self.device, torch.bfloat16, enabled=is_half):
            return self.forms[name](x)

    def step(self, name: str) -> None:
        y = self.run(name, self.x)
        y.backward(self.grad.to(y.dtype))
        self.x.grad = None
        for layer in self.layers:
            layer.zero_grad()

    def check(self) -> None:
        """Compare the outputs of einsum forms with the layer's.

        Raises:
            SystemExit: they differ.
        """
        for name in ("expert choice", "Soft MoE"):
            results = []
            for form in (name, f"{name}, einsum"):
                y = self.run(form, self.x)
                (grad,) = torch.autograd.grad(y, self.x, self.grad.to(y.dtype))
                results.append((y.detach().float(), grad))
            for ours, theirs in zip(*results, strict=True):
                error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
                if not error < TOLERANCE[self.dtype]:
                    raise SystemExit(
                        f"{name}: the forms differ by {error:.1e} of the largest value"
                    )

    def measure_kept(self) -> None:
        parameters = [p for layer in self.layers for p in layer.parameters()]
        for name in self.forms:
            self.kept[name] = kept_bytes(partial(self.run, name, self.x), parameters)

    def times(self, rounds: int):
        """Milliseconds of the forward pass in evaluation, and of forward and backward."""
        steps = {name: partial(self.step, name) for name in self.forms}
        training = timed(steps, rounds, self.device)
        x = self.x.detach()
        forwards = {name: partial(self.run, name, x) for name in self.forms}
        top_1, chosen, soft = self.layers
        for layer in self.layers:
            layer.eval()
        with prepared(top_1), prepared(chosen), prepared(soft), torch.no_grad():
            return timed(forwards, rounds, self.device), training


def rows_of(case: Case, label: str, measured) -> list[list[str]]:
    rows = []
    for name in case.forms:
        cells = [label, name]
        for times in measured:
            cells += [median_and_spread(times[name], 1)]
            cells += [median_and_spread(ratios(times[name], times["top-1"]), 2)]
            beside_einsum = ""
            if f"{name}, einsum" in times:
                beside_einsum = median_and_spread(ratios(times[name], times[f"{name}, einsum"]), 2)
            cells.append(beside_einsum)
        rows.append([*cells, f"{case.kept[name] / 2**20:.1f}"])
    return rows


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    columns = ["BxNxMxE, dtype", "", "forward, ms", "to top-1", "to its einsum"]
    columns += ["forward + backward, ms", "to top-1", "to its einsum", "kept, MiB"]
    command = shlex.join(["python", "benchmarks/routers.py", *sys.argv[1:]])
    rows: list[list[str]] = []
    data: list[dict] = []
    table = Table("Who chooses", command, columns, rows, (CALLS_NOTE,), data)
    for shape in args.shapes:
        for dtype in args.dtypes:
            case = Case(shape, dtype, args.device)
            case.check()
            case.measure_kept()
            measured = case.times(args.rounds)
            label = f"{'x'.join(map(str, shape))}, {dtype}"
            for row in rows_of(case, label, measured):
                rows.append(row)
                print(" | ".join(row), file=sys.stderr, flush=True)
            inference, training = measured
            data.append(
                {"shape": shape, "dtype": dtype, "forward": inference, "training": training}
                | {"kept": case.kept}
            )
            keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    main()
