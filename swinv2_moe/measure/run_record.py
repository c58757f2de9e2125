"""What a run directory holds, read back: configuration, logged steps, epochs, environment, summary."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from swinv2_moe.config import config_from_text
from swinv2_moe.errors import UserError


@dataclass(frozen=True)
class RunRecord:
    """A run that has logged at least one step; keys as `swinv2_moe.engine.record` writes them.

    `steps`, `epochs` and `environments` (one for each part of a resumed run) are in the order of their `step`.
    """

    directory: Path
    config: CfgNode
    steps: list[dict]
    epochs: list[dict]
    environments: list[dict]
    summary: dict | None  # None: the run has not ended
    damaged_lines: int  # of metrics.jsonl: a run that was killed may have left one

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def layers(self) -> list[str]:
        """The MoE layers' names, from the input to the output; none for a dense model."""
        return list(self.steps[-1].get("moe_layers", {}))

    def curve(self, value: Callable[[dict], Any]) -> tuple[list[int], list]:
        """Steps and `value` of each logged step that has one."""
        return _curve(self.steps, value)

    def load(self, layer: str) -> tuple[list[int], list[list[float]]]:
        """Steps and each expert's load in an MoE layer; 1 is an even share of the tokens."""
        return self.curve(lambda step: step.get("moe_layers", {}).get(layer, {}).get("load"))

    def epoch_curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps at the ends of epochs and what the epochs say for `key`."""
        return _curve(self.epochs, lambda epoch: epoch.get(key))


def read_run(directory: Path) -> RunRecord:
    """The run in `directory`.

    Raises:
        UserError: no run is there, it has not logged a step yet, or what it holds is not readable.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: is not a run directory")
    lines = _read(directory / "metrics.jsonl", f"{directory}: holds no run (no metrics.jsonl)").splitlines()
    entries = [entry for entry in map(_parse, lines) if entry is not None and "step" in entry]
    steps = [entry for entry in entries if "loss" in entry]
    if not steps:
        raise UserError(f"{directory}: metrics.jsonl has no logged step (of {len(lines)} lines); has the run begun?")
    text = _read(directory / "config.yaml", f"{directory}: holds no config.yaml")
    return RunRecord(
        directory,
        config_from_text(text, str(directory / "config.yaml")),
        steps,
        [entry for entry in entries if "val_top1" in entry],
        [entry["environment"] for entry in entries if "environment" in entry],
        _read_summary(directory / "summary.json"),
        len(lines) - len(entries),
    )


def _read_summary(file: Path) -> dict | None:
    if not file.exists():
        return None
    summary = _parse(_read(file, missing=f"{file}: has just vanished"))
    if summary is None:
        raise UserError(f"{file}: is damaged, it does not hold a JSON object")
    return summary


def _read(file: Path, missing: str) -> str:
    try:
        return file.read_text()
    except FileNotFoundError as error:
        raise UserError(missing) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error


def _parse(line: str) -> dict | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _curve(entries: list[dict], value: Callable[[dict], Any]) -> tuple[list[int], list]:
    found = [(entry["step"], y) for entry in entries if (y := value(entry)) is not None]
    return [step for step, _ in found], [y for _, y in found]
