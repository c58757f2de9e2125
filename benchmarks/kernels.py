"""What each kernel costs: of one MoE layer beside a dense network of equal active FLOPs, or of
SwinV2-MoE beside its dense twin, in training and in inference, by torch's profiler.

    python benchmarks/kernels.py layer             (18432x512x8 and 18432x512x32 on a GPU)
    python benchmarks/kernels.py network           (the options of model.py; 2 minutes on two cores)
    python benchmarks/kernels.py layer --compile --architecture 90    (needs no GPU)
    ncu --clock-control none python benchmarks/kernels.py layer --bare

On a CPU these are torch's operators. `the pass` is its time without the profiler: on a GPU, what
the kernels leave of it is time in which the device waits for the host. --compile only compiles the
kernels, on all cores (ahead.py), with --architecture for a GPU that is not here. --bare runs each
pass twice and times nothing, for other profilers and for compute-sanitizer.
"""

import gc
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from ahead import SHARED_MEMORY, compile_works, without_a_gpu
from layer import Case, shapes_of
from model import make_parser, plans
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from torch.profiler import ProfilerActivity, profile

from moe_core import prepared
from swinv2_moe.commands.call import run_command
from swinv2_moe.config import all_sections
from swinv2_moe.measure.spread import median_and_spread
from swinv2_moe.measure.throughput import prepare, prepared_for_inference
from swinv2_moe.ranks.world import open_world

SHAPES = ["18432x512x8", "18432x512x32"]
SHOWN = 25  # the largest; the numbers in the JSON file have all
COLUMNS = ["pass", "kernel", "launches", "us", "of all kernels"]

Passes = Iterator[tuple[str, Callable[[], object]]]  # with names


class Kernel(NamedTuple):
    name: str
    launches: float  # of a pass
    microseconds: float  # of a pass


def layers(args) -> Passes:
    """Passes of the layer and of the dense network, of each shape and mode."""
    for shape, dtype in ((s, d) for s in shapes_of(args.shapes) for d in args.dtypes):
        kernels = "triton" if args.architecture else "auto"
        check = not args.compile
        case = Case(shape, dtype, args.device, peers=(), check=check, kernels=[kernels])
        x, names = case.x.detach(), case.in_same_dtype()
        if args.architecture:
            names = list(case.layers)
        for name in names:
            label = f"{'x'.join(map(str, shape))}, {dtype}, {name}"
            yield f"{label}, training", partial(case.gradients, name)
            case.layer.eval()
            with prepared(case.layer), torch.no_grad():
                yield f"{label}, inference", partial(case.alternatives[name], x)
            case.layer.train()


def networks(args) -> Passes:
    """Passes of the network with experts and of its dense twin, in each combination."""
    for plan in plans(args):
        for combination, *configs in plan:
            for name, config in zip(("experts", "dense"), configs, strict=True):
                with open_world(args.device, config.TIMEOUT) as world:
                    sections = all_sections(config)  # not as a graph: the names of its kernels
                    eager = replace(sections, train=replace(sections.train, graph=False))
                    subject = prepare(combination.mode, eager, world)
                    with prepared_for_inference([subject]):
                        yield f"{combination}, {name}", subject.run
                    del subject
                gc.collect()  # DDP keeps a model in a reference cycle


def profiled(run: Callable[[], object], passes: int, device: str) -> list[Kernel]:
    """The kernels of a pass on a GPU, or the operators on a CPU, in order of their times."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    run()
    with profile(activities=activities) as profiler:
        for _ in range(passes):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
    kernels = []
    for event in profiler.key_averages():
        is_kernel = event.device_type.name == device.upper() and not event.is_user_annotation
        time = event.self_cpu_time_total
        if device == "cuda":
            time = event.self_device_time_total
        if is_kernel and time:
            kernels.append(Kernel(event.key, event.count / passes, time / passes))
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def rows(label: str, kernels: list[Kernel], milliseconds) -> Iterator[list[str]]:
    """The whole pass, all kernels together, and the kernels that take the most time."""
    total = sum(kernel.microseconds for kernel in kernels)
    launches = sum(kernel.launches for kernel in kernels)
    whole = [1e3 * time for time in milliseconds]
    yield [label, "the pass", "", median_and_spread(whole, 0), ""]
    for name, count, time in [Kernel("all kernels", launches, total), *kernels[:SHOWN]]:
        yield [label, name[:90], f"{count:.0f}", f"{time:.1f}", f"{time / total:.1%}"]


def measure(args, passes: Passes) -> None:
    command = shlex.join(["python", "benchmarks/kernels.py", *sys.argv[1:]])
    lines: list[list[str]] = []
    data: list[dict] = []
    title = f"Kernels of a {args.what}"
    table = Table(title, command, COLUMNS, lines, [CALLS_NOTE], data)
    for label, run in passes:
        times = timed({label: run}, args.rounds, args.device)[label]
        kernels = profiled(run, args.passes, args.device)
        lines += rows(label, kernels, times)
        data.append({"pass": label, "ms": list(times), "kernels": kernels})
        keep(table, args.device, args.output)
        print(f"{label}: done", file=sys.stderr, flush=True)
    publish(table, args.device, args.output)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=["layer", "network"])
    parser.add_argument("--shapes", nargs="+", metavar="TxMxE[xK[xH]]", default=SHAPES)
    parser.add_argument("--passes", type=int, default=3, help="under the profiler")
    parser.add_argument("--bare", action="store_true", help="run each pass twice, and end")
    parser.add_argument("--compile", action="store_true", help="compile all kernels, and end")
    parser.add_argument("--architecture", type=int, choices=SHARED_MEMORY,
                        help="with --compile, of a GPU that is not here")  # fmt: skip
    parser.set_defaults(dtypes=["bfloat16"])
    args = parser.parse_args()
    passes = networks(args)
    if args.what == "layer":
        passes = layers(args)
    if args.architecture:
        if not args.compile or args.what != "layer":
            parser.error("--architecture goes with layer --compile")
        without_a_gpu(args.architecture)
        args.device = "cpu"
    if args.compile:
        compile_works(run for _, run in passes)
    elif args.bare:
        for label, run in passes:
            for _ in range(2):
                run()
            print(label, flush=True)
    else:
        measure(args, passes)


if __name__ == "__main__":
    run_command(main)
