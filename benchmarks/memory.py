"""Memory of one MoE layer at the published setting (Tutel, arXiv 2206.03382): M = H = 4096, K = 2,
2 experts.

    python benchmarks/memory.py                                (about a minute on two cores)
    python benchmarks/memory.py --measure 4096 8192 16384 32768    (a GPU, or 24 GB and ten minutes)

counted:  what the backward pass needs, by shapes: rows, hidden layer and the experts' output of
          each row, the router's tokens; rows in the dtype of the experts. In bf16 on a GPU the
          tokens, the hidden layer and the cast weights.
saved:    what the forward pass did save, by autograd's hooks; storages once, parameters not.
peak:     what forward and backward needed at their highest point, gradients included, weights not.

The published figures are the whole layer's on a GPU: weights, gradients, activations and buffers.
`with weights` is the peak and the weights.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from results_file import Table, keep, publish

from moe_core import MoEConfig, MoELayer
from swinv2_moe.measure.rounds import working_memory

GIB = 2**30
# GiB of Fairseq and Tutel
PUBLISHED = {4096: (3.7, 2.9), 8192: (6.2, 3.2), 16384: (16.3, 4.0), 32768: (57.9, 5.7)}
SIZE = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--measure",
        nargs="*",
        type=int,
        default=[4096],
        metavar="T",
        help="tokens; the others: counted",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--size", type=int, default=SIZE, help="M and H; another one is not comparable"
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="of the hidden layer")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser.parse_args()


def counted(tokens: int, config: MoEConfig, dtype: torch.dtype, device: str) -> int:
    """Bytes kept for the backward pass, by formula. Indices and the router's few values per token
    are not counted."""
    # `of_router`: the router's input in fp32
    rows, of_router = tokens * config.top_k, tokens * config.model_dim * 4
    if device == "cuda" and dtype == torch.bfloat16:  # moe_core.ops.ffn
        weights = 2 * config.num_experts * config.model_dim * config.hidden_dim
        return (
            tokens * config.model_dim + rows * config.hidden_dim + weights
        ) * dtype.itemsize + of_router
    return rows * (2 * config.model_dim + config.hidden_dim) * dtype.itemsize + of_router


def counted_of_tutel(tokens: int, config: MoEConfig, dtype: torch.dtype) -> int:
    """Bytes that Tutel's layer keeps for its backward pass, counted from its public code.

    Kept are the dispatched rows and the experts' output [N, M], the hidden layer before and after
    its activation [N, H] (tutel/experts/ffn.py), and the router's input in fp32. With dropout, a
    mask of one byte per hidden value is also kept.
    """
    rows = tokens * config.top_k
    values = rows * 2 * (config.model_dim + config.hidden_dim)
    masks = 0
    if config.hidden_dropout > 0:
        masks = rows * config.hidden_dim
    return values * dtype.itemsize + masks + tokens * config.model_dim * 4


def saved(layer: MoELayer, x: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes that a forward pass of the layer keeps for its backward pass, without parameters."""
    return kept_bytes(lambda: run(layer, x, dtype), layer.parameters())


def kept_bytes(
    forward: Callable[[], torch.Tensor], parameters: Iterable[torch.nn.Parameter]
) -> int:
    """Bytes that `forward` keeps for its backward pass, without parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    del y
    return sum(storages.values())


def run(layer: MoELayer, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        return layer(x)[0]


def forward_and_backward(layer: MoELayer, x: torch.Tensor, dtype: torch.dtype) -> None:
    run(layer, x, dtype).sum().backward()


def main() -> None:
    args = arguments()
    config = MoEConfig(
        args.size, args.size, 2, top_k=2, capacity_factor=0.0, hidden_dropout=args.dropout
    )
    layer = MoELayer(config).to(args.device)
    weights = sum(p.nbytes for p in layer.parameters())
    columns = ["tokens", "dtype", "counted", "counted, Tutel's", "saved", "peak", "with weights"]
    columns += ["published: Fairseq", "Tutel"]
    notes = [f"GiB; weights {weights / GIB:.2f}. Dropout {args.dropout:g}. Empty: not measured."]
    if args.size != SIZE:
        notes.append(f"M = H = {args.size}: not comparable with the published figures.")
    command = shlex.join(["python", "benchmarks/memory.py", *sys.argv[1:]])
    rows: list[list[str]] = []
    data: list[dict] = []
    table = Table("Memory of one MoE layer", command, columns, rows, notes, data)
    for dtype_name in args.dtypes:
        dtype = getattr(torch, dtype_name)
        for tokens, published in PUBLISHED.items():
            memory = {
                "tokens": tokens,
                "dtype": dtype_name,
                "dropout": args.dropout,
                "counted": counted(tokens, config, dtype, args.device),
                "counted, Tutel": counted_of_tutel(tokens, config, dtype),
            }
            if tokens in args.measure:
                x = torch.randn(tokens, args.size, device=args.device).requires_grad_()
                memory["saved"] = saved(layer, x, dtype)
                layer.zero_grad()
                step = partial(forward_and_backward, layer, x, dtype)
                memory["peak"] = working_memory(step, torch.device(args.device))
                layer.zero_grad()
                if memory["peak"] is not None:
                    memory["with weights"] = memory["peak"] + weights
            data.append(memory)
            names = ("counted", "counted, Tutel", "saved", "peak", "with weights")
            cells = [
                f"{memory[name] / GIB:.2f}" if memory.get(name) is not None else ""
                for name in names
            ]
            rows.append([f"{tokens:,}", dtype_name, *cells, *(f"{value}" for value in published)])
            keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    main()
