"""How long a MoE layer and its dense network should take on a GPU, from its measured ceilings.

    python benchmarks/predict.py CEILINGS.json                           (needs no GPU)
    python benchmarks/predict.py CEILINGS.json --against RESULTS.json    (each measured row)
    python benchmarks/predict.py CEILINGS.json --h200    (ceilings of an H100 SXM: its memory's rate
                                                          is raised to an H200's)

CEILINGS.json is a file of ceilings.py, or a campaign.json. If it also has kernels.py's rows of a
layer of at most 256 tokens, they give the host's time for a launch; otherwise that is guessed from
`a + a`. layer_model.py has the model.

Expected is what medians of the ceilings give, low and high what their quartiles give. All ceilings
are taken to be low together, as if the device's clock were.
"""

# T tokens, E experts, K top-k, M model dim, H hidden dim

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from ahead import SHARED_MEMORY
from campaign_sections import SHAPES_128, SHAPES_512
from layer import LAYER, Shape, completed, shapes_of
from layer_model import KERNELS, Machine, milliseconds
from results_file import Table

from swinv2_moe.commands.call import run_command
from swinv2_moe.errors import UserError
from swinv2_moe.measure.spread import quartiles

DEVICES = {  # SMs, bytes of shared memory of a program; the first name that fits
    "H100 PCIe": (114, SHARED_MEMORY[90]),
    "H100": (132, SHARED_MEMORY[90]),
    "H200": (132, SHARED_MEMORY[90]),
    "A100": (108, SHARED_MEMORY[80]),
}
H200_MEMORY = 4.8 / 3.35  # of an H100 SXM's rate; NVIDIA's data sheets
# Times in microseconds: low, expected, high
SHORTEST = (1.0, 2.0, 4.0)  # a kernel that moves little
GAP = (0.5, 1.5, 2.5)  # between two kernels
PROLOGUE = (0.5, 0.7, 1.0)  # until a program's first operands have come from memory
# The host's time for a launch in times of `a + a`, if it was not measured: Triton's launcher takes
# 16 on a CPU without a GPU. The others are guesses.
HOST_LAUNCH = {LAYER: (5, 15, 40), "dense": (1, 3, 6)}
HOST_TOKENS = 256  # at most; a layer of so few takes the host's time
COLUMNS = ["TxMxE(xK(xH))", "", "low - expected - high, ms", "speed to dense"]

Range = tuple[float, float, float]  # low, expected and high times, or what gives them


class Ceilings:
    """The ceilings in a file.

    Raises:
        UserError: the file cannot be read or lacks a ceiling, or its device is not known.
    """

    def __init__(self, file: Path, h200: bool = False) -> None:
        self.file, tables = file, tables_of(file)
        self.memory = H200_MEMORY if h200 else 1.0
        found = [table for table in tables if table["title"] == "Ceilings"]
        if not found:
            raise UserError(f"{file} has no ceilings: run benchmarks/ceilings.py on the GPU")
        self.entries, self.device = found[-1]["data"], found[-1]["environment"]["device"]
        self.passes = [row for table in tables for row in table["data"] if "kernels" in row]
        name = next((part for part in DEVICES if part in self.device), None)
        if name is None:
            known = ", ".join(DEVICES)
            raise UserError(f"{file}: the device {self.device!r} is not one of {known}")
        if h200 and name != "H100":
            raise UserError(f"--h200: {file} is of {self.device!r}, not of an H100 SXM")
        self.sizes = DEVICES[name]
        if h200:
            self.device = f"an H200, from ceilings of {self.device}"

    def machines(self, shape: Shape) -> list[Machine]:
        """Those of the low, the expected and the high times of a shape."""
        t, m, _, _, h = completed(shape)
        own = f"{t}x{m}x{h}, "
        ranges: tuple[Range, ...] = (
            tuple(self.memory * rate for rate in self.rates(r"copy of \d{3,} MiB")),
            self.rates(f"{own}dense", r"\S+, dense"),
            self.rates(own, r"\S+, (dense|grouped)"),
            self.rates("large matrix product"),
            SHORTEST,
            GAP,
            PROLOGUE,
            (0, 0.5, 1),
        )
        hosts = {name: self.host(name) for name in KERNELS}
        return [
            Machine(*self.sizes, *values, {name: times[i] for name, times in hosts.items()})
            for i, values in enumerate(zip(*ranges, strict=True))
        ]

    def rates(self, *patterns: str) -> Range:
        """High, median and low, of the ceilings whose names match the first possible pattern."""
        for pattern in patterns:
            rows = [row for row in self.entries if re.match(pattern, row["name"])]
            if rows:
                found = [1e3 * row["amount"] / time for row in rows for time in row["ms"]]
                low, middle, high = quartiles(found)
                return high, middle, low
        raise UserError(f"{self.file} lacks a ceiling: {patterns[0]}")

    def host(self, name: str) -> Range:
        """Microseconds of the host for a launch."""
        times = []
        for row in self.passes:
            shape, _, of, _ = row["pass"].split(", ")
            if of == name and shapes_of([shape])[0][0] <= HOST_TOKENS:
                launches = sum(count for _, count, _ in row["kernels"])
                times += [1e3 * time / launches for time in row["ms"]]
        if times:
            return quartiles(times)
        plain = [1e3 * t for row in self.entries if row["name"] == "a + a" for t in row["ms"]]
        if not plain:
            raise UserError(f"{self.file} lacks a ceiling: a + a")
        pairs = zip(quartiles(plain), HOST_LAUNCH[name], strict=True)
        low, middle, high = (time * factor for time, factor in pairs)
        return low, middle, high


def tables_of(file: Path) -> list[dict]:
    """The tables of a file of results, or of a campaign, with those numbers that have times.

    Raises:
        UserError: the file cannot be read, or is of another kind.
    """
    try:
        content = json.loads(file.read_text())
        parts = content["sections"].values() if "sections" in content else [content]
        tables = [table for part in parts for table in part["tables"].values()]
        for table in tables:
            table["title"], table["environment"]["device"]  # KeyError without them
            table["data"] = [row for row in table["data"] or [] if "ms" in row]
            if not all(time > 0 for row in table["data"] for time in row["ms"]):
                raise ValueError(table["title"])
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no file of results or of a campaign") from error
    return tables


def times_of(ceilings: Ceilings, shape: Shape, name: str, *modes: bool) -> list[float]:
    """Low, expected and high milliseconds. The modes are: training, and as a CUDA graph."""
    return [milliseconds(shape, name, *modes, machine) for machine in ceilings.machines(shape)]


def cells(ceilings: Ceilings, shape: Shape, name: str, training: bool, is_graph: bool) -> list[str]:
    low, expected, high = times_of(ceilings, shape, name, training, is_graph)
    _, dense, _ = times_of(ceilings, shape, "dense", training, is_graph)
    mode = f"{'training' if training else 'inference'}, {'graph' if is_graph else 'eager'}"
    times = f"{low:.3f} - {expected:.3f} - {high:.3f}"
    return ["x".join(map(str, shape)), f"{name}, {mode}", times, f"{dense / expected:.2f}"]


def compared(ceilings: Ceilings, table: dict) -> Iterator[list[str]]:
    """The rows of a table of layer.py that are modelled, with what was measured."""
    for row in table["data"]:
        if "timing" not in row or row["name"] not in KERNELS or row["dtype"] != "bfloat16":
            continue
        if "sigmoid" in row["shape"]:  # of earlier files: its gates took torch's own kernels
            continue
        modes = row["pass"] == "training", row["timing"] == "graph replay"
        subject = tuple(row["shape"]), row["name"], *modes
        low, expected, high = times_of(ceilings, *subject)
        time = median(row["ms"])
        verdict = "inside"
        if not low <= time <= high:
            verdict = "outside"
        measured = f"{time:.3f} ({time / expected - 1:+.0%})"
        speed = f"{1 / median(row['ratio']):.2f}"
        yield [*cells(ceilings, *subject), measured, speed, verdict]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ceilings", type=Path, metavar="CEILINGS.json")
    parser.add_argument("--against", type=Path, metavar="RESULTS.json", help="of layer.py")
    parser.add_argument("--shapes", nargs="+", metavar="TxMxE[xK[xH]]",
                        default=[SHAPES_128, SHAPES_512])  # fmt: skip
    parser.add_argument("--h200", action="store_true", help="an H200, from an H100's ceilings")
    args = parser.parse_args()
    if args.h200 and args.against:
        parser.error("--h200 is of a device that was not measured: leave out --against")
    ceilings = Ceilings(args.ceilings, args.h200)
    command = shlex.join(["python", "benchmarks/predict.py", *sys.argv[1:]])
    if not args.against:
        rows = [
            cells(ceilings, shape, name, training, is_graph)
            for shape in shapes_of(args.shapes) for name in KERNELS
            for training in (False, True) for is_graph in (False, True)
        ]  # fmt: skip
        print(Table(f"Predicted, {ceilings.device}", command, COLUMNS, rows).markdown())
        return
    columns = [*COLUMNS, "measured (to expected)", "speed to dense", ""]
    found: dict[str, list[list[str]]] = {}
    for table in tables_of(args.against):
        device = table["environment"]["device"]
        if device != ceilings.device:
            raise UserError(f"{args.against} is of {device}, the ceilings are of {ceilings.device}")
        found.setdefault(table["title"], []).extend(compared(ceilings, table))
    if not any(found.values()):
        raise UserError(f"{args.against} has no rows of benchmarks/layer.py in bfloat16")
    for title, rows in found.items():
        if rows:
            inside = sum(row[-1] == "inside" for row in rows)
            notes = [f"{inside} of {len(rows)} rows are inside"]
            print(Table(title, command, columns, rows, notes).markdown())


if __name__ == "__main__":
    run_command(main)
