"""One MoE layer against a dense feed-forward network of equal active FLOPs, and against its peers
(peers.py).

    python benchmarks/layer.py                     (about 8 minutes on two cores)
    python benchmarks/layer.py --shapes 4608x512x8 --dtypes float32 --rounds 15
    python benchmarks/layer.py --device cuda       (the shapes of SwinV2-B's stages 3 and 4)

A shape is TxMxE[xK]: tokens, model dim, experts, top-k (1); hidden dim is 4 M, for the dense
network K times that. bfloat16: autocast over fp32 weights, for the peers too; every ratio is to the
dense network in float32 on a CPU, and in the same dtype on a GPU. Each output, and each gradient of
the input, is first compared with the reference in fp64: what is wrong is named and not timed. f =
0: nothing drops. A step ends with zero_grad: freeing 1 GB of gradients takes 100 ms, for which
whatever comes next must not pay.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import argparse
import gc
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from peers import BUILT_IN, libraries, routed
from results_file import Table, publish
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer, prepared
from swinv2_moe.measure.rounds import Times, interleaved, median_and_spread, ratios

SHAPES = {
    "cpu": (
        "4608x512x8",
        "4608x512x32",
        "1152x1024x8",
        "1152x1024x32",
        "4608x512x8x2",
        "1152x1024x8x2",
    ),
    # SwinV2-B at 192 px: 144 tokens of 512 channels in stage 3, 36 of 1024 in stage 4, of 32, 128
    # and 512 images
    "cuda": tuple(
        f"{i * t}x{m}x{e}"
        for t, m in ((144, 512), (36, 1024))
        for i in (32, 128, 512)
        for e in (8, 32, 64)
    ),
}
FLOOR = {"cpu": "dense, float32", "cuda": "dense"}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of the largest value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--shapes", nargs="+", metavar="TxMxE[xK]")
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--no-peers", action="store_true", help="the layer and the dense network alone"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    parser.add_argument(
        "--peak", action="store_true", help="the share of a large matrix product's rate, too"
    )
    args = parser.parse_args()
    args.shapes = [
        tuple(map(int, shape.split("x"))) for shape in args.shapes or SHAPES[args.device]
    ]
    return args


class Case:
    """One shape in one dtype: the layer, the dense network and the peers, on the same weights and
    input."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str, peers: bool) -> None:
        tokens, model_dim, num_experts, *rest = shape
        self.top_k, self.dtype, self.device = rest[0] if rest else 1, dtype, torch.device(device)
        torch.manual_seed(0)
        config = MoEConfig(
            model_dim, 4 * model_dim, num_experts, top_k=self.top_k, capacity_factor=0.0
        )
        self.layer = MoELayer(config).to(device)
        hidden = self.top_k * config.hidden_dim  # the FLOPs that a token meets in the MoE layer
        dense = nn.Sequential(
            nn.Linear(model_dim, hidden), nn.GELU(), nn.Linear(hidden, model_dim)
        ).to(device)
        self.x = torch.randn(tokens, model_dim, device=device).requires_grad_()
        self.grad = torch.randn_like(self.x)
        self.modules = [self.layer, dense]
        self.alternatives: dict[str, Callable[[Tensor], Tensor]] = {
            "moe_core": lambda x: self.layer(x)[0]
        }
        self.left_out: dict[str, str] = {}
        if peers:
            self.alternatives |= {
                name: partial(peer, self.layer) for name, peer in BUILT_IN.items()
            }
            found, self.left_out = libraries(self.layer, self.device)
            self.alternatives |= {name: peer for name, (peer, _) in found.items()}
            self.modules += [module for _, module in found.values()]
        self._leave_out_what_is_wrong()
        if dtype == "bfloat16":
            self.alternatives = {
                name: self._under_autocast(run) for name, run in self.alternatives.items()
            }
            self.alternatives["dense, bfloat16" if device == "cpu" else "dense"] = (
                self._under_autocast(dense)
            )
        if dtype == "float32" or device == "cpu":
            self.alternatives[FLOOR[device] if device == "cpu" else "dense"] = dense

    def _under_autocast(self, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def autocast(x: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                return run(x)

        return autocast

    def _leave_out_what_is_wrong(self) -> None:
        """By the output and the gradient of x for every token, against plain products in fp64 on
        the same routing."""
        wanted = self._reference()
        for name, run in list(self.alternatives.items()):
            run = self._under_autocast(run) if self.dtype == "bfloat16" else run
            try:
                y = run(self.x).to(self.x.dtype)
                found = (y.detach(), *torch.autograd.grad(y, self.x, self.grad))
                error = max(_difference(a, b) for a, b in zip(found, wanted, strict=True))
            except Exception as problem:  # a library's; the layer's own ends the run below
                error, reason = (
                    float("inf"),
                    f"{type(problem).__name__}: {str(problem).splitlines()[0]}",
                )
            else:
                reason = f"wrong: an error of {error:.1e} of the largest value"
            if not error < TOLERANCE[self.dtype]:
                if name == "moe_core":
                    raise SystemExit(f"moe_core: {reason}")
                del self.alternatives[name]
                self.left_out[name] = reason
        gc.collect()

    def _reference(self) -> tuple[Tensor, Tensor]:
        """y, and the gradient of x through gates and experts [T, M]; an expert's tokens at a time,
        in fp64."""
        e, x = self.layer.experts, self.x.detach().double().requires_grad_()
        _, ids = routed(self.layer, self.x.detach())
        probs = F.linear(x, self.layer.router.weight.double()).softmax(-1).gather(1, ids)
        gates = probs / probs.sum(1, keepdim=True) if self.top_k > 1 else probs
        y = torch.zeros_like(x)
        for i in range(self.layer.config.num_experts):
            token, k = (ids == i).nonzero(as_tuple=True)
            w1, b1, w2, b2 = (t[i].detach().double() for t in (e.w1, e.b1, e.w2, e.b2))
            out = F.gelu(x[token] @ w1.t() + b1) @ w2 + b2
            y = y.index_add(0, token, out * gates[token, k].unsqueeze(1))
        return y.detach(), *torch.autograd.grad(y, x, self.grad.double())

    def step(self, run: Callable[[Tensor], Tensor]) -> None:
        y = run(self.x)
        y.backward(self.grad.to(y.dtype))
        self.x.grad = None
        for module in self.modules:
            module.zero_grad()

    def times(self, rounds: int) -> tuple[dict[str, Times], dict[str, Times]]:
        """Milliseconds of the forward pass in evaluation, without gradients; of forward and
        backward in training."""
        x = self.x.detach()
        for module in self.modules:
            module.eval()
        with prepared(self.layer), torch.no_grad():
            forward = interleaved(
                {name: partial(run, x) for name, run in self.alternatives.items()}, rounds
            )
        for module in self.modules:
            module.train()
        steps = {name: partial(self.step, run) for name, run in self.alternatives.items()}
        return forward, interleaved(steps, rounds)


def _difference(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().max() / b.abs().max()).item()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    rows, data, left_out, floor = [], [], {}, FLOOR[args.device]
    for shape in args.shapes:
        for dtype in args.dtypes:
            case = Case(shape, dtype, args.device, not args.no_peers)
            left_out |= case.left_out
            forward, step = case.times(args.rounds)
            label = f"{'x'.join(map(str, shape))}, {dtype}"
            for name in case.alternatives:
                cells = []
                for pass_name, times in (("inference", forward), ("training", step)):
                    ratio = ratios(times[name], times[floor])
                    cells += [median_and_spread(times[name]), median_and_spread(ratio, 2)]
                    data.append(
                        {
                            "shape": shape,
                            "dtype": dtype,
                            "name": name,
                            "layer": name == "moe_core",
                            "pass": pass_name,
                            "timing": "calls",
                            "ms": times[name],
                            "ratio": ratio,
                        }
                    )
                rows.append([label, name, *cells])
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            del case
            gc.collect()
    columns = [
        "TxMxE(xK), dtype",
        "",
        "forward, ms",
        "to dense",
        "forward + backward, ms",
        "to dense",
    ]
    notes = [f"{name} is not measured. {reason}" for name, reason in left_out.items()]
    command = shlex.join(["python", "benchmarks/layer.py", *sys.argv[1:]])
    publish(Table("One MoE layer", command, columns, rows, notes, data), args.device, args.output)


if __name__ == "__main__":
    main()
