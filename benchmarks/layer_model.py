"""The time of a MoE layer and of its dense network on a GPU, from what bounds its kernels.

The programs of a kernel share the multiprocessors (SMs), and the SM with the most programs ends
last. A program fills its pipeline (prologue). Its main loop takes the longer of its products and
its bytes from memory. Then come the longer of its instructions and its bytes. A CUDA graph takes
the sum of its kernels and of the gaps between them. Eager mode takes as long, or the host's time
for all launches if that is longer. The L2 cache is left out: on an H100 the kernels read from it
faster than copies of 8 MiB do, so that these are no bound (docs/log.md, "Predicted without the L2
cache").

Modelled are layers of plain experts in bf16 on one rank, and torch's dense network of equal FLOPs,
both under autocast, as layer.py measures them. Names and launches are those that kernels.py lists.
"""

# T tokens, E experts, K top-k, N rows, M model dim, H hidden dim

import math
from collections.abc import Iterator
from typing import NamedTuple

from layer import LAYER, Shape, completed

from moe_core.ops.blocks import cdiv
from moe_core.ops.ffn.triton import Tile, tiles

GELU, SLOPE = 33, 45  # instructions of a value after the product, counted in code for sm_90
FLOPS_OF_INSTRUCTION = 32  # of the tensor cores, while all lanes execute one; sm_80 and sm_90


class Machine(NamedTuple):
    """What bounds a kernel. Rates are bytes or FLOPs a second."""

    sms: int
    shared_memory: int
    copy: float
    library: float  # cuBLAS
    grouped: float  # own products: as F.grouped_mm and cuBLAS
    large: float  # a large product
    shortest: float  # microseconds, as the following
    gap: float
    prologue: float
    partial: float  # what an expert's partial tile of rows adds, 0 to 1 tile
    host: dict[str, float]  # microseconds of a launch, by network


class Kernel(NamedTuple):
    """A kernel, or several short ones."""

    name: str
    num_bytes: float = 0.0  # of memory, in the main loop
    end_bytes: float = 0.0  # of memory, after it
    instructions: float = 0.0  # after it
    programs: float = 0.0
    program_flops: float = 0.0
    resident: int = 1  # programs that an SM runs at a time
    library_flops: float = 0.0  # of cuBLAS, whose rate includes waves and ends
    launches: int = 1

    def microseconds(self, machine: Machine) -> float:
        work = rounds(self.programs, machine.sms) * machine.sms
        loop = max(
            self.library_flops / machine.library + work * self.program_flops / machine.grouped,
            self.num_bytes / machine.copy,
        )
        end = max(
            self.instructions * FLOPS_OF_INSTRUCTION / machine.large,
            self.end_bytes / machine.copy,
        )
        waves = rounds(self.programs, machine.sms * self.resident)
        time = 1e6 * (loop + end) + waves * machine.prologue
        return max(time, self.launches * machine.shortest)


def rounds(programs: float, places: int) -> int:
    """How many programs the place with the most of them runs."""
    return math.ceil(programs / places)


def layer_kernels(shape: Shape, machine: Machine, training: bool) -> Iterator[Kernel]:
    t, m, e, k, h = completed(shape)
    n, w = t * k, e * m * h
    small, large = tiles(n / e, m, machine.shared_memory)
    blocks = math.ceil(n / small.rows) + e * machine.partial

    def product(name: str, tile: Tile, width: int, depth: int, *work, **others) -> Kernel:
        programs = blocks * cdiv(width, tile.columns)
        flops = 2 * tile.rows * tile.columns * depth
        return Kernel(name, *work, programs, flops, **others)

    def to_tokens(of_number: int) -> Iterator[Kernel]:
        """The second product, with `of_number` bytes of a result."""
        end = of_number * t * m
        if k > 1:
            yield Kernel("sums of rows", 2 * n * m, end)
            end = 2 * n * m
        yield product("model_kernel", large, m, h, 2 * (n * h + w), end, 0)

    yield Kernel("route_kernel", 4 * t * m, 2 * t * m)
    yield Kernel("plan, sums of the loss", launches=6)
    if training:
        yield Kernel("casts of weights", 12 * w, launches=2)
    first, written = 2 * (n * m + w), 2 * n * h * (1 + training)
    yield product("hidden_kernel", small, h, m, first, written, GELU * n * h, resident=2)
    yield from to_tokens(4)
    if not training:
        return
    yield Kernel("rows gathered", 10 * n * m, launches=2)
    yield product("hidden_grad_kernel", small, h, m, first, 6 * n * h, SLOPE * n * h, resident=2)
    yield from 2 * [weight_grad(n, m, e, h, machine)]
    yield Kernel("gate_grad_kernel", 2 * n * m)
    yield from to_tokens(2)
    yield Kernel("route_backward_kernel", 6 * t * m)
    yield Kernel("gradient of the router's weight", 4 * t * m)
    yield Kernel("sums of blocks, zeros", launches=5)


def weight_grad(n: int, m: int, e: int, h: int, machine: Machine) -> Kernel:
    of_other_products, large = tiles(math.inf, m, machine.shared_memory)
    tile = large if machine.shared_memory >= 200_000 else of_other_products
    rows = n / e + tile.depth * machine.partial
    return Kernel(
        "weight_grad_kernel",
        2 * n * (h + m),
        4 * e * m * h,
        programs=e * cdiv(h, tile.rows) * cdiv(m, tile.columns),
        program_flops=2 * tile.rows * tile.columns * rows,
    )


def dense_kernels(shape: Shape, machine: Machine, training: bool) -> Iterator[Kernel]:
    """Of torch's Linear, GELU, Linear with the width of K experts."""
    t, m, _, k, h = completed(shape)
    h *= k
    yield from (6 if training else 2) * [Kernel("product", library_flops=2 * t * m * h)]
    yield Kernel("cast of tokens", 6 * t * m)
    yield Kernel("casts of weights, fills", 12 * m * h, launches=6)
    yield Kernel("GELU", 4 * t * h)
    if training:
        yield Kernel("casts of gradients", 12 * t * m, launches=2)
        yield Kernel("slope of GELU", 6 * t * h)
        yield Kernel("gradients of biases", 2 * t * (h + m), launches=2)
        yield Kernel("casts of weights' gradients, fills", 12 * m * h, launches=10)


KERNELS = {LAYER: layer_kernels, "dense": dense_kernels}


def milliseconds(
    shape: Shape, name: str, training: bool, is_graph: bool, machine: Machine
) -> float:
    """The time of a forward pass, in training with the backward pass; `name` is one of KERNELS."""
    kernels = list(KERNELS[name](shape, machine, training))
    launches = sum(kernel.launches for kernel in kernels)
    time = sum(kernel.microseconds(machine) for kernel in kernels) + launches * machine.gap
    if not is_graph:
        time = max(time, launches * machine.host[name])
    return time / 1e3
