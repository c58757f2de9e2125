"""Train a detector on a folder of labelled photographs: look, choose, time, train, measure.

What is chosen depends on the number of pictures, the sizes of objects, and the speed of a few steps
on this machine.
"""

import copy
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from swinv2_moe.detection import registry  # first: it reports missing packages in one line

# isort: split

import numpy as np
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.dist import broadcast
from mmengine.registry import init_default_scope

from moe_core import cpu_computes_in
from swinv2_moe.config import as_opts, load_config, model_config
from swinv2_moe.data.labels import Labelled, read_folder
from swinv2_moe.detection import run as runs
from swinv2_moe.detection.recipe import FILE, Recipe, mmengine_config, read_recipe
from swinv2_moe.errors import UserError
from swinv2_moe.files import make_directory, new_file, write_json
from swinv2_moe.models.build import model_arguments
from swinv2_moe.models.bundled import PREFIX
from swinv2_moe.output import print_lines
from swinv2_moe.ranks.world import open_world
from swinv2_moe.start.defaults import choose_weights, output_for
from swinv2_moe.tables import in_words

MINUTES = 30.0
_SIZES = (128, 192, 256, 320, 384, 416)  # longer sides of what the detector may see
_LEAST_SIDE = 12  # pixels that nine tenths of the objects should have
_ENLARGED = 1.5  # pictures are not enlarged beyond this
_PASSES = 16_000  # pictures of a training, in all
_EPOCHS = (20, 300)
_OTHERS = 0.2  # share of pictures of another orientation that makes the canvas square
_FEW_EPOCHS = 8  # below this number a smaller size is better
_RATE, _RATE_BATCH = 1e-3, 4
_VALIDATED = 0.1  # share of the training's time that validations may take, beside the last one
_VALIDATIONS = 10  # at most
_LESS_ZOOM = (40, [0.8, 1.25])  # in fewer passes, which learn faster so
_STEPS, _SECONDS = 5, 20.0  # limits of timing
_SPARE = 0.9  # share of the minutes that is planned


class Given(NamedTuple):
    """What the user has set; None: it is chosen. `size` is the longer side."""

    epochs: int | None = None
    size: int | None = None
    batch: int | None = None
    lr: float | None = None
    weights: str | None = None
    minutes: float | None = None


class Times(NamedTuple):
    """Seconds of a training step and of the validation of a batch."""

    step: float
    validation: float


def parse_given(values: Mapping[str, object]) -> Given:
    """The values of options, as text or numbers.

    Raises:
        UserError: a value of the wrong type, or not above 0.
        TypeError: an unknown name.
    """
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in Given._fields:
            raise TypeError(f"no option {name!r}; there are {', '.join(Given._fields)}")
        if value is None or name == "weights":
            parsed[name] = value
            continue
        kind = float if name in ("lr", "minutes") else int
        try:
            number = kind(str(value))
        except ValueError:
            what = "a number" if kind is float else "a whole number"
            raise UserError(f"--{name} is {value}, it must be {what}") from None
        if not 0 < number < 1e9:
            raise UserError(f"--{name} is {value}, it must be above 0")
        parsed[name] = number
    if parsed.get("size") is not None and not 64 <= parsed["size"] <= 2048:
        raise UserError(f"--size is {parsed['size']}, it must be 64 to 2048 pixels")
    return Given(**parsed)


def fit(
    data: str, output: str | None = None, given: Given | None = None, began: float = 0.0
) -> Path:
    """Train a detector on a folder.

    Args:
        output: the run; None: `output/` and the folder's name.
        began: `time.time()` at the program's start; 0: now.

    Returns:
        The run.

    Raises:
        UserError: pictures or labels that cannot be used (`read_folder`), weights that do not
            exist, `output` holds a run or cannot be written.
    """
    run = Path(output or output_for(data))
    began, chosen = began or time.time(), given or Given()
    if (run / FILE).exists():
        raise UserError(
            f"--output {run}: already holds a run; `swinv2-moe detect train {run}` continues it,"
            " another directory starts anew"
        )
    if Path(data).expanduser().resolve() in run.resolve().parents:
        raise UserError(
            f"--output {run}: lies in the folder of pictures ({data}), which would be read again;"
            " name a directory outside of it"
        )
    with open_world() as world:

        def prepare() -> tuple[Recipe, Labelled] | None:
            return _prepare(data, run, chosen, world.size) if world.is_main else None

        def plan() -> Recipe | None:
            if prepared is None:
                return None
            elapsed = time.time() - began
            recipe, lines = within_minutes(*prepared, times, chosen, world.size, elapsed)
            print_lines(*lines, flush=True)
            recipe.write(run)
            return recipe

        prepared = world.on_every_rank(prepare)
        first = world.agree(prepared and prepared[0])
        assert first is not None
        # by all ranks: the loss takes means over them
        times = world.on_every_rank(lambda: measure_times(mmengine_config(first, run)))
        recipe = world.agree(world.on_every_rank(plan))
        assert recipe is not None
        runs.train(mmengine_config(recipe, run), None, world)
    return run


def resume(run: Path) -> Path:
    """Continue the training of a run, from its newest checkpoint if it has one.

    Raises:
        UserError: no run, or one that cannot be continued.
    """
    recipe = read_recipe(run)
    if not os.path.isdir(recipe.data):
        raise UserError(f"{run}: its pictures are not in {recipe.data} any more")
    runs.train(mmengine_config(recipe, run), "auto")
    return run


def _prepare(data: str, run: Path, given: Given, ranks: int) -> tuple[Recipe, Labelled]:
    labelled = read_folder(os.path.expanduser(data))
    print_lines(*labelled.lines(), flush=True)
    recipe, lines = choose(labelled, given, ranks)
    print_lines(*lines, flush=True)
    make_directory(run / "data")
    for split, content in labelled.splits.items():
        write_json(run / "data" / f"{split}.json", content)
    if labelled.left_out:
        with new_file(run / "data" / "left_out.txt") as file:
            file.write("".join(f"{line}\n" for line in labelled.left_out).encode())
    return recipe, labelled


def choose(labelled: Labelled, given: Given, ranks: int = 1) -> tuple[Recipe, list[str]]:
    """The recipe with the most epochs that a folder may need, and a line about each choice."""
    images = labelled.splits["train"]["images"]
    count = len(images)
    size, size_line = _size(labelled, given.size)
    batch = given.batch or min(_RATE_BATCH, 1 << max(0, (count // (8 * ranks)).bit_length() - 1))
    epochs = given.epochs or min(max(_EPOCHS[0], round(_PASSES / count)), _EPOCHS[1])
    backbone, weights_line = _backbone(given.weights)
    lr = given.lr or float(f"{_RATE * (batch * ranks / _RATE_BATCH) ** 0.5:.2g}")
    dtype = "bfloat16" if torch.cuda.is_available() or cpu_computes_in("bfloat16") else None
    lines = [
        "detector: GFL, a single-stage one that is quick on a CPU; other detectors of mmdetection"
        " take a configuration",
        weights_line,
        size_line,
        f"batch {batch}: {_why(given.batch, 'at least 8 steps an epoch, at most 4 pictures')}",
        f"lr {lr:g}: {_why(given.lr, 'AdamW, 1e-3 for 4 pictures, with the root of their number')}",
        f"precision {dtype or 'fp32'}: the fastest of this machine",
    ]
    data = os.path.abspath(labelled.root)
    recipe = Recipe(data, labelled.class_names, size, backbone, batch, epochs, lr, dtype)
    return recipe, lines


def _why(given: object, reason: str) -> str:
    return reason if given is None else "given"


def _size(labelled: Labelled, given: int | None) -> tuple[list[int], str]:
    """Width and height of what the detector sees, and the reason."""
    content = labelled.splits["train"]
    sides = {row["id"]: (row["width"], row["height"]) for row in content["images"]}
    longer = np.array([max(side) for side in sides.values()])
    shares = [
        (row["bbox"][2] * row["bbox"][3]) ** 0.5 / max(sides[row["image_id"]])
        for row in content["annotations"]
    ]
    share = float(np.quantile(shares, 0.1))
    allowed = [side for side in _SIZES if side <= _ENLARGED * np.median(longer)] or [_SIZES[0]]
    side = next((one for one in allowed if one * share >= _LEAST_SIDE), allowed[-1])
    if side < 256 <= allowed[-1]:
        side = 256  # the backbone needs some of the surroundings, too
    reason = f"nine tenths of the objects have at least {share * side:.0f} px there"
    if share * side < _LEAST_SIDE:
        reason = f"the largest: a tenth of the objects have less than {share * side:.0f} px there"
    if given is not None:
        side, reason = given, "given"
    size = canvas(side, list(sides.values()))
    return size, f"size {size[0]} x {size[1]} px: {reason}"


def canvas(side: int, sides: Sequence[tuple[int, int]]) -> list[int]:
    """Width and height, multiples of 32, with this longer side and the pictures' usual shape: a
    square if a fifth of them are of another orientation than most."""
    ratios = np.array([width / height for width, height in sides])
    ratio = float(np.median(ratios))
    if min((ratios > 1).mean(), (ratios < 1).mean()) >= _OTHERS:
        ratio = 1.0
    ratio = min(max(ratio, 0.5), 2.0)
    width, height = (side, side / ratio) if ratio >= 1 else (side * ratio, side)
    return [max(64, 32 * round(one / 32)) for one in (width, height)]


def _backbone(weights: str | None) -> tuple[dict[str, Any], str]:
    """The backbone's arguments, and a line about its weights."""
    # the package's own, a SwinV2; a classifier's best start may be another network
    named = weights if weights not in (None, "none") else f"{PREFIX}tiny"
    chosen = choose_weights({"MODEL.PRETRAINED": named}, num_train=0)
    if "MODEL.SWINV2.DEPTHS" not in chosen.keys:
        raise UserError(
            f"--weights {weights}: a detector's backbone is a SwinV2, with or without experts"
        )
    keys = {key: value for key, value in chosen.keys.items() if key != "MODEL.UPCYCLE"}
    config = model_config(load_config(None, as_opts(keys)))
    arguments = model_arguments(config, 0)
    for name in ("img_size", "in_chans", "num_classes"):
        del arguments[name]
    arguments["drop_path_rate"] = 0.0  # short trainings
    if arguments["num_experts"]:
        arguments["moe"] = arguments["moe"] | {"capacity_factor": 0.0}  # no token is dropped
    arguments["model"] = config.type
    line = chosen.line
    if weights == "none":
        line = "weights: random, as --weights says"
    elif chosen.name:
        arguments["pretrained"] = chosen.name
    return arguments, line


def measure_times(config: Config) -> Times:
    """Time steps of a detector that is thrown away, on the training's own pictures."""
    init_default_scope("mmdet")
    registry.runner.quiet_readers()
    torch.manual_seed(0)
    detector = MODELS.build(copy.deepcopy(config.model))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    detector.to(device).train()
    optimiser = torch.optim.AdamW(detector.parameters(), lr=0.0, fused=True)
    loader = registry.runner.MoERunner.build_dataloader(config.train_dataloader, seed=0)
    enabled = config.optim_wrapper.dtype is not None
    times: list[float] = []
    began = time.perf_counter()
    for batch in loader:
        started = time.perf_counter()
        data = detector.data_preprocessor(batch, True)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            losses = detector(**data, mode="loss")
        detector.parse_losses(losses)[0].backward()
        optimiser.step()
        optimiser.zero_grad()
        times.append(time.perf_counter() - started)
        enough = torch.tensor(len(times) > _STEPS or time.perf_counter() - began > _SECONDS)
        broadcast(enough)  # all ranks end together
        if enough:
            break
    if not times:
        raise UserError("fewer pictures than a batch can be read")
    reading = (time.perf_counter() - began - sum(times)) / len(times)
    detector.eval()
    started = time.perf_counter()
    with torch.inference_mode():
        detector(**detector.data_preprocessor(batch), mode="predict")
    validation = time.perf_counter() - started + reading
    # the first step may compile kernels; pictures are read once and then kept
    return Times(float(np.mean(times[1:] or times)) + 0.2 * reading, validation)


def within_minutes(
    recipe: Recipe, labelled: Labelled, times: Times, given: Given, ranks: int, elapsed: float
) -> tuple[Recipe, list[str]]:
    """The recipe with a size, time, validations and zoom for the minutes, and lines about them."""
    minutes = given.minutes or MINUTES
    counts = {name: len(content["images"]) for name, content in labelled.splits.items()}
    steps = math.ceil(counts["train"] / (recipe.batch * ranks))
    validation = math.ceil(counts["val"] / (recipe.batch * ranks)) * times.validation
    last = math.ceil(counts.get("test", counts["val"]) / recipe.batch) * times.validation
    lines = []

    def time_of(size: list[int]) -> tuple[float, float]:
        """The seconds of training, and how many passes fit into them."""
        scale = float(np.prod(size) / np.prod(recipe.size))
        seconds = max(_SPARE * (60 * minutes - elapsed) - scale * (validation + last), 1.0)
        return seconds, seconds / (scale * steps * times.step)

    size, (seconds, passes) = recipe.size, time_of(recipe.size)
    sides = [(row["width"], row["height"]) for row in labelled.splits["train"]["images"]]
    smaller = [side for side in _SIZES if 256 <= side < max(recipe.size)]
    while passes < _FEW_EPOCHS and smaller and given.size is None and given.epochs is None:
        size = canvas(smaller.pop(), sides)
        seconds, passes = time_of(size)
    if size != recipe.size:
        lines.append(
            f"size {size[0]} x {size[1]} px instead: at the larger one fewer than {_FEW_EPOCHS}"
            f" passes fit into {minutes:g} minutes"
        )
    epochs, reason = recipe.epochs, f"{_PASSES:,} pictures in all, in 20 to 300 passes"
    if given.epochs is not None:
        reason = "given"
    elif passes < epochs:
        epochs = max(1, round(passes))
        reason = f"about as many as fit into {minutes:g} minutes (--minutes), which end it"
    scale = float(np.prod(size) / np.prod(recipe.size))
    training = scale * epochs * steps * times.step
    validations = int(min(max(_VALIDATED * training / (scale * validation), 1), _VALIDATIONS))
    chosen = replace(recipe, size=size, validations=validations)
    if given.epochs is None:
        chosen = replace(chosen, seconds=round(seconds, 1))
    if epochs < _LESS_ZOOM[0]:
        chosen = replace(chosen, zoom=_LESS_ZOOM[1])
    lines.append(
        f"epochs {epochs}: {reason}; {validations} validations, ends after 4 without a better one"
    )
    expected = training + scale * (validations * validation + last)
    speed = recipe.batch * ranks / (scale * times.step)
    lines.append(f"expected duration: {in_words(expected)}, at {speed:.1f} pictures a second")
    return chosen, lines
