"""Inference of small batches as CUDA graphs: the network with experts and its dense twin, replayed
beside their usual passes in the same rounds.

    python benchmarks/graph.py                     (under a minute on two cores)

A CPU has no graphs: it measures the usual passes alone.
"""

import shlex
import sys

from model import CONFIGS, make_parser
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed

from swinv2_moe.command import run_command
from swinv2_moe.config import all_sections
from swinv2_moe.measure.cuda_graph import capture
from swinv2_moe.measure.spread import median_and_spread, ratios
from swinv2_moe.measure.throughput import prepare, prepared_for_inference
from swinv2_moe.measure.throughput_options import Options
from swinv2_moe.measure.throughput_plan import Combination, combinations
from swinv2_moe.train.distributed import open_world

BATCHES = (1, 8)
NOT_MEASURED = "not measured"


def measure(combination: Combination, config, rounds: int, device: str) -> dict:
    """Milliseconds of a pass in each round: "eager" and, on a GPU, "graph"."""
    with open_world(device, config.TIMEOUT) as world:
        subject = prepare("inference", all_sections(config), world)
        with prepared_for_inference([subject]):
            alternatives = {"eager": subject.run}
            if device == "cuda":
                alternatives["graph"] = capture(subject.run, str(combination))
            return timed(alternatives, rounds, device)


def main() -> None:
    args = make_parser(__doc__).parse_args()
    command = shlex.join(["python", "benchmarks/graph.py", *sys.argv[1:]])
    columns = ["", "ms, eager", "ms, graph", "graph / eager"]
    rows: list[list[str]] = []
    data: list[dict] = []
    table = Table("Inference as CUDA graphs", command, columns, rows, (CALLS_NOTE,), data)
    options = Options(("inference",), tuple(args.batch_sizes or BATCHES), tuple(args.dtypes))
    opts = [*args.opts, "DEVICE", args.device]
    file = args.cfg or CONFIGS[args.device]
    for combination, *configs in combinations(file, opts, options):
        for kind, config in zip(("experts", "dense"), configs, strict=True):
            times = measure(combination, config, args.rounds, args.device)
            name = f"{combination}, {kind}"
            cells = [median_and_spread(times["eager"], 2), NOT_MEASURED, NOT_MEASURED]
            if "graph" in times:
                cells[1] = median_and_spread(times["graph"], 2)
                cells[2] = median_and_spread(ratios(times["graph"], times["eager"]), 3)
            rows.append([name, *cells])
            data.append({"name": name, **{key: list(t) for key, t in times.items()}})
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    run_command(main)
