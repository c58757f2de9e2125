"""Where the time of a training step and of an inference pass goes, in SwinV2-MoE and its dense
twin.

    python benchmarks/shares.py                    (about 2 minutes on two cores)

On a GPU the time of every kernel, under the operator that launched it; what is left of the pass,
timed without the profiler, is when the device waits. On a CPU the time of every operator and
autograd node without those it calls; the rest is Python.
"""

import re
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from model import make_parser, plans
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import moe_core.layer
from moe_core import MoELayer
from swinv2_moe.command import run_command
from swinv2_moe.config import all_sections
from swinv2_moe.measure.rounds import synchronize
from swinv2_moe.measure.throughput import prepare, prepared_for_inference
from swinv2_moe.measure.throughput_report import headline
from swinv2_moe.train.distributed import World, open_world

# Kinds, as patterns for an operator's name. If operators call each other, the outermost operator
# with a kind determines it.
EXPERTS, EXPERTS_REST, PRODUCTS = "experts: products", "experts: besides", "other matrix products"
ROUTING, REST, IDLE, PASS = (
    "routing and plan",
    "element-wise and sums",
    "no kernel, no operator",
    "the pass",
)
KINDS = {
    # autograd calls an operator GeneratedBackwardFor_ followed by its name
    EXPERTS: r"(moe_core::|GeneratedBackwardFor_moe_core_)(expert|moe)_ffn(_backward|_default)?",
    # operators that the experts' operator calls besides products
    EXPERTS_REST: r"moe_core::dropout_(noise|seed)",
    PRODUCTS: r"aten::(linear|matmul|mm|addmm|bmm|baddbmm|_grouped_mm|conv\w*)",
    "attention": r"aten::_?scaled_dot_product_\w+|swinv2_moe::\w+",
    ROUTING: ROUTING,
    "dispatch and combine": r"moe_core::(dispatch|combine|sum)_rows(_backward)?",
    "normalisation": r"aten::(native_)?layer_norm(_backward)?",
    "optimiser": r"Optimizer\..*",
    "copies": r"aten::(copy_|to|_to_copy|clone|contiguous|cat|roll)",
    REST: "",
}

Shares = dict[str, dict[str, float]]  # kind -> kernel or operator -> ms of a pass


@contextmanager
def routing_is_named() -> Iterator[None]:
    """A context in which torch's operators for routing and plan in an MoE layer appear under one
    name in the profile."""
    with ExitStack() as stack:
        for owner, name in (
            (MoELayer, "_route"),
            (MoELayer, "_plan"),
            (moe_core.layer, "round_to_tiles"),
        ):
            stack.enter_context(
                mock.patch.object(owner, name, record_function(ROUTING)(getattr(owner, name)))
            )
        yield


def profiled(run: Callable[[], object], passes: int, device: torch.device) -> tuple[Shares, float]:
    """The shares of a pass, and its milliseconds under the profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with routing_is_named(), profile(activities=activities, acc_events=True) as profiler:
        synchronize()
        start = time.perf_counter()
        for _ in range(passes):
            run()
        synchronize()
        milliseconds = 1e3 * (time.perf_counter() - start) / passes
    return shares(profiler.events(), passes, device.type), milliseconds


def shares(events: Iterable[FunctionEvent], passes: int, device_type: str) -> Shares:
    """Milliseconds of a pass for each kind. The backward pass of an operator has the same kind as
    the operator."""
    by_kind: Shares = {kind: defaultdict(float) for kind in KINDS}
    on_device = 0.0  # ms of all kernels
    kinds: dict[int, str | None] = {}
    # kind, by the sequence number that an operator shares with its backward pass
    differentiated: dict[int, str | None] = {}
    # parents first
    for event in sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end)):
        own = _kind(event, kinds.get(id(event.cpu_parent)), differentiated)
        kinds[id(event)] = own
        # such an event may have a copy of its kernels' time
        if event.is_user_annotation and device_type == "cuda":
            continue
        if event.device_type != torch.autograd.DeviceType.CPU:
            on_device += event.time_range.elapsed_us() / 1e3 / passes
            continue
        times = [(event.name, event.self_cpu_time_total)]
        if device_type == "cuda":
            times = [(kernel.name, kernel.duration) for kernel in event.kernels]
        for name, microseconds in times:
            by_kind[own or REST][name] += microseconds / 1e3 / passes
    if on_device:
        by_kind[REST]["kernels of no operator"] = on_device - sum(
            sum(times.values()) for times in by_kind.values()
        )
    return by_kind


def _kind(
    event: FunctionEvent, parent: str | None, differentiated: dict[int, str | None]
) -> str | None:
    """The kind of an event; None: not known yet, its children may determine it."""
    named = next((kind for kind, names in KINDS.items() if re.fullmatch(names, event.name)), None)
    own = parent or named
    if parent in (EXPERTS, EXPERTS_REST):
        own = EXPERTS if named in (EXPERTS, PRODUCTS) else EXPERTS_REST
    # this event encloses the backward pass of the operator with this number
    if event.name.startswith("autograd::"):
        return own or differentiated.get(event.sequence_nr)
    if event.sequence_nr >= 0 and event.scope == 0:  # RecordScope::FUNCTION
        # of several operators with one number, the last is the differentiable one
        differentiated[event.sequence_nr] = own
    return own


def measure(
    mode: str, configs: list, rounds: int, passes: int, world: World
) -> dict[str, tuple[Shares, float]]:
    """The shares of a pass and its milliseconds, for the model with experts and the dense model."""
    subjects = {
        name: prepare(mode, all_sections(config), world)
        for name, config in zip(("experts", "dense"), configs, strict=True)
    }
    runs = {name: subject.run for name, subject in subjects.items()}
    measured = {}
    with prepared_for_inference(subjects.values()):
        times = timed(runs, rounds, world.device.type)
        for name, run in runs.items():
            parts, milliseconds = profiled(run, passes, world.device)
            # the profiler slows down a host that launches kernels; if the host computes, both are
            # from the same passes
            measured[name] = (
                parts,
                statistics.median(times[name]) if world.device.type == "cuda" else milliseconds,
            )
    return measured


def rows(measured: dict[str, tuple[Shares, float]]) -> Iterator[list[str]]:
    """Yield a row for each kind: milliseconds of both models with their shares of the pass, and the
    difference."""
    columns = []
    for parts, whole in measured.values():
        column = {kind: sum(times.values()) for kind, times in parts.items()}
        columns.append(column | {IDLE: whole - sum(column.values()), PASS: whole})
    experts, dense = columns
    for kind in experts:
        cells = [text for c in columns for text in (f"{c[kind]:.2f}", f"{c[kind] / c[PASS]:.1%}")]
        yield [kind, *cells, f"{experts[kind] - dense[kind]:+.2f}"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--passes", type=int, default=3, help="under the profiler")
    parser.set_defaults(dtypes=["bfloat16"])
    args = parser.parse_args()
    columns = ["", "kind", "experts, ms", "of the pass", "dense, ms", "of the pass"]
    columns.append("experts - dense, ms")
    command = shlex.join(["python", "benchmarks/shares.py", *sys.argv[1:]])
    lines: list[list[str]] = []
    data: list[dict] = []
    notes = ["a kernel that computes products and activation in one is under its products"]
    notes.append(CALLS_NOTE)
    table = Table("Where a pass's time goes", command, columns, lines, notes, data)
    for plan in plans(args):
        title = headline(plan, 1)
        if title not in notes:
            notes.insert(0, title)
        for combination, *configs in plan:
            with open_world(args.device, configs[0].TIMEOUT) as world:
                measured = measure(combination.mode, configs, args.rounds, args.passes, world)
            lines += [[str(combination), *row] for row in rows(measured)]
            data.append(combination._asdict() | measured)
            keep(table, args.device, args.output)
            print(f"{combination}: done", file=sys.stderr, flush=True)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    run_command(main)
