"""Read a run directory: configuration, logged steps, epochs, environment and summary."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from moe_core.files import open_regular
from swinv2_moe.config import config_from_text
from swinv2_moe.errors import UserError
from swinv2_moe.files import MAX_LINE, other_runs, read_bounded
from swinv2_moe.forms import COUNT, NUMBER, TEXT, fits, record
from swinv2_moe.measure.run_entries import parse, parse_entry

_MAX_BYTES = 1 << 20  # of config.yaml and summary.json
_SUMMARY = record(
    {"parameters": NUMBER, "active_macs": NUMBER, "world_size": COUNT, "device": TEXT}
)


@dataclass(frozen=True)
class RunRecord:
    """A run that has logged at least one step; keys as `swinv2_moe.train.record` writes them.

    `steps`, `epochs` and `environments` (one for each part of a resumed run) are in the order of
    their `step`.
    """

    directory: Path
    name: str
    config: CfgNode
    steps: list[dict]
    epochs: list[dict]
    environments: list[dict]
    summary: dict | None  # None: the run has not ended
    damaged_lines: int  # in metrics.jsonl; a run that was killed may leave one
    # `step` and `strategy`: decisions of a tuner
    strategies: Sequence[dict] = ()

    @property
    def layers(self) -> list[str]:
        """The MoE layers' names, from the input to the output; none for a dense model."""
        return list(self.steps[-1].get("moe_layers", {}))

    @property
    def has_top5(self) -> bool:
        """Whether top-5 is informative: with at most five classes it is always 100%."""
        return any(epoch["val_top5"] < 100 for epoch in self.epochs)

    def curve(self, value: Callable[[dict], Any]) -> tuple[list[int], list]:
        """Steps and `value` of each logged step that has one."""
        return _curve(self.steps, value)

    def load(self, layer: str) -> tuple[list[int], list[list[float]]]:
        """Steps and each expert's load in an MoE layer; 1 is an even share of the tokens."""

        def values(step: dict) -> list[float] | None:
            layers = step.get("moe_layers", {})
            if layer not in layers:
                return None
            return layers[layer]["load"].tolist()

        return self.curve(values)

    def epoch_curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps at the ends of epochs and the epochs' values of `key`."""
        return _curve(self.epochs, lambda epoch: epoch.get(key))


class NotBegunError(UserError):
    """A run that has not logged a step yet."""


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """Read several runs, as `read_run`. The runs' names are the last parts of their paths, as many
    as needed to distinguish them."""
    paths = [directory.resolve().parts for directory in directories]
    depth = _distinguishing_depth(paths)
    runs = []
    for directory, path in zip(directories, paths, strict=True):
        runs.append(replace(read_run(directory), name="/".join(path[-depth:])))
    return runs


def _distinguishing_depth(paths: Sequence[tuple[str, ...]]) -> int:
    """The number of last parts that distinguishes the paths; 1 if the paths are equal."""
    for depth in range(1, max(map(len, paths))):
        if len({path[-depth:] for path in paths}) == len(paths):
            return depth
    return 1


def read_run(directory: Path) -> RunRecord:
    """Read the run in `directory`.

    Raises:
        NotBegunError: the run has not logged a step yet.
        UserError: the directory has no run, or the run cannot be read.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: is not a run directory")
    entries, num_lines = _read_entries(directory)
    steps = [entry for entry in entries if "loss" in entry]
    epochs = [entry for entry in entries if "val_top1" in entry]
    if not steps:
        raise NotBegunError(
            f"{directory}: metrics.jsonl has no logged step (of {num_lines} lines); has the run"
            " begun?"
        )
    text = _read(directory / "config.yaml", f"{directory}: holds no config.yaml")
    if not text.strip():  # an empty file would be read as the default configuration
        raise UserError(f"{directory / 'config.yaml'}: is empty")
    return RunRecord(
        directory,
        directory.resolve().name,
        config_from_text(text, str(directory / "config.yaml")),
        steps,
        epochs,
        [entry["environment"] for entry in entries if "environment" in entry],
        read_summary(directory / "summary.json"),
        num_lines - len(entries),
        [entry for entry in entries if "strategy" in entry],
    )


def _read_entries(directory: Path) -> tuple[list[dict], int]:
    """The entries of metrics.jsonl and the number of its lines.

    The file is read line by line and the entries share their keys: memory grows by about twice the
    size of the file.
    """
    file = directory / "metrics.jsonl"
    entries = []
    keys: dict[str, str] = {}
    num_lines = 0
    try:
        with open_regular(file) as lines:
            while line := lines.readline(MAX_LINE):
                num_lines += 1
                entry = parse_entry(line)
                if entry:
                    entries.append(_compact(entry, keys))
    except FileNotFoundError as error:
        reason = f"holds no run (no metrics.jsonl){other_runs(directory)}"
        raise UserError(f"{directory}: {reason}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    return entries, num_lines


def _compact(entry: dict, keys: dict[str, str]) -> dict:
    """The entry with shared keys and, of each MoE layer, only the load, as an array of numbers."""
    compact = {keys.setdefault(key, key): value for key, value in entry.items()}
    if "moe_layers" in entry:
        compact["moe_layers"] = {
            keys.setdefault(name, name): {"load": array("d", layer["load"])}
            for name, layer in entry["moe_layers"].items()
        }
    return compact


def read_summary(file: Path) -> dict | None:
    """The summary of a run; None if it has none.

    Raises:
        UserError: the summary cannot be read.
    """
    if not file.exists():
        return None
    summary = parse(_read(file, missing=f"{file}: has just vanished"))
    if not fits(_SUMMARY, summary):
        raise UserError(f"{file}: is damaged, it does not hold what a run's summary holds")
    return summary


def _read(file: Path, missing: str) -> str:
    try:
        return read_bounded(file, _MAX_BYTES).decode(errors="replace")
    except FileNotFoundError as error:
        raise UserError(missing) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error})") from error


def _curve(entries: list[dict], value: Callable[[dict], Any]) -> tuple[list[int], list]:
    steps, values = [], []
    for entry in entries:
        y = value(entry)
        if y is not None:
            steps.append(entry["step"])
            values.append(y)
    return steps, values
