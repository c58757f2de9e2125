"""Export a checkpoint to a directory of programs that run without this project.

    model.onnx, model.pt2   the programs
    model.json              their input, output and preprocessing, and the comparison with the model

The directory appears after each program has been read back from its file and agrees with the model.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from moe_core.files import fsync, fsync_and_hash, publish_directory
from swinv2_moe.checkpoints.deployed import (
    Deployed,
    check_alone,
    check_capacity_factor,
    open_deployed,
)
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.export import programs
from swinv2_moe.export.comparison import (
    Batches,
    Comparison,
    compare,
    random_batches,
    validation_batches,
)
from swinv2_moe.files import new_directory, writing
from swinv2_moe.models import MoEModel
from swinv2_moe.models.section import ExpertsConfig
from swinv2_moe.train.graph import PassGraph

# Largest difference between logits, relative to the largest logit, in 99% of the images. Measured
# with 8 experts on Tiny-ImageNet: 2e-7, 0.03 and 0.03. An image may exceed the limit if rounding
# routes a token to another expert.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "int8": 0.2}
LEAST_SAME_TOP1 = 90  # percent of the images; measured: 100, 98 and 98
_DATA_KEYS = {"DATA.DATASET", "DATA.PATH", "DATA.TRAIN_LIST", "DATA.VAL_LIST"}
_COMPARED_BATCH = 8  # if the program accepts any batch size

# milliseconds of each function by round
Timer = Callable[[dict[str, Callable[[], object]]], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Raises:
        UserError: a choice that is not supported.
    """

    formats: tuple[str, ...] = ("onnx",)
    dtype: str = "float32"
    # 0: any number of images, for a dropless or dense model; None: 0 for these, otherwise 1
    batch_size: int | None = None
    # 0: dropless, where tokens choose; None: as in evaluation
    capacity_factor: float | None = None
    images: int = 64  # number of images for the comparison; all, if there are fewer

    def __post_init__(self) -> None:
        supported = "; ".join(
            f"{kind} takes {', '.join(dtypes)}" for kind, dtypes in programs.DTYPES.items()
        )
        for kind in self.formats:
            if kind not in programs.DTYPES:
                raise UserError(f"--format is {kind!r}, allowed: {', '.join(programs.DTYPES)}")
            if self.dtype not in programs.DTYPES[kind]:
                raise UserError(
                    f"--dtype is {self.dtype!r}, not supported with --format {kind}: {supported}"
                )
        if self.batch_size is not None and self.batch_size < 0:
            raise UserError(f"--batch-size is {self.batch_size}, it must be at least 0")
        if self.images < 1:
            raise UserError(f"--images is {self.images}, it must be at least 1")

    @property
    def compared_batch(self) -> int:
        """Batch size of the comparison."""
        return self.batch_size or _COMPARED_BATCH


def export_model(
    resume: str,
    output: Path,
    choices: ExportOptions = ExportOptions(),
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    timer: Timer | None = None,
) -> dict:
    """Write the programs of the checkpoint or run `resume` to the new directory `output`.

    A torch program is for the device of DEVICE; ONNX is compared on the CPU. The comparison uses
    validation images. If the training's data are missing and no others are named, it uses random
    images. On failure, nothing is written.

    Args:
        data, dataset, opts: as in `open_deployed`.
        timer: times the model and each program on one batch; None: they are not timed.

    Returns:
        The content of model.json.

    Raises:
        UserError: several processes, a missing package, or input or output that cannot be used;
            also raised by `check_agreement`.
    """
    if output.exists() or output.is_symlink():
        raise UserError(f"--output {output}: already exists")
    for kind in choices.formats:
        programs.check_packages(kind)
    if choices.capacity_factor is not None:
        opts = list(opts) + ["MODEL.MOE.EVAL_CAPACITY_FACTOR", str(choices.capacity_factor)]
    check_alone()
    with open_deployed(resume, data, dataset, opts) as deployed:
        choices = _with_batch_size(deployed.model_config.experts, choices)
        class_names = deployed.class_names()
        model = deployed.model(len(class_names))
        is_chosen = bool(data or dataset or _DATA_KEYS.intersection(opts[::2]))
        batches, compared_on = _batches(deployed, choices, is_chosen)
        record = _facts(deployed, class_names, choices) | compared_on | {"programs": {}}
        with new_directory(output) as directory:
            for kind in dict.fromkeys(choices.formats):
                device = deployed.world.device
                if kind == "onnx":
                    device = torch.device("cpu")
                task = _Task(kind, model.to(device), device, choices, batches, directory)
                with writing(output):
                    files = task.write()
                entry = {"file": programs.FILES[kind], "files": files, "device": device.type}
                record["programs"][kind] = entry | task.examine(timer)
            with writing(output):
                (directory / "model.json").write_text(json.dumps(record, indent=1) + "\n")
                fsync(directory / "model.json")
                publish_directory(directory, output)
    return record


@dataclass(frozen=True)
class _Task:
    """One program to be written and compared with the model."""

    kind: str
    model: MoEModel
    device: torch.device
    choices: ExportOptions
    batches: Batches
    directory: Path

    def write(self) -> dict[str, dict]:
        """Write the program; returns size and checksum of each of its files."""
        example, _ = next(self.batches())
        images = example[: self.choices.batch_size or 2].to(self.device)
        any_batch = self.choices.batch_size == 0
        programs.write_program(
            self.kind, self.model, images, self.choices.dtype, any_batch, self.directory
        )
        parts = programs.parts_of(self.directory / programs.FILES[self.kind])
        return {part.name: fsync_and_hash(part) for part in parts}

    def examine(self, timer: Timer | None) -> dict:
        """Compare the program, read back from its file, with the model; entries of model.json."""
        fixed_on = self.device if self.choices.batch_size else None
        program = programs.load_program(self.kind, self.directory, fixed_on)
        comparison = compare(self.model, program, self.batches, self.device)
        check_agreement(self.kind, self.choices.dtype, comparison)
        entries = asdict(comparison)
        if timer is not None:
            example, _ = next(self.batches())
            images = example.to(self.device)
            model = PassGraph(self.model, self.model, self.device)  # as predict runs it
            with torch.inference_mode():
                times = timer({"model": lambda: model(images), "program": lambda: program(images)})
            entries["timed_batch"] = len(images)
            entries["milliseconds"] = {name: list(rounds) for name, rounds in times.items()}
        return entries


def check_agreement(kind: str, dtype: str, comparison: Comparison) -> None:
    """Check that a program agrees with the model.

    Raises:
        UserError: the logits differ by more than TOLERANCES, or the top-1 classes differ too often.
    """
    difference = comparison.p99_abs_difference
    allowed = TOLERANCES[dtype] * comparison.max_abs_logit
    if not difference <= allowed:  # also if it is NaN
        raise UserError(
            f"the {kind} program's logits differ from the model's by {difference:.3g}; with "
            f"--dtype {dtype}, {allowed:.3g} is allowed ({TOLERANCES[dtype]:g} of the largest): "
            "nothing is written"
        )
    if comparison.same_top1 < LEAST_SAME_TOP1:
        raise UserError(
            f"the {kind} program (--dtype {dtype}) has the model's top-1 in"
            f" {comparison.same_top1:.1f}% of {comparison.images} images;"
            f" {LEAST_SAME_TOP1}% is needed: nothing is written"
        )


def _with_batch_size(experts: ExpertsConfig, choices: ExportOptions) -> ExportOptions:
    """The choices with a number as batch size.

    Raises:
        UserError: the model does not support the capacity factor or the batch size.
    """
    if choices.capacity_factor is not None and not experts.num_experts:
        raise UserError(
            f"--capacity-factor {choices.capacity_factor:g}: the model is dense, it has no experts"
        )
    layer = experts.layer
    if layer is None:
        return replace(choices, batch_size=choices.batch_size or 0)
    if choices.capacity_factor is not None:
        check_capacity_factor("capacity-factor", choices.capacity_factor, layer)
    if choices.batch_size == 0 and layer.routing != "token_choice":
        raise UserError(
            f"--batch-size 0 (any) cannot be used with MODEL.MOE.ROUTER {layer.router!r}: the rows"
            " of an expert follow from the number of images"
        )
    if choices.batch_size == 0 and experts.eval_capacity_factor:
        raise UserError(
            "--batch-size 0 (any) needs --capacity-factor 0 (dropless): at "
            f"{experts.eval_capacity_factor:g}, the rows of an expert follow from the number of "
            "images"
        )
    if choices.batch_size is not None:
        return choices
    has_fixed_shapes = layer.routing != "token_choice" or experts.eval_capacity_factor
    return replace(choices, batch_size=1 if has_fixed_shapes else 0)


def _batches(
    deployed: Deployed, choices: ExportOptions, is_chosen: bool
) -> tuple[Batches, dict[str, str | None]]:
    """The batches of the comparison, and entries of model.json about them.

    If the user did not choose the data (`is_chosen`) and they cannot be used, the batches are
    random.
    """
    data, batch_size = deployed.data, choices.compared_batch
    try:
        sources, renamed = deployed.aligned(load_sources(data, validation_only=True))
    except UserError as error:
        if is_chosen:
            raise
        facts = {
            "compared_on": "random images",
            "without_data": str(error),
            "other_class_names": None,
        }
        return random_batches(data, choices.images, batch_size), facts
    facts = {"compared_on": "validation images", "without_data": None, "other_class_names": renamed}
    return validation_batches(data, sources.val, choices.images, batch_size), facts


def _facts(deployed: Deployed, class_names: list[str], choices: ExportOptions) -> dict:
    """Entries of model.json about input, output, preprocessing and checkpoint."""
    data, experts = deployed.data, deployed.model_config.experts
    batch = choices.batch_size or None
    shape = [batch, data.channels, data.img_size, data.img_size]
    facts = {
        "input": {"name": programs.INPUT, "dtype": "float32", "shape": shape},
        "output": {"name": programs.OUTPUT, "dtype": "float32", "shape": [batch, len(class_names)]},
        "preprocessing": preprocessing(data),
        "class_names": class_names,
        "dtype": choices.dtype,
        "num_experts": experts.num_experts,
        "capacity_factor": experts.eval_capacity_factor,
    }
    facts |= deployed.facts()
    facts["data"] = Path(data.path).name  # the directory is for other machines
    return facts


def preprocessing(config: DataConfig) -> dict:
    """A description of how an image becomes the model's square input, as with `build_transform` in
    evaluation.

    The image is first turned upright, as its EXIF orientation says. `mode` is Pillow's; values of
    more than 8 bits are scaled from the range that the file gives. `resize` is the length of the
    short side before the centre crop; None: the image is stretched to the square. Then values from
    0 to 1 are normalised by `mean` and `std`.
    """
    mode = "L" if config.channels == 1 else "RGB"
    resize = None
    if config.test.crop_ratio:
        resize = math.floor(config.img_size / config.test.crop_ratio)
    interpolation = config.interpolation
    if interpolation == "random":
        interpolation = "bilinear"
    return {
        "mode": mode,
        "resize": resize,
        "interpolation": interpolation,
        "mean": list(config.mean),
        "std": list(config.std),
    }
