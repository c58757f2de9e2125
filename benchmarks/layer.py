"""One MoE layer against a dense feed-forward network of equal active FLOPs, and against simpler ways to run experts.

    python benchmarks/layer.py --threads 2        (about two minutes on two cores)

Peers: a loop over experts with `index_select` and `index_add`, and `F.grouped_mm` on sorted rows with separate bias,
gather and scatter. All share weights, and every output is checked against the plain reference before anything is timed.
Rounds are interleaved; a ratio is the median over rounds of the time over the dense one's. f = 0: nothing drops.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer
from moe_core.kernels import reference
from swinv2_moe.measure.rounds import interleaved, machine, median_and_spread, ratios


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 4608, "model-dim": 512, "hidden-dim": 2048, "experts": 8, "top-k": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


class Dense(nn.Sequential):
    """K times as wide as one expert: the FLOPs that a token meets in the MoE layer."""

    def __init__(self, model_dim: int, hidden_dim: int) -> None:
        super().__init__(nn.Linear(model_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, model_dim))


def routed(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and experts of every token [T, K]; the router alone, as the peers use it."""
    gates, ids = layer.router(x.float()).softmax(-1).topk(layer.config.top_k)
    return (gates / gates.sum(1, keepdim=True) if layer.config.top_k > 1 else gates), ids


def by_loop(layer: MoELayer, x: Tensor) -> Tensor:
    gates, ids = routed(layer, x)
    e = layer.experts
    y = torch.zeros_like(x)
    for i in range(layer.config.num_experts):
        token, k = (ids == i).nonzero(as_tuple=True)
        out = F.gelu(F.linear(x[token], e.w1[i], e.b1[i])) @ e.w2[i] + e.b2[i]
        y = y.index_add(0, token, out * gates[token, k].unsqueeze(1).to(x.dtype))
    return y


def by_grouped_mm(layer: MoELayer, x: Tensor) -> Tensor:
    gates, ids = routed(layer, x)
    e, top_k = layer.experts, layer.config.top_k
    expert, choices = ids.flatten().sort(stable=True)
    offsets = torch.bincount(expert, minlength=layer.config.num_experts).cumsum(0).int()
    rows = x[choices // top_k]  # [N, M]
    hidden = F.gelu(F.grouped_mm(rows, e.w1.transpose(1, 2), offs=offsets) + e.b1[expert])
    out = (F.grouped_mm(hidden, e.w2, offs=offsets) + e.b2[expert]) * gates.flatten()[choices].unsqueeze(1).to(x.dtype)
    return torch.zeros_like(x).index_add(0, choices // top_k, out)


def check(outputs: dict[str, Tensor], layer: MoELayer, x: Tensor) -> None:
    """Every alternative but the dense one against the specification, on 64 tokens in fp64."""
    gates, ids = (t[:64] for t in routed(layer, x))
    e = layer.experts
    weights = (w.double() for w in (gates, e.w1, e.b1, e.w2, e.b2))
    gates, w1, b1, w2, b2 = weights
    expected = reference.moe_ffn(x[:64].double(), ids, gates, w1, b1, w2, b2, F.gelu)
    tolerance = 2e-2 if x.dtype == torch.bfloat16 else 1e-5
    for name, y in outputs.items():
        error = (y[:64] - expected).abs().max().item() / expected.abs().max().item()
        if not error < tolerance:
            raise SystemExit(f"{name}: relative error {error:.1e} against the reference, {tolerance:.0e} allowed")


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    config = MoEConfig(args.model_dim, args.hidden_dim, args.experts, top_k=args.top_k, capacity_factor=0.0)
    layer, dense = MoELayer(config).to(**options), Dense(args.model_dim, args.top_k * args.hidden_dim).to(**options)
    layer.router.float()
    x = torch.randn(args.tokens, args.model_dim, **options).requires_grad_()
    grad = torch.randn_like(x)
    forwards = {
        "dense FFN": lambda: dense(x),
        "moe_core": lambda: layer(x)[0],
        "grouped_mm": lambda: by_grouped_mm(layer, x),
        "loop": lambda: by_loop(layer, x),
    }
    with torch.no_grad():
        check({name: forward() for name, forward in forwards.items() if name != "dense FFN"}, layer, x)

    def step(forward) -> None:
        x.grad = None
        layer.zero_grad()
        dense.zero_grad()
        forward().backward(grad)

    print(f"{machine(args.device)}\n{vars(args)}")
    with torch.no_grad():
        forward_ms = interleaved(forwards, args.rounds)
    step_ms = interleaved({name: lambda f=forward: step(f) for name, forward in forwards.items()}, args.rounds)
    print("| | forward, ms (quartiles) | forward + backward, ms | ratio to dense |\n|---|---|---|---|")
    for name, times in step_ms.items():
        ratio = median_and_spread(ratios(times, step_ms["dense FFN"]), 3)
        print(f"| {name} | {median_and_spread(forward_ms[name])} | {median_and_spread(times)} | {ratio} |")
    print(f"best of {args.rounds}: " + ", ".join(f"{name} {min(times):.1f} ms" for name, times in step_ms.items()))
    print(f"tokens/s through moe_core: {1e3 * args.tokens / statistics.median(step_ms['moe_core']):.0f}")


if __name__ == "__main__":
    main()
