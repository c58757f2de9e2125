"""Where the time of a training step and of an inference pass goes, in SwinV2-MoE and its dense
twin.

    python benchmarks/shares.py                    (about 2 minutes on two cores)

The phases are those of tools/roofline.py (swinv2_moe.measure.phases); the trunk's operators are
divided by their names. On a GPU a time is of the kernels, and what is left of a pass, timed without
the profiler, is when the device waits. On a CPU it is of the operators; the rest is Python.
"""

import re
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator

from model import make_parser, plans
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed

from swinv2_moe.commands.call import run_command
from swinv2_moe.config import all_sections
from swinv2_moe.measure.phases import operators
from swinv2_moe.measure.throughput import Subject, headline, prepare, prepared_for_inference
from swinv2_moe.train.distributed import World, open_world

REST, IDLE, PASS = "element-wise and sums", "no kernel, no operator", "the pass"
KINDS = {  # of the trunk's operators, as patterns for their names
    "attention": r"aten::_?scaled_dot_product_\w+|swinv2_moe::\w+|aten::(bmm|_\w*softmax\w*)",
    "other matrix products": r"aten::(linear|matmul|mm|addmm|conv\w*)",
    "normalisation": r"aten::(native_)?layer_norm(_backward)?",
    "copies": r"aten::(copy_|to|_to_copy|clone|contiguous|cat|roll)",
    REST: "",
}
PHASES = ("experts", "router", "dispatch", "optimiser")

Shares = dict[str, dict[str, float]]  # kind -> operator -> ms of a pass


def shares(subject: Subject, passes: int, device: str) -> Shares:
    """Milliseconds of a pass by kind and operator."""
    by_kind: Shares = {kind: defaultdict(float) for kind in (*PHASES, *KINDS)}
    for _ in range(passes):
        for phase, name, milliseconds in operators(subject.model, subject.run, device):
            kind = phase
            if phase == "trunk":
                kind = next((kind for kind in KINDS if re.fullmatch(KINDS[kind], name)), REST)
            by_kind[kind][name] += milliseconds / passes
    return by_kind


def measure(
    mode: str, configs: list, rounds: int, passes: int, world: World
) -> dict[str, tuple[Shares, float]]:
    """The shares of a pass and its milliseconds, for the model with experts and the dense model."""
    subjects = {
        name: prepare(mode, all_sections(config), world)
        for name, config in zip(("experts", "dense"), configs, strict=True)
    }
    runs = {name: subject.run for name, subject in subjects.items()}
    device = world.device.type
    with prepared_for_inference(subjects.values()):
        times = timed(runs, rounds, device)
        return {
            name: (shares(subject, passes, device), statistics.median(times[name]))
            for name, subject in subjects.items()
        }


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
    notes = [CALLS_NOTE]
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
