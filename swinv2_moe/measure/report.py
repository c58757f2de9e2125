"""Report of one run, or of two side by side, as one HTML page without scripts or other files."""

import base64
import io
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader
from PIL import Image
from torch import Tensor

from swinv2_moe.config import default_config, flatten, model_config
from swinv2_moe.data.datasets import ImageDataset, Sample
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.curves import draw_curves, place
from swinv2_moe.measure.run_record import RunRecord
from swinv2_moe.train.deployed import Deployed, open_deployed
from swinv2_moe.train.routing import columns, record_choices

_IMAGES = 8  # validation images with predictions
_ROUTED = 4  # images with the experts of their patches
_GUESSES = 3  # classes of a prediction


class Prediction(NamedTuple):
    """One validation image. `guesses`: classes and probabilities, the most probable first."""

    image: str  # a data URL
    truth: str
    is_right: bool
    guesses: list[tuple[str, float]]


class Samples(NamedTuple):
    """Predictions of the run's newest checkpoint.

    `problem`: why there are none, or a warning about them.
    """

    predictions: Sequence[Prediction] = ()
    # a title and a data URL: the images, then one for each MoE layer
    routing: Sequence[tuple[str, str]] = ()
    problem: str = ""


def render(runs: Sequence[RunRecord], data: str | None = None, opts: Sequence[str] = ()) -> str:
    """The page of one run, or of two.

    Args:
        data: the validation images; None: those of the training. Without images or a complete
            checkpoint, the page has a message in place of the predictions.
        opts: as in `open_deployed`.
    """
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    template = environment.get_template("report.html.j2")
    sections = [_section(run, data, opts) for run in runs]
    labels: dict[str, None] = {}  # of the facts of all runs, in order
    for section in sections:
        labels |= dict.fromkeys(section["facts"])
    return template.render(
        title=" beside ".join(run.name for run in runs),
        subtitle="; ".join(_status(run) for run in runs),
        labels=list(labels),
        runs=sections,
        panels=draw_curves(runs),
        differences=_differences(runs),
        footer=f"Made by tools/report.py on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.",
    )


def _section(run: RunRecord, data: str | None, opts: Sequence[str]) -> dict:
    """The page's values for one run."""
    return {
        "name": run.name,
        "facts": _facts(run),
        "strategies": _strategies(run),
        "samples": take_samples(run, data, opts),
        "config": run.config.dump(),
        "environments": [_environment(run, i) for i in range(len(run.environments))],
    }


def _differences(runs: Sequence[RunRecord]) -> list[tuple[str, object, list]]:
    """Configuration keys that are not at their default: key, default, value of each run."""
    configs = [flatten(run.config) for run in runs]
    differences = []
    for key, default in flatten(default_config()).items():
        values = [config[key] for config in configs]
        if any(value != default for value in values):
            differences.append((key, default, values))
    return differences


def take_samples(run: RunRecord, data: str | None = None, opts: Sequence[str] = ()) -> Samples:
    """Dropless predictions for validation images, evenly spaced over the data set."""
    opts = list(opts)
    if run.layers:
        opts = ["MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.0"] + opts
    try:
        with open_deployed(str(run.directory), data, None, opts) as deployed:
            return _predict(deployed)
    except UserError as error:
        return Samples(problem=f"No predictions: {error}")


@torch.inference_mode()
def _predict(deployed: Deployed) -> Samples:
    data = deployed.data
    sources = load_sources(data)
    renamed = deployed.compare_classes(sources.class_names)
    model = deployed.model(len(sources.class_names))
    dataset = ImageDataset(sources.val, data, is_train=False)
    indices = np.linspace(0, len(dataset) - 1, min(_IMAGES, len(dataset))).astype(int)
    samples = [dataset[i] for i in indices]
    samples = [sample for sample in samples if not sample.unreadable]
    if not samples:
        return Samples(problem="No predictions: none of the images chosen for them can be read.")
    images = torch.stack([sample.image for sample in samples])
    with record_choices(model) as choices, deployed.autocast():
        logits = model(images.to(deployed.world.device))
    probs = logits.float().softmax(1).cpu()
    choices = {name: ids.cpu() for name, ids in choices.items()}
    pictures = columns(images, choices, data.mean, data.std)
    class_names = deployed.source.meta["class_names"] or sources.class_names
    predictions = _predictions(samples, pictures[0], probs, sources.class_names, class_names)
    routing = []
    if choices:
        titles = ["images"] + [place(name) for name in choices]
        for title, column in zip(titles, pictures, strict=True):
            routing.append((title, _data_url(_row(column))))
    return Samples(predictions, routing, renamed or "")


def _predictions(
    samples: list[Sample],
    photos: np.ndarray,
    probs: Tensor,
    data_names: list[str],
    model_names: list[str],
) -> list[Prediction]:
    """The most probable classes of each image.

    Args:
        photos: uint8 [B, s, s, 3].
        probs: [B, classes].
        data_names: class names of the data set.
        model_names: class names of the checkpoint.
    """
    best = probs.topk(min(_GUESSES, probs.shape[1]))
    all_ids, all_probs = best.indices.tolist(), best.values.tolist()
    predictions = []
    for i, sample in enumerate(samples):
        guesses = [
            (model_names[class_id], prob)
            for class_id, prob in zip(all_ids[i], all_probs[i], strict=True)
        ]
        is_right = all_ids[i][0] == sample.target
        truth = data_names[sample.target]
        predictions.append(Prediction(_data_url(photos[i]), truth, is_right, guesses))
    return predictions


def _row(pictures: np.ndarray) -> np.ndarray:
    """[B, s, s, 3] -> the first four side by side, [s, 4 * s, 3]."""
    return np.concatenate(list(pictures[:_ROUTED]), axis=1)


def _data_url(picture: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _status(run: RunRecord) -> str:
    state = "finished"
    if not run.summary:
        last = run.steps[-1]
        epochs = f"epoch {last['epoch']} of {run.config.TRAIN.EPOCHS}"
        state = f"not finished, last logged at step {last['step']:,} of {epochs}"
    damaged = ""
    if run.damaged_lines:
        damaged = f"; {run.damaged_lines} damaged lines of metrics.jsonl left out"
    return f"{run.config.MODEL.TYPE}, {_experts(run)}; {state}{damaged}"


def _experts(run: RunRecord) -> str:
    layer = model_config(run.config).experts.layer
    if layer is None or not run.layers:
        return "dense"
    return f"{layer.num_experts} experts in {len(run.layers)} layers, top {layer.top_k}"


def _facts(run: RunRecord) -> dict[str, str]:
    """The key figures by their labels."""
    summary, last = run.summary or {}, run.steps[-1]
    facts = {}
    if run.epochs:
        facts["top-1, last"] = f"{run.epochs[-1]['val_top1']:.2f}%"
        facts["top-1, best"] = f"{max(epoch['val_top1'] for epoch in run.epochs):.2f}%"
        if run.has_top5:
            facts["top-5, last"] = f"{run.epochs[-1]['val_top5']:.2f}%"
    facts["loss, last logged"] = "not finite"
    if last["loss"] is not None:
        facts["loss, last logged"] = f"{last['loss']:.3f}"
    if summary:
        facts["parameters"] = f"{summary['parameters'] / 1e6:.2f}M"
        facts["MACs an image"] = f"{summary['active_macs'] / 1e6:,.1f}M"
    facts["epochs, steps"] = f"{len(run.epochs):,}, {last['step']:,}"
    facts["images/s, training"] = f"{median(step['images_per_second'] for step in run.steps):,.0f}"
    if run.layers:
        facts["dropped tokens"] = f"{last['moe/dropped_share']:.2%}"
        facts["largest expert load"] = f"{last['moe/load_max']:.2f} × even"
    if run.epochs:  # The summary has only the time since the run was last resumed.
        facts["training and validation"] = _duration(sum(epoch["seconds"] for epoch in run.epochs))
    if summary:
        facts["processes, device"] = f"{summary['world_size']}, {summary['device']}"
    return facts


def _strategies(run: RunRecord) -> list[tuple[str, str, str, str, str]]:
    """The time line of the tuner: step, layers, event, strategy, milliseconds."""
    rows = []
    for entry in run.strategies:
        event = entry["strategy"]
        if event["event"] == "time":
            continue
        strategy = event["to"]
        if event["from"] not in (None, strategy):
            strategy = f"{event['from']} → {strategy}"
        times = [event["ms_before"], event["ms"]]
        milliseconds = " → ".join(f"{time:.2f}" for time in times if time is not None)
        rows.append(
            (f"{entry['step']:,}", event["layers"], event["event"], strategy, milliseconds or "-")
        )
    return rows


def _environment(run: RunRecord, index: int) -> dict:
    facts = dict(run.environments[index])
    part = ""
    if len(run.environments) > 1:
        part = f", part {index + 1}"
    return {
        "title": f"{run.name}{part}",
        "facts": {key: value for key, value in facts.items() if value is not None},
    }


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s"
