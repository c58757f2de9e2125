"""Summary of a checkpoint's content, with a check of its files."""

from dataclasses import dataclass
from pathlib import Path

from swinv2_moe.checkpoints.checkpoint import checkpoints_below, damage_of, read_meta
from swinv2_moe.config import config_from_text, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.models.section import ModelConfig


@dataclass(frozen=True)
class Summary:
    """Content of a checkpoint; sizes in bytes."""

    directory: str
    step: int
    epoch: float | None  # for example 2.5 in the middle of the third epoch; None: weights only
    saved: str
    model: str
    classes: int | None  # None: the checkpoint has no class names
    # "weights", "ema", "optimizer/exp_avg": number of files, size
    sections: dict[str, tuple[int, int]]
    layers: dict[str, "Layer"]
    damaged: dict[str, str]  # problem by file


@dataclass(frozen=True)
class Layer:
    """The experts of one MoE layer, in the weights."""

    experts: int
    bytes: int


def summarize(path: Path) -> Summary:
    """Summarize a checkpoint directory, or the newest checkpoint of a run.

    Every file is read to compare its checksum.

    Raises:
        UserError: there is no checkpoint.
        DamagedError: meta.json is damaged.
    """
    directory = path
    checkpoints = checkpoints_below(path / "checkpoints")
    if checkpoints:
        directory = checkpoints[0]
    if not (directory / "meta.json").is_file():
        raise UserError(f"checkpoint {path}: holds no checkpoint (a directory with meta.json)")
    meta = read_meta(directory)
    step, files = meta["step"], meta["files"]
    damaged = {}
    for name, record in sorted(files.items()):
        problem = damage_of(directory, name, record)
        if problem:
            damaged[name] = problem
    layers = {}
    for name, experts in meta["experts"].items():
        layers[name] = Layer(len(experts), _size(files, f"experts/{name}/"))
    return Summary(
        str(directory),
        step,
        _epoch(meta["training"]),
        meta["saved"],
        describe_model(model_config(config_from_text(meta["config"], f"checkpoint {directory}"))),
        len(meta["class_names"]) or None,
        _sections(files),
        layers,
        damaged,
    )


def _epoch(training: dict | None) -> float | None:
    if training is None:
        return None
    if "iter" in training:  # of a detector
        return training["epoch"]
    return round(training["epoch"] + training["epoch_step"] / training["steps_per_epoch"], 3)


def describe_model(config: ModelConfig) -> str:
    """Type, sizes and experts of a model in one line."""
    layer, trunk = config.experts.layer, config.trunk
    sizes = [f"{name} {_joined(getattr(trunk, key))}" for name, key in trunk.sizes.items()]
    sizes += [text for text in (config.name, config.args) if text]
    experts = "dense"
    if layer is not None:
        experts = f"{layer.num_experts} experts, top-{layer.top_k}, {layer.router} router"
    return f"{config.type}, {', '.join(sizes)}, {config.img_size} px, {experts}"


def _joined(value: object) -> str:
    """2 as "2", (2, 2, 18, 2) as "2-2-18-2"."""
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return str(value)


def _sections(files: dict[str, dict]) -> dict[str, tuple[int, int]]:
    sections: dict[str, tuple[int, int]] = {}
    for name, record in files.items():
        parts = name.split("/")
        section = {"ema": "ema", "optimizer": "/".join(parts[:2])}.get(parts[0], "weights")
        count, size = sections.get(section, (0, 0))
        sections[section] = (count + 1, size + record["bytes"])
    return sections


def _size(files: dict[str, dict], prefix: str) -> int:
    return sum(record["bytes"] for name, record in files.items() if name.startswith(prefix))
