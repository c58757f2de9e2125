"""From a checkpoint to a directory of programs that run without this project.

    model.onnx, model.pt2   the programs
    model.json              what it takes to use them, and how they compare with the model

The directory appears when each program, read back from its file, has been found to agree with the
model.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from moe_core.files import fsync, fsync_and_hash
from swinv2_moe.config import DataConfig, ExpertsConfig
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
from swinv2_moe.files import publish_directory
from swinv2_moe.train.checkpoint import count_classes
from swinv2_moe.train.deployed import Deployed, open_deployed

# For the difference between logits, as a share of the largest one, of 99 in 100 images. It was
# 2e-7, 0.03 and 0.03 (8 experts, Tiny-ImageNet); rounding that sends a token to another expert
# changes more, so that a few may exceed it.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2, "int8": 0.2}
LEAST_SAME_TOP1 = 90  # percent of the images; there it was 100, 98 and 98
_WHERE_DATA_IS = {"DATA.DATASET", "DATA.PATH", "DATA.TRAIN_LIST", "DATA.VAL_LIST"}
_COMPARED_BATCH = 8  # where the program takes any

# milliseconds of each, round by round
Timer = Callable[[dict[str, Callable[[], object]]], dict[str, Sequence[float]]]


@dataclass(frozen=True)
class Choices:
    """What is exported.

    Raises:
        UserError: a choice that is not supported.
    """

    formats: tuple[str, ...] = ("onnx",)
    dtype: str = "float32"
    batch_size: int = 1  # 0: any number of images at a time, for a model that has no capacity
    capacity_factor: float | None = None  # 0: dropless; None: as the checkpoint is evaluated
    images: int = 64  # on which programs and model are compared; all, where there are fewer

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
        for option, value, least in (
            ("batch-size", self.batch_size, 0),
            ("images", self.images, 1),
        ):
            if value < least:
                raise UserError(f"--{option} is {value}, it must be at least {least}")

    @property
    def compared_batch(self) -> int:
        """Images at a time in the comparison."""
        return self.batch_size or _COMPARED_BATCH


def export_model(
    resume: str,
    output: Path,
    choices: Choices = Choices(),
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    timer: Timer | None = None,
) -> dict:
    """Write the programs of the checkpoint or run `resume` to the new directory `output`; or
    nothing, if that fails.

    A torch program is for the device that DEVICE means; ONNX is compared on the CPU. The comparison
    takes validation images or, where the data of the training is not here and no other is named,
    random ones.

    Args:
        data, dataset, opts: as in `open_deployed`.
        timer: times the model beside each program on one batch; None: nobody does.

    Returns:
        What model.json holds.

    Raises:
        UserError: several processes, a package that is missing, input or output that cannot be
            used; what `check_agreement` raises.
    """
    if output.exists() or output.is_symlink():
        raise UserError(f"--output {output}: already exists")
    for kind in choices.formats:
        programs.check_packages(kind)
    if choices.capacity_factor is not None:
        opts = [*opts, "MODEL.MOE.EVAL_CAPACITY_FACTOR", str(choices.capacity_factor)]
    with open_deployed(resume, data, dataset, opts) as deployed:
        if deployed.world.size > 1:
            raise UserError(
                f"one process exports, here are {deployed.world.size}: start it without torchrun"
            )
        class_names = _class_names(deployed)
        model = deployed.model(len(class_names))
        _check_capacity(deployed.model_config.experts, choices)
        is_chosen = bool(data or dataset or _WHERE_DATA_IS.intersection(opts[::2]))
        batches, compared_on = _batches(deployed, class_names, choices, is_chosen)
        found = _facts(deployed, class_names, choices) | compared_on | {"programs": {}}
        with _new_directory(output) as directory:
            for kind in dict.fromkeys(choices.formats):
                device = torch.device("cpu") if kind == "onnx" else deployed.world.device
                images = next(batches())[0][: choices.batch_size or 2].to(device)
                with _writing(output):
                    programs.write_program(
                        kind,
                        model.to(device),
                        images,
                        choices.dtype,
                        choices.batch_size == 0,
                        directory,
                    )
                    files = {
                        part.name: fsync_and_hash(part)
                        for part in programs.parts_of(directory / programs.FILES[kind])
                    }
                found["programs"][kind] = {
                    "file": programs.FILES[kind],
                    "files": files,
                    "device": device.type,
                }
                found["programs"][kind] |= _examine(
                    kind, model, device, choices.dtype, batches, timer, directory
                )
            with _writing(output):
                (directory / "model.json").write_text(json.dumps(found, indent=1) + "\n")
                fsync(directory / "model.json")
                publish_directory(directory, output)
    return found


def _examine(
    kind: str,
    model: nn.Module,
    device: torch.device,
    dtype: str,
    batches: Batches,
    timer: Timer | None,
    directory: Path,
) -> dict:
    """What model.json says of a program, which is read back from its file."""
    program = programs.load_program(kind, directory)
    comparison = compare(model, program, batches, device)
    check_agreement(kind, dtype, comparison)
    found = asdict(comparison)
    if timer is not None:
        images = next(batches())[0].to(device)
        with torch.inference_mode():
            times = timer({"model": lambda: model(images), "program": lambda: program(images)})
        found |= {
            "timed_batch": len(images),
            "milliseconds": {name: list(rounds) for name, rounds in times.items()},
        }
    return found


def check_agreement(kind: str, dtype: str, found: Comparison) -> None:
    """Raises:
    UserError: the program differs from the model by more than TOLERANCES, or in its top-1 too
    often.
    """
    difference, allowed = found.p99_abs_difference, TOLERANCES[dtype] * found.max_abs_logit
    if not difference <= allowed:  # nor if it is NaN
        raise UserError(
            f"the {kind} program's logits differ from the model's by {difference:.3g}; with --dtype"
            f" {dtype},"
            f" {allowed:.3g} is allowed ({TOLERANCES[dtype]:g} of the largest): nothing is written"
        )
    if found.same_top1 < LEAST_SAME_TOP1:
        raise UserError(
            f"the {kind} program (--dtype {dtype}) has the model's top-1 in {found.same_top1:.1f}%"
            f" of {found.images}"
            f" images; {LEAST_SAME_TOP1}% is needed: nothing is written"
        )


def _class_names(deployed: Deployed) -> list[str]:
    """In the order of the logits; numbers where the checkpoint does not know their names."""
    names = deployed.source.meta["class_names"]
    if names:
        return names
    return [str(number) for number in range(count_classes(deployed.source, deployed.model_config))]


def _check_capacity(experts: ExpertsConfig, choices: Choices) -> None:
    if choices.capacity_factor is not None and not experts.num_experts:
        raise UserError(
            f"--capacity-factor {choices.capacity_factor:g}: the model is dense, it has no experts"
        )
    if choices.batch_size == 0 and experts.num_experts and experts.eval_capacity_factor:
        raise UserError(
            "--batch-size 0 (any) needs --capacity-factor 0 (dropless): at"
            f" {experts.eval_capacity_factor:g}, the rows of"
            " an expert follow from the number of images"
        )


def _batches(
    deployed: Deployed, class_names: list[str], choices: Choices, is_chosen: bool
) -> tuple[Batches, dict[str, str | None]]:
    """What programs are compared on, and what model.json says of it; data that was not chosen may
    be missing."""
    data, sizes = deployed.data, (choices.images, choices.compared_batch)
    try:
        sources = load_sources(data)
        if len(sources.class_names) != len(class_names):
            raise UserError(
                f"DATA.PATH is {data.path!r}: it has {len(sources.class_names)} classes, the"
                " checkpoint knows"
                f" {len(class_names)}"
            )
    except UserError as error:
        if is_chosen:
            raise
        facts = {
            "compared_on": "random images",
            "without_data": str(error),
            "other_class_names": None,
        }
        return random_batches(data, *sizes), facts
    renamed = deployed.compare_classes(sources.class_names)
    facts = {"compared_on": "validation images", "without_data": None, "other_class_names": renamed}
    return validation_batches(data, sources.val, *sizes), facts


def _facts(deployed: Deployed, class_names: list[str], choices: Choices) -> dict:
    """What a program that uses the logits has to know, and where they come from."""
    data, experts = deployed.data, deployed.model_config.experts
    batch = choices.batch_size or None
    shape = [batch, data.in_chans, data.img_size, data.img_size]
    return {
        "input": {"name": programs.INPUT, "dtype": "float32", "shape": shape},
        "output": {"name": programs.OUTPUT, "dtype": "float32", "shape": [batch, len(class_names)]},
        "preprocessing": preprocessing(data),
        "class_names": class_names,
        "dtype": choices.dtype,
        "num_experts": experts.num_experts,
        "capacity_factor": experts.eval_capacity_factor,
        **deployed.facts(),
    }


def preprocessing(config: DataConfig) -> dict:
    """How a picture becomes the model's input, which is square: what `build_transform` does in
    evaluation.

    `mode` is Pillow's; of 16 bits a channel the upper 8 count. `resize` is what the short side is
    resized to, before the middle is cut out; None: the whole picture is squashed into the square.
    Then values from 0 to 1 are normalised by `mean` and `std`.
    """
    crop = config.test
    return {
        "mode": "L" if config.in_chans == 1 else "RGB",
        "resize": math.floor(config.img_size / crop.crop_ratio) if crop.crop else None,
        "interpolation": "bilinear" if config.interpolation == "random" else config.interpolation,
        "mean": list(config.mean),
        "std": list(config.std),
    }


@contextmanager
def _new_directory(output: Path) -> Iterator[Path]:
    """A directory beside `output`, to be renamed to it in the block; otherwise nothing of it
    stays."""
    with _writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        private = tempfile.TemporaryDirectory(
            prefix=f".{output.name}.", dir=output.parent, ignore_cleanup_errors=True
        )
    with private:
        with _writing(output):
            # with the permissions of any new directory
            (directory := Path(private.name) / output.name).mkdir()
        yield directory


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Raises UserError where what the block writes cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error})") from error
