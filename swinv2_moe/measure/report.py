"""A run, or two side by side, as one HTML page that needs nothing else: no network, no script, no
other file."""

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

_IMAGES = 8  # whose predictions are shown
_ROUTED = 4  # of them with the experts of their patches
_GUESSES = 3


class Prediction(NamedTuple):
    """One validation image; `guesses` are classes and their probabilities, the likeliest first."""

    image: str  # a data URL
    truth: str
    is_right: bool
    guesses: list[tuple[str, float]]


class Samples(NamedTuple):
    """What the run's newest checkpoint says of some images; `problem`: why it says nothing, or what
    may mislead."""

    predictions: Sequence[Prediction] = ()
    # a title and a data URL: the images, then one for each MoE layer
    routing: Sequence[tuple[str, str]] = ()
    problem: str = ""


def render(runs: Sequence[RunRecord], data: str | None = None, opts: Sequence[str] = ()) -> str:
    """The page of one run, or of two.

    Args:
        data: where the validation images lie now; None: where they lay in training. Without them,
            or without a whole checkpoint, the page says so in their place.
        opts: as in `open_deployed`.
    """
    folder = Path(__file__).parent
    template = Environment(loader=FileSystemLoader(folder), autoescape=True).get_template(
        "report.html.j2"
    )
    facts = [_facts(run) for run in runs]
    defaults, configs = dict(flatten(default_config())), [dict(flatten(run.config)) for run in runs]
    differing = [
        key for key, value in defaults.items() if any(config[key] != value for config in configs)
    ]
    return template.render(
        title=" beside ".join(run.name for run in runs),
        subtitle="; ".join(_status(run) for run in runs),
        labels=list(dict.fromkeys(label for found in facts for label in found)),
        runs=[
            {
                "name": run.name,
                "facts": found,
                "samples": take_samples(run, data, opts),
                "config": run.config.dump(),
                "environments": [_environment(run, i) for i in range(len(run.environments))],
            }
            for run, found in zip(runs, facts, strict=True)
        ],
        panels=draw_curves(runs),
        differences=[
            (key, defaults[key], [config[key] for config in configs]) for key in differing
        ],
        footer=f"Made by tools/report.py on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.",
    )


def take_samples(run: RunRecord, data: str | None = None, opts: Sequence[str] = ()) -> Samples:
    """Predictions, dropless, for validation images that are spread evenly over the data set."""
    dropless = ["MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.0"] if run.layers else []
    try:
        with open_deployed(str(run.directory), data, None, [*dropless, *opts]) as deployed:
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
    chosen = [
        dataset[i] for i in np.linspace(0, len(dataset) - 1, min(_IMAGES, len(dataset))).astype(int)
    ]
    chosen = [sample for sample in chosen if not sample.unreadable]
    if not chosen:
        return Samples(problem="No predictions: none of the images chosen for them can be read.")
    images = torch.stack([sample.image for sample in chosen])
    with record_choices(model) as choices, deployed.autocast():
        logits = model(images.to(deployed.world.device))
    pictures = columns(
        images,
        {name: ids.cpu() for name, ids in choices.items()},
        data.mean,
        data.std,
    )
    titles = ["images", *(place(name) for name in choices)]
    known = deployed.source.meta["class_names"] or sources.class_names
    return Samples(
        _predictions(
            chosen, pictures[0], logits.float().softmax(1).cpu(), sources.class_names, known
        ),
        [(title, _data_url(_row(p))) for title, p in zip(titles, pictures, strict=True)]
        if choices
        else [],
        renamed or "",
    )


def _predictions(
    samples: list[Sample], photos: np.ndarray, probs: Tensor, names: list[str], known: list[str]
) -> list[Prediction]:
    """`names`: the data's of the classes; `known`: the checkpoint's."""
    best = probs.topk(min(_GUESSES, probs.shape[1]))
    return [
        Prediction(
            _data_url(photo),
            names[sample.target],
            int(ids[0]) == sample.target,
            [(known[i], p) for i, p in zip(ids.tolist(), values.tolist(), strict=True)],
        )
        for sample, photo, values, ids in zip(samples, photos, *best, strict=True)
    ]


def _row(pictures: np.ndarray) -> np.ndarray:
    """[B, s, s, 3] -> the first four side by side, [s, 4 * s, 3]."""
    return np.concatenate(list(pictures[:_ROUTED]), axis=1)


def _data_url(picture: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _status(run: RunRecord) -> str:
    last = run.steps[-1]
    where = f"step {last['step']:,} of epoch {last['epoch']} of {run.config.TRAIN.EPOCHS}"
    state = "finished" if run.summary else f"not finished, last logged at {where}"
    cut = (
        f"; {run.damaged_lines} damaged lines of metrics.jsonl left out"
        if run.damaged_lines
        else ""
    )
    return f"{run.config.MODEL.TYPE}, {_experts(run)}; {state}{cut}"


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
    facts["loss, last logged"] = "not finite" if last["loss"] is None else f"{last['loss']:.3f}"
    if summary:
        facts["parameters"] = f"{summary['parameters'] / 1e6:.2f}M"
        facts["MACs an image"] = f"{summary['active_macs'] / 1e6:,.1f}M"
    facts["epochs, steps"] = f"{len(run.epochs):,}, {last['step']:,}"
    facts["images/s, training"] = f"{median(step['images_per_second'] for step in run.steps):,.0f}"
    if run.layers:
        facts["dropped tokens"] = f"{last['moe/dropped_share']:.2%}"
        facts["largest expert load"] = f"{last['moe/load_max']:.2f} × even"
    if run.epochs:  # the summary's time is that of the run's last part
        facts["training and validation"] = _duration(sum(epoch["seconds"] for epoch in run.epochs))
    if summary:
        facts["processes, device"] = f"{summary['world_size']}, {summary['device']}"
    return facts


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
