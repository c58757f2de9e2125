"""The experts modules of transformers' models by each `experts_implementation`.

    python benchmarks/transformers_backends.py                       (about 10 minutes on two cores)
    python benchmarks/transformers_backends.py --tokens 1024 --models mixtral --dtypes float32

Forward alone without gradients, and forward with backward, on the same weights, tokens and choices.
Every backend's output is first compared with that of `eager`: what is wrong or fails is named and
not timed. The ratio is the time over that of `grouped_mm`, transformers' default, in the same
round. batched_mm copies the weights of each choice, so it is not run where these copies take more
memory than --most-gb.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from results_file import Table, publish
from timing import timed
from torch import Tensor, nn

import moe_core.compat.transformers
from swinv2_moe.measure.spread import median_and_spread, ratios

BACKENDS = ("eager", "batched_mm", "grouped_mm", "moe_core")
BASE = "grouped_mm"
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to the largest value


class Sizes(NamedTuple):
    """Sizes of a moderate experts module, with the published K and ratio of H to M."""

    config: str
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int

    @property
    def name(self) -> str:
        return f"M {self.model_dim}, H {self.hidden_dim}, E {self.num_experts}, K {self.top_k}"


MODELS = {
    "mixtral": Sizes("MixtralConfig", 512, 1792, 8, 2),
    "qwen3_moe": Sizes("Qwen3MoeConfig", 512, 192, 64, 8),
    "olmoe": Sizes("OlmoeConfig", 512, 256, 64, 8),
    "gpt_oss": Sizes("GptOssConfig", 512, 512, 32, 4),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 1024, 4096])
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--most-gb", type=float, default=4.0, help="of batched_mm's copies")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    args = parser.parse_args()
    if BASE not in args.backends:
        parser.error(f"--backends must include {BASE}, whose time is the unit")
    return args


def experts_of(sizes: Sizes, dtype: torch.dtype, device: str) -> nn.Module:
    """The experts module of a model with one layer, with random weights."""
    config = getattr(transformers, sizes.config)(
        hidden_size=sizes.model_dim,
        intermediate_size=sizes.hidden_dim,
        moe_intermediate_size=sizes.hidden_dim,
        num_experts=sizes.num_experts,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        num_hidden_layers=1,
        vocab_size=64,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    modules = model.modules()
    experts = next(module for module in modules if type(module).__name__.endswith("Experts"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=sizes.model_dim**-0.5)
    return experts.to(device, dtype)


class Case:
    """An experts module with tokens, choices and gate values."""

    def __init__(self, sizes: Sizes, num_tokens: int, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        self.experts = experts_of(sizes, dtype, device)
        self.x = torch.randn(num_tokens, sizes.model_dim).to(device, dtype)
        scores = torch.randn(num_tokens, sizes.num_experts).softmax(1)
        gates, self.ids = scores.to(device).topk(sizes.top_k)
        self.gates = (gates / gates.sum(1, keepdim=True)).to(dtype)

    def __call__(self, backend: str) -> Tensor:
        self.experts.config._experts_implementation = backend
        return self.experts(self.x, self.ids, self.gates)

    def inference(self, backend: str) -> Tensor:
        with torch.no_grad():
            return self(backend)

    def training(self, backend: str) -> None:
        self.x.requires_grad_()
        self.gates.requires_grad_()
        self(backend).sum().backward()
        self.experts.zero_grad()
        self.x.grad = self.gates.grad = None


def copied_gb(sizes: Sizes, num_tokens: int, dtype: torch.dtype) -> float:
    """Gigabytes of weights that batched_mm copies: three matrices for each choice."""
    numbers = num_tokens * sizes.top_k * 3 * sizes.model_dim * sizes.hidden_dim
    return numbers * dtype.itemsize / 1e9


def usable(case: Case, candidates: list[str], tolerance: float) -> list[str]:
    """The backends whose output agrees with eager's. Names of the others are printed."""
    expected = case.inference("eager")
    backends = []
    for backend in candidates:
        try:
            error = (case.inference(backend) - expected).abs().max() / expected.abs().max()
        except (ImportError, RuntimeError, ValueError) as failure:
            print(f"{backend}: {str(failure).splitlines()[0]}", file=sys.stderr)
            continue
        if error <= tolerance:
            backends.append(backend)
        else:
            print(f"{backend}: wrong by {error:.1e} of the largest value", file=sys.stderr)
    return backends


def rows_of(args: argparse.Namespace, model: str, num_tokens: int, dtype_name: str) -> list:
    sizes, dtype = MODELS[model], getattr(torch, dtype_name)
    case = Case(sizes, num_tokens, dtype, args.device)
    candidates = list(args.backends)
    if args.device == "cuda":
        candidates.append("sonicmoe")
    if copied_gb(sizes, num_tokens, dtype) > args.most_gb:
        candidates = [name for name in candidates if name != "batched_mm"]
    backends = usable(case, candidates, TOLERANCE[dtype_name])
    columns = []
    passes: tuple[Callable[[str], object], ...] = (case.inference, case.training)
    for run in passes:
        works = {backend: partial(run, backend) for backend in backends}
        columns.append(timed(works, args.rounds, args.device))
    rows = []
    for backend in backends:
        row = [f"{model} ({sizes.name})", str(num_tokens), dtype_name, backend]
        for times in columns:
            row.append(median_and_spread(times[backend]))
            row.append(median_and_spread(ratios(times[backend], times[BASE]), 2))
        rows.append(row)
    return rows


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    moe_core.compat.transformers.register()
    rows = []
    for model in args.models:
        for dtype_name in args.dtypes:
            for num_tokens in args.tokens:
                rows += rows_of(args, model, num_tokens, dtype_name)
                print(f"{model}, T = {num_tokens}, {dtype_name}: measured", file=sys.stderr)
    head = ["experts", "T", "dtype", "backend", "forward, ms", "ratio", "step, ms", "ratio"]
    command = shlex.join(["python", "benchmarks/transformers_backends.py", *sys.argv[1:]])
    notes = [
        f"transformers {transformers.__version__}, {args.threads} threads",
        f"ratio: the time over that of {BASE} in the same round; median and quartiles",
    ]
    table = Table("Experts of transformers' models", command, head, rows, notes)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    main()
