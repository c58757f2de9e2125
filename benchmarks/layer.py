"""One MoE layer against a dense feed-forward network of equal active FLOPs, and against its peers
(peers.py).

    python benchmarks/layer.py                     (about 12 minutes on two cores)
    python benchmarks/layer.py --shapes 4608x512x8 --dtypes float32 --rounds 15
    python benchmarks/layer.py --kernels avx2 avx512 torch --same-dtype
    python benchmarks/layer.py --device cuda       (the shapes of SwinV2-B's stages 3 and 4)
    python benchmarks/layer.py --peers compiled ScatterMoE Tutel    (one after the other)

A shape is TxMxE[xK[xH]]: tokens, model dim, experts, top-k (1) and hidden dim (4 M), which for the
dense network is K times that. 2048x2048x2x2x2048: the layer of Microsoft's blog post on Tutel with
a sixteenth of its tokens. narrow: the blocks of the model that the README recommends, with its 32
fine experts and with 8 experts. bfloat16:
autocast over fp32 weights, for the peers too; every ratio is to the dense network in float32 on a
CPU, and in the same dtype on a GPU or with --same-dtype. Each output, and each gradient of the
input, is first compared with the reference in fp64: what is wrong is named and not timed. Tokens of
which two experts are nearly tied are left out: rounding may choose either. f = 0: nothing drops. A
step ends with zero_grad: freeing 1 GB of gradients takes 100 ms, for which whatever comes next must
not pay.

On a GPU each time is of many calls (timing.py); the layer and the dense network are also measured
as CUDA graphs, whose ratio is to the dense graph. --peak: the rate over that of a large matrix
product in the same rounds.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import argparse
import gc
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from peers import BUILT_IN, COMPILED, LIBRARIES, libraries, routed
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from torch import Tensor, nn

from moe_core import KERNELS, MoEConfig, MoELayer, prepared
from moe_core.routing import gate_scores
from swinv2_moe.measure.rounds import capture, matrix_product
from swinv2_moe.measure.spread import Times, median_and_spread, ratios

SHAPES = {
    "cpu": (
        "4608x512x8",
        "4608x512x32",
        "1152x1024x8",
        "1152x1024x32",
        "4608x512x8x2",
        "1152x1024x8x2",
    ),
    # SwinV2-B at 192 px: 144 tokens of 512 channels in stage 3, 36 tokens of 1024 channels in stage
    # 4, with 32, 128 and 512 images
    "cuda": tuple(
        f"{i * t}x{m}x{e}"
        for t, m in ((144, 512), (36, 1024))
        for i in (32, 128, 512)
        for e in (8, 32, 64)
    ),
}
# The blocks of configs/tiny_imagenet/32expert_fine.yaml with 128 images, and a wider one
NARROW = tuple(
    f"{tokens}x{m}x{experts}"
    for tokens, m in ((32768, 48), (8192, 96), (2048, 192), (4608, 384))
    for experts in (f"32x4x{m}", "8")
)
DIGITS = {"cpu": 1, "cuda": 3}  # digits of milliseconds
FLOOR = {"cpu": "dense, float32", "cuda": "dense"}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # relative to the largest value
NEAR_TIE = 1e-4  # of two logits, relative to the largest one
EINSUM = "einsum (GShard)"
EINSUM_TOKENS = 5000  # with more, the masks take more memory and time than all else together
REPLAYED = ("moe_core", "dense")  # also measured as CUDA graphs; the peers read from the device
PRODUCT = "matrix product"
LAYER = "moe_core"
PASSES = {"inference": 1, "training": 3}  # a backward pass has twice the products

Shape = tuple  # as the words of --shapes
Measured = tuple[dict[str, Times], dict[str, Times]]  # inference, training; by name


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--shapes", nargs="+", metavar="TxMxE[xK[xH]]|narrow")
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=["auto"], help="a layer with each of them"
    )
    parser.add_argument(
        "--same-dtype", action="store_true", help="ratios to the dense network in the same dtype"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    peers = parser.add_mutually_exclusive_group()
    peers.add_argument(
        "--no-peers", action="store_true", help="the layer and the dense network alone"
    )
    names = [*BUILT_IN, COMPILED, *LIBRARIES]
    peers.add_argument(
        "--peers", nargs="+", choices=names, help="these, each alone beside the layer and dense"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    parser.add_argument(
        "--peak", action="store_true", help="the share of a large matrix product's rate, too"
    )
    args = parser.parse_args()
    args.shapes = shapes_of(args.shapes or (*SHAPES[args.device], "narrow"))
    return args


def shapes_of(words: Sequence[str]) -> list[Shape]:
    """The shapes of --shapes. The word "narrow" stands for NARROW."""
    texts = " ".join(words).replace("narrow", " ".join(NARROW)).split()
    return [tuple(map(int, text.split("x"))) for text in texts]


class Case:
    """One shape in one dtype: the layer, the dense network and the peers, on the same weights and
    input."""

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        device: str,
        peers: Sequence[str],  # names of `peers.py`
        peak: bool = False,  # also time a large matrix product
        kernels: Sequence[str] = ("auto",),
        check: bool = True,  # compare results with the reference first
    ) -> None:
        tokens, model_dim, num_experts, self.top_k, hidden_dim = completed(shape)
        self.dtype, self.device = dtype, torch.device(device)
        torch.manual_seed(0)
        config = MoEConfig(
            model_dim,
            hidden_dim,
            num_experts,
            top_k=self.top_k,
            capacity_factor=0.0,
            kernels=kernels[0],
        )
        self.layer = MoELayer(config).to(device)
        self.layers: dict[str, MoELayer] = {}
        self._add_layers(kernels)
        hidden = self.top_k * config.hidden_dim  # the same FLOPs as in the MoE layer
        layers = nn.Linear(model_dim, hidden), nn.GELU(), nn.Linear(hidden, model_dim)
        dense = nn.Sequential(*layers)
        dense = dense.to(device)
        self.x = torch.randn(tokens, model_dim, device=device).requires_grad_()
        self.grad = torch.randn_like(self.x)
        self.product: dict[str, Callable[[], object]] = {}
        if peak:
            product, self.product_flops = matrix_product(getattr(torch, dtype), self.device)
            self.product[PRODUCT] = product
        self.trained = {"moe_core": self.layer, "dense": dense}
        self.modules = [*self.layers.values(), dense]
        self.alternatives: dict[str, Callable[[Tensor], Tensor]] = {
            name: partial(_output, layer) for name, layer in self.layers.items()
        }
        self.left_out: dict[str, str] = {}
        self._add_peers(peers)
        if check:
            self._leave_out_what_is_wrong()
        if dtype == "bfloat16":
            self.alternatives = {
                name: self._under_autocast(run) for name, run in self.alternatives.items()
            }
            self.alternatives["dense, bfloat16" if device == "cpu" else "dense"] = (
                self._under_autocast(dense)
            )
        if COMPILED in peers:
            compiled = torch.compile(dense)
            name = f"dense, {COMPILED}"
            self.alternatives[name] = compiled
            if dtype == "bfloat16":
                self.alternatives[name] = self._under_autocast(compiled)
        if dtype == "float32" or device == "cpu":
            self.alternatives[FLOOR[device] if device == "cpu" else "dense"] = dense

    def _add_layers(self, kernels: Sequence[str]) -> None:
        """Add a layer for each of `kernels`. The first one is `self.layer`."""
        first = LAYER
        if kernels[0] != "auto":
            first = f"{LAYER}, {kernels[0]}"
        self.layers[first] = self.layer
        for other in kernels[1:]:
            self.layers[f"{LAYER}, {other}"] = self._with_the_same_weights(kernels=other)

    def _add_peers(self, names: Sequence[str]) -> None:
        built_in = {name: BUILT_IN[name] for name in names if name in BUILT_IN}
        if EINSUM in built_in and len(self.x) > EINSUM_TOKENS:
            del built_in[EINSUM]
            size = f"{4e-9 * len(self.x) ** 2:.1f} GB or more"
            masks = f"its fp32 masks [T, E, C] take {size}"
            self.left_out[EINSUM] = f"above {EINSUM_TOKENS:,} tokens: {masks}"
        for name, peer in built_in.items():
            self.alternatives[name] = partial(peer, self.layer)
        peers, unavailable = libraries(self.layer, self.device, names)
        self.left_out |= unavailable
        self.alternatives |= {name: peer for name, (peer, _) in peers.items()}
        self.modules += [module for _, module in peers.values()]

    def _with_the_same_weights(self, **settings) -> MoELayer:
        layer = MoELayer(replace(self.layer.config, **settings)).to(self.device)
        layer.load_state_dict(self.layer.state_dict(), assign=True)
        return layer

    def _under_autocast(self, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def autocast(x: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                return run(x)

        return autocast

    def _leave_out_what_is_wrong(self) -> None:
        """Remove alternatives with wrong results. The output and the gradient of x are compared for
        every clearly routed token with plain products in fp64 on the same routing."""
        *wanted, is_clear = self._reference()
        for name, run in list(self.alternatives.items()):
            run = self._under_autocast(run) if self.dtype == "bfloat16" else run
            try:
                y = run(self.x).to(self.x.dtype)
                results = (y.detach(), *torch.autograd.grad(y, self.x, self.grad))
                pairs = zip(results, wanted, strict=True)
                error = max(_difference(a[is_clear], b[is_clear]) for a, b in pairs)
            except Exception as problem:  # of a library; an error of the layer ends the run below
                error, reason = (
                    float("inf"),
                    f"{type(problem).__name__}: {str(problem).splitlines()[0]}",
                )
            else:
                reason = f"wrong: an error of {error:.1e} of the largest value"
            if not error < TOLERANCE[self.dtype]:
                if name in self.layers:
                    raise SystemExit(f"{name}: {reason}")
                del self.alternatives[name]
                self.left_out[name] = reason
        gc.collect()

    def _reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """The output y [T, M], the gradient of x through gates and experts [T, M], and the tokens
        of which no two experts are nearly tied [T]. Computed in fp64, one expert's tokens at a
        time."""
        e, x = self.layer.experts, self.x.detach().double().requires_grad_()
        _, ids = routed(self.layer, self.x.detach())
        logits = F.linear(x, self.layer.router.weight.double())
        is_clear = clearly_routed(logits.detach(), self.top_k)
        gates = gate_scores(logits, self.layer.config.gate_activation).gather(1, ids)
        if self.top_k > 1:
            gates = gates / gates.sum(1, keepdim=True)
        y = torch.zeros_like(x)
        for i in range(self.layer.config.num_experts):
            token, k = (ids == i).nonzero(as_tuple=True)
            w = e.parameters_by_field.map(lambda parameter: parameter[i].detach().double())  # noqa: B023
            out = F.gelu(x[token] @ w.w1.t() + w.b1) @ w.w2 + w.b2
            y = y.index_add(0, token, out * gates[token, k].unsqueeze(1))
        return y.detach(), *torch.autograd.grad(y, x, self.grad.double()), is_clear

    def in_same_dtype(self) -> list[str]:
        """The names of the layer and of the dense network in the same dtype."""
        dense = "dense"
        if self.device.type == "cpu":
            dense = f"dense, {self.dtype}"
        return [LAYER, dense]

    def step(self, run: Callable[[Tensor], Tensor]) -> None:
        y = run(self.x)
        y.backward(self.grad.to(y.dtype))
        self.x.grad = None
        for module in self.modules:
            module.zero_grad()

    def times(self, rounds: int) -> Measured:
        """Milliseconds of the forward pass in evaluation, without gradients, and of forward and
        backward in training."""
        steps = {name: partial(self.step, run) for name, run in self.alternatives.items()}
        return self._timed(self.alternatives, steps, rounds)

    def times_of_graphs(self, rounds: int) -> Measured:
        """As `times`, for the layer and the dense network as CUDA graphs.

        Raises:
            RuntimeError: one of them cannot be captured.
        """
        runs = {name: self.alternatives[name] for name in REPLAYED}
        steps = {name: partial(self.gradients, name) for name in REPLAYED}
        return self._timed(runs, steps, rounds, capture=capture)

    def gradients(self, name: str) -> None:
        """A training step that returns its gradients. It does not accumulate them, because
        accumulation uses the stream of an earlier step."""
        y = self.alternatives[name](self.x)
        inputs = [self.x, *self.trained[name.partition(",")[0]].parameters()]
        torch.autograd.grad(y, inputs, self.grad.to(y.dtype), allow_unused=True)

    def _timed(
        self,
        runs: dict[str, Callable[[Tensor], Tensor]],
        steps: dict[str, Callable[[], object]],
        rounds: int,
        capture: Callable[[Callable[[], object]], Callable[[], object]] = lambda work: work,
    ) -> Measured:
        x = self.x.detach()
        for module in self.modules:
            module.eval()
        with prepared(nn.ModuleList(self.layers.values())), torch.no_grad():
            forwards = {name: capture(partial(run, x)) for name, run in runs.items()}
            inference = timed(forwards | self.product, rounds, self.device.type)
        for module in self.modules:
            module.train()
        captured = {name: capture(step) for name, step in steps.items()}
        return inference, timed(captured | self.product, rounds, self.device.type)

    def flops(self) -> int:
        """FLOPs of the experts' products in a forward pass."""
        config = self.layer.config
        return 4 * len(self.x) * self.top_k * config.model_dim * config.hidden_dim


def completed(shape: Shape) -> Shape:
    """T, M, E, K and H. The last two may be omitted in `shape`."""
    defaults = (1, 4 * shape[1])
    return shape + defaults[len(shape) - 3 :]


def _output(layer: MoELayer, x: Tensor) -> Tensor:
    return layer(x)[0]


def clearly_routed(logits: Tensor, top_k: int) -> Tensor:
    """Which tokens have K experts that rounding cannot change: [T, E] -> [T], bool."""
    if top_k == logits.shape[1]:
        return torch.ones_like(logits[:, 0], dtype=torch.bool)
    best = logits.topk(top_k + 1).values
    return best[:, -2] - best[:, -1] > NEAR_TIE * logits.abs().max()


def _difference(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().max() / b.abs().max()).item()


class Results:
    """Rows and numbers of all cases so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[list[str]] = []
        self.data: list[dict] = []
        self.left_out: dict[str, str] = {}

    def measure(self, case: Case, shape: Shape, dtype: str) -> None:
        label = f"{'x'.join(map(str, shape))}, {dtype}"
        head = {"shape": shape, "dtype": dtype}
        measured = case.times(self.args.rounds)
        floor = FLOOR[self.args.device]
        if self.args.same_dtype and self.args.device == "cpu":
            floor = f"dense, {dtype}"
        self._add(case, label, head | {"timing": "many calls"}, measured, floor)
        for name, reason in case.left_out.items():
            self._add_row([label, name, f"not measured: {reason}", "", "", "", ""])
        if self.args.device == "cuda" and not self.args.peers:
            try:
                replayed = case.times_of_graphs(self.args.rounds)
            except RuntimeError as error:  # the capture failed; the times above are valid
                first_line = f"{error}".splitlines()[0]
                self.left_out[f"{label} as a graph"] = first_line
            else:
                self._add(case, label, head | {"timing": "graph replay"}, replayed, "dense")

    def _add(self, case: Case, label: str, head: dict, measured: Measured, floor: str) -> None:
        for name in measured[0]:
            if name == PRODUCT:
                continue
            cells, shares = [], []
            for pass_name, times in zip(("inference", "training"), measured, strict=True):
                if name not in times:
                    cells += ["", ""]
                    continue
                ratio = ratios(times[name], times[floor])
                share = self._share_of_peak(case, name, pass_name, times)
                milliseconds = median_and_spread(times[name], DIGITS[self.args.device])
                cells += [milliseconds, median_and_spread(ratio, 2)]
                if share:
                    shares.append(median_and_spread(share, 3))
                entry = {"name": name, "layer": name in case.layers, "pass": pass_name}
                entry |= {"ms": times[name], "ratio": ratio, "share_of_peak": share}
                self.data.append(head | entry)
            shown = name
            if head["timing"] == "graph replay":
                shown = f"{name}, graph replay"
            self._add_row([label, shown, *cells, "; ".join(shares)])

    def _add_row(self, cells: list[str]) -> None:
        """Add a row. Its last cell is the share of the peak, which is removed without --peak."""
        if not self.args.peak:
            cells.pop()
        self.rows.append(cells)
        print(" | ".join(cells), file=sys.stderr, flush=True)

    def _share_of_peak(
        self, case: Case, name: str, pass_name: str, times: dict[str, Times]
    ) -> list[float]:
        """FLOP/s relative to a large matrix product's, in each round."""
        if PRODUCT not in times:
            return []
        share = case.flops() * PASSES[pass_name] / case.product_flops
        return [ratio * share for ratio in ratios(times[PRODUCT], times[name])]

    def table(self) -> Table:
        columns = ["TxMxE(xK(xH)), dtype", "", "forward, ms", "to dense"]
        columns += ["forward + backward, ms", "to dense"]
        if self.args.peak:
            columns.append("of a matrix product's rate: f; f + b")
        notes = [CALLS_NOTE]
        for name, reason in self.left_out.items():
            notes.append(f"{name} is not measured. {reason}")
        command = shlex.join(["python", "benchmarks/layer.py", *sys.argv[1:]])
        return Table("One MoE layer", command, columns, self.rows, notes, self.data)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    results = Results(args)
    groups: list[list[str]] = [[*BUILT_IN, *LIBRARIES]]
    if args.peers:
        groups = [[name] for name in args.peers]
    if args.no_peers:
        groups = [[]]
    for shape, dtype, peers in itertools.product(args.shapes, args.dtypes, groups):
        case = Case(shape, dtype, args.device, peers, args.peak, args.kernels)
        results.measure(case, shape, dtype)
        keep(results.table(), args.device, args.output)
        del case
        gc.collect()
    publish(results.table(), args.device, args.output)


if __name__ == "__main__":
    main()
