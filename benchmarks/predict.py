"""Predicted time and memory of an MoE layer on an H200, from bytes, FLOPs and launches.

    python benchmarks/predict.py

Nothing here is measured. A kernel takes the longest of: its bytes at the memory's speed, its tiles'
bytes at the L2 cache's, its FLOPs at the share of the peak that products reach, and 2 us. A pass
takes the sum of its kernels, or the host's time for its launches (counted by launches.py) if that
is longer. "Before" is commit f972cac.
"""

# T tokens, E experts, K top-k (1), N rows, M model dim, H hidden dim

import argparse
from itertools import product
from typing import NamedTuple

import torch
from memory import counted

from moe_core import MoEConfig
from moe_core.ops.moe_ffn.triton import Tile, tiles
from moe_core.parallel.machine import PROFILES

M, H, CAPACITY = 512, 2048, 1.25
GOALS = {18432: "0.80", 73728: "0.90"}  # relative to the dense network's speed
# NVIDIA H200 SXM data sheet: 989 TFLOP/s dense bf16, 67 fp32, 4.8 TB/s
MACHINE = PROFILES["h200"]  # gives the bandwidth and the host's time for a launch, 5 us
PEAK, PEAK_FP32, SHARED_MEMORY = 989e12, 67e12, 232448
# Assumed shares of the peaks that cuBLAS reaches in large products and in thin fp32 products.
REACHED, REACHED_FP32 = 0.65, 0.5
L2_BANDWIDTH = 6.1e12  # 65% (assumed) of 5,120 bytes a clock (A100 white paper) at 1.83 GHz
SHORTEST = 2e-6  # seconds of the shortest kernel, including the gap to the next one
# instructions per value after the last product, counted in the code for sm_90
GELU, SLOPE, HASH = 33, 45, 13
CUBLAS_TILE = (256, 256)  # two programs of 128 x 256 share the tiles that they read


class Kernel(NamedTuple):
    """A kernel, or several short ones."""

    name: str
    num_bytes: float = 0.0  # bytes read from and written to memory
    flops: float = 0.0  # on tensor cores, including rows that only fill tiles
    tile: tuple[int, int] = CUBLAS_TILE
    instructions: float = 0.0  # executed after the products
    # a second program fits on a multiprocessor (kernels.csv) and computes its product in the
    # meantime
    overlaps: bool = False
    flops_fp32: float = 0.0
    launches: int = 1

    @property
    def seconds(self) -> float:
        rows, columns = self.tile
        # A step of the product reads `rows + columns` half-precision values for `rows * columns`
        # multiplications.
        l2_bytes = self.flops * (rows + columns) / (rows * columns)
        compute = max(self.flops / (PEAK * REACHED), l2_bytes / L2_BANDWIDTH)
        end = self.instructions / (PEAK_FP32 / 2)  # a multiply-add counts as two FLOPs
        compute = max(compute, end) + min(compute, end) * (not self.overlaps)
        compute += self.flops_fp32 / (PEAK_FP32 * REACHED_FP32)
        return max(self.num_bytes / MACHINE.memory_bandwidth, compute, SHORTEST * self.launches)


class Case(NamedTuple):
    """A layer in bf16 on one rank, with K = 1 and equal loads."""

    tokens: int
    experts: int
    dropout: bool  # with probability 0.1
    commit: str = "now"

    @property
    def tiles(self) -> tuple[Tile, Tile]:
        rows = self.tokens / self.experts
        if self.commit == "before" and rows > 64:
            # such cases had tiles of 128 rows, as cases above 192 rows have now
            rows = max(rows, 192)
        return tiles(rows, M, SHARED_MEMORY)

    @property
    def wasted(self) -> float:
        """Share of the products' rows that only fill tiles: on average half of an expert's last
        tile."""
        half = self.tiles[0].rows / 2
        return half / (self.tokens / self.experts + half)

    @property
    def noise_bytes(self) -> int:
        """Bytes of dropout's stored noise, int16 [N, H]. Each pass writes or reads it once."""
        return 2 * self.tokens * H * (self.dropout and self.commit == "before")

    def end(self, activation: int) -> int:
        """Instructions after the first product, or after the gradient of the second product."""
        return self.tokens * H * (activation + HASH * (self.dropout and self.commit == "now"))


def forward(case: Case) -> list[Kernel]:
    t, e, w = case.tokens, case.experts, case.experts * M * H
    small, large = (tile[:2] for tile in case.tiles)
    flops, noise = 2 * t * M * H / (1 - case.wasted), case.noise_bytes
    hidden_bytes = 2 * (t * M + w + 2 * t * H) + noise
    kernels = [
        # the product has at least 16 columns
        Kernel("route_tokens_kernel", 6 * t * M, flops_fp32=2 * t * M * max(e, 16)),
        Kernel("plan and other short ones", launches=6),  # launches.py counts 12 in all
    ]
    if case.commit == "before":
        kernels = [
            Kernel("router's product", 4 * t * M, flops_fp32=2 * t * M * e),
            Kernel("softmax, top-K, loss", 8 * t * e),
            Kernel("cast of tokens", 6 * t * M),
            Kernel("plan and other short ones", launches=20),  # 28 in all
        ]
    kernels += [
        Kernel("casts of weights", 12 * w, launches=2),
        Kernel("hidden_kernel", hidden_bytes, flops, small, case.end(GELU), overlaps=True),
        Kernel("model_kernel", 2 * (t * H + w) + 4 * t * M, flops, large),
        Kernel("zeros of the output", 4 * t * M),
    ]
    if case.dropout:
        kernels.append(Kernel("noise or its seed", noise))
    return kernels


def backward(case: Case) -> list[Kernel]:
    t, e, w = case.tokens, case.experts, case.experts * M * H
    small, large = (tile[:2] for tile in case.tiles)
    flops = 2 * t * M * H / (1 - case.wasted)
    hidden_bytes = 2 * (t * M + w + 3 * t * H) + case.noise_bytes
    # In the weights' gradients rows are the contracted dimension, taken in steps of `depth`.
    flops_of_weights = 2 * (t + e * case.tiles[1].depth / 2) * M * H
    weights = Kernel("", 2 * t * (H + M) + 4 * w, flops_of_weights, large)
    router = [
        Kernel("zeros of the result", 2 * t * M),
        Kernel("route_tokens_backward_kernel", 6 * t * M, flops_fp32=2 * t * M * max(e, 16)),
        Kernel("router's product", 4 * t * M, flops_fp32=2 * t * M * e),
        Kernel("other short ones", launches=8),  # 17 in all
    ]
    if case.commit == "before":
        router = [
            Kernel("zeros and cast of the result", 8 * t * M, launches=2),
            Kernel("router's products", 8 * t * M, flops_fp32=4 * t * M * e, launches=2),
            Kernel("sum with the router's", 12 * t * M),
            Kernel("softmax, loss", 8 * t * e),
            Kernel("other short ones", launches=16),  # 28 in all
        ]
    return [
        Kernel("cast of the gradient", 6 * t * M),
        Kernel("hidden_grad_kernel", hidden_bytes, flops, small, case.end(SLOPE), small[0] == 64),
        weights._replace(name="weight_grad_kernel, w2"),
        weights._replace(name="weight_grad_kernel, w1"),
        Kernel("gate_grad_kernel", 2 * t * M),
        Kernel("model_kernel", 2 * (t * H + w + t * M), flops, large),
        *router,
    ]


def dense(tokens: int, dropout: bool) -> list[Kernel]:
    """Kernels of both passes of the dense network with equal MACs: torch's Linear, GELU, dropout,
    Linear, in eager mode under autocast."""
    t, w, hidden = tokens, M * H, 2 * tokens * H  # hidden: bytes of [T, H]
    kernels = 6 * [Kernel("product", 2 * t * (M + H) + 2 * w, 2 * t * M * H)]
    kernels += 2 * [Kernel("casts of tokens and weights", 6 * t * M + 12 * w, launches=5)]
    kernels.append(Kernel("GELU", 2 * hidden, instructions=GELU * t * H))
    kernels.append(Kernel("slope of GELU", 3 * hidden, instructions=SLOPE * t * H))
    kernels.append(Kernel("gradients of biases", hidden + 2 * t * M, launches=2))
    if dropout:  # reads and writes [T, H], and a mask of one byte per value
        kernels += 2 * [Kernel("dropout", 2.5 * hidden)]
    return kernels


def pass_seconds(kernels: list[Kernel]) -> float:
    """Seconds of a pass: those of the device or, if larger, of the host that launches the
    kernels."""
    host = sum(kernel.launches for kernel in kernels) * MACHINE.kernel_overhead
    return max(host, sum(kernel.seconds for kernel in kernels))


def kept_bytes(case: Case) -> tuple[float, float]:
    """Bytes of activations kept for the backward pass, here and in Tutel's layout, without copies
    of weights."""
    config = MoEConfig(M, H, case.experts, capacity_factor=CAPACITY)
    kept = counted(case.tokens, config, torch.bfloat16, "cuda") - 4 * case.experts * M * H
    # input and output [E, C, M], hidden layer before and after the activation and its mask [E, C,
    # H], and the router's input
    of_row = 2 * (2 * M + 2 * H) + H * case.dropout
    return kept + case.noise_bytes, CAPACITY * case.tokens * of_row + 4 * case.tokens * M


def summary(case: Case) -> str:
    """A row of the table."""
    ahead, back = pass_seconds(forward(case)), pass_seconds(backward(case))
    of_dense = pass_seconds(dense(case.tokens, case.dropout))
    kept, tutel = kept_bytes(case)
    name = f"{case.tokens:,} | {case.experts} | {case.dropout / 10:g} | {case.commit}"
    times = f"{ahead * 1e6:,.0f} | {back * 1e6:,.0f} | {of_dense * 1e6:,.0f}"
    ratio = f"{of_dense / (ahead + back):.2f} | {GOALS.get(case.tokens, '')}"
    of_peak = 12 * case.tokens * M * H / (ahead + back) / PEAK
    memory = f"{kept / 1e6:,.0f} | {kept / tutel:.2f}"
    return f"| {name} | {case.wasted:.0%} | {times} | {ratio} | {of_peak:.0%} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(GOALS), metavar="T")
    tokens = parser.parse_args().tokens
    print(
        "| T | E | dropout | | rows wasted | forward, us | backward, us | dense, both, us", end=""
    )
    print(" | of dense's speed | goal | of peak | kept, MB | of Tutel's |\n" + "| --- " * 13 + "|")
    for sizes in product(tokens, (8, 32), (False, True), ("before", "now")):
        print(summary(Case(*sizes)))
    moved = 4 * 2 * 2 * tokens[0] * M  # to the experts and back in both passes; read and written
    text = f"{moved / 1e6:,.0f} MB, {moved / MACHINE.memory_bandwidth * 1e6:,.0f} us, now none"
    print(f"\nPermutations of T = {tokens[0]:,} rows of other ranks, both passes: before {text}")
    for experts in (8, 32):
        case = Case(tokens[0], experts, dropout=True)
        print(f"\nT = {case.tokens:,}, E = {experts}, dropout 0.1\n")
        print("| kernel | launches | MB | GFLOP | us |\n" + "| --- " * 5 + "|")
        for k in forward(case) + backward(case):
            work = f"{k.num_bytes / 1e6:,.0f} | {(k.flops + k.flops_fp32) / 1e9:,.1f}"
            print(f"| {k.name} | {k.launches} | {work} | {k.seconds * 1e6:,.0f} |")


if __name__ == "__main__":
    main()
