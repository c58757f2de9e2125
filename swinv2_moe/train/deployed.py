"""A checkpoint in use after its training: its configuration, which may name other data, and its
model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moe_core import MoEConfig
from swinv2_moe.config import (
    AllSections,
    DataConfig,
    ModelConfig,
    all_sections,
    as_opts,
    config_from_text,
    data_config,
    default_config,
    merge_opts,
    resolve_batch_size,
    run_config,
)
from swinv2_moe.dataset_registry import datasets
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel, build_model
from swinv2_moe.train import checkpoint
from swinv2_moe.train.agreement import check_same_start
from swinv2_moe.train.autocast import build_autocast
from swinv2_moe.train.checkpoint import Checkpoint
from swinv2_moe.train.distributed import World, expert_group, open_world
from swinv2_moe.train.meta import compare_class_names

# Keys about the machines and the data of the training, with the values that any other use gets.
_NOT_THE_MODELS = {
    "MODEL.NUM_CLASSES": 0,
    "DATA.GLOBAL_BATCH_SIZE": 0,
    "MODEL.MOE.EXPERT_PARALLEL_SIZE": 0,
    "MODEL.MOE.STRATEGY": "off",
    "MODEL.MOE.RANKS_PER_NODE": 0,
    "MODEL.MOE.KERNELS": "auto",
    "AUG.MIXUP": 0,
    "AUG.CUTMIX": 0,
}


@dataclass(frozen=True)
class Deployed:
    """A complete checkpoint, the processes that use it, and its configuration on these
    processes."""

    world: World
    source: Checkpoint
    config: AllSections

    @property
    def data(self) -> DataConfig:
        """The configuration's sections about data."""
        return self.config.data

    @property
    def model_config(self) -> ModelConfig:
        """The configuration's sections about the model."""
        return self.config.model

    @property
    def autocast(self) -> partial:
        """A factory of autocast contexts, as the configuration says."""
        return build_autocast(self.config.run, self.world)

    def model(self, num_classes: int) -> MoEModel:
        """The checkpoint's model on this rank's device, in evaluation mode.

        Args:
            num_classes: number of classes; 0: without the classifier.

        Raises:
            UserError: the weights do not fit the configuration or the number of classes.
        """
        config = self.model_config
        model = build_model(config, num_classes, expert_group(config.experts, self.world))
        head = model.classifier_names() if num_classes == 0 else ()

        def fit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor for name, tensor in tensors.items() if name not in head}

        # NaN is allowed: measurements report it
        checkpoint.load_weights(self.source, model, fit, finite=False)
        return model.to(self.world.device).eval()

    def class_names(self) -> list[str]:
        """Class names in the order of the logits; numbers if the checkpoint has no names.

        Raises:
            UserError: the checkpoint has neither names nor a classifier.
        """
        names = self.source.meta["class_names"]
        if names:
            return names
        count = checkpoint.count_classes(self.source, self.model_config)
        return [str(number) for number in range(count)]

    def compare_classes(self, class_names: Sequence[str]) -> str | None:
        """A message if the checkpoint's class names differ from the data's; None if they agree.
        Imported weights may have no names.

        Raises:
            UserError: the data have another number of classes.
        """
        trained = self.source.meta["class_names"] or class_names
        if len(trained) != len(class_names):
            where = self.data.dataset
            if datasets()[where].needs_path:
                where = self.data.path
            raise UserError(
                f"checkpoint {self.source.directory} has {len(trained):,} classes, the data"
                f" ({where}) has {len(class_names):,}"
            )
        return compare_class_names(trained, class_names)

    def facts(self) -> dict:
        """Values that identify the measured checkpoint in a result, ready for JSON."""
        return {
            "checkpoint": str(self.source.directory),
            "step": self.source.meta["step"],
            "passed_over": list(self.source.skipped),
            "dataset": self.data.dataset,
            "data": self.data.path,
            "image_size": self.data.img_size,
            "world_size": self.world.size,
            "torch": torch.__version__,
        }


@contextmanager
def open_deployed(
    resume: str,
    data: str | None = None,
    dataset: str | None = None,
    opts: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    name: str = "RUN",
) -> Iterator[Deployed]:
    """Open the checkpoint `resume`, or the newest checkpoint of a run. Every rank calls this.

    Args:
        data: DATA.PATH; None: the data that the checkpoint was trained on.
        dataset: DATA.DATASET; None: shards or a folder of images if `data` contains such, otherwise
            the training's dataset.
        opts: KEY VALUE ... over the checkpoint's configuration. DEVICE and TIMEOUT are taken only
            from here, not from the checkpoint.
        options: further values that must be the same on all ranks.
        name: the argument that gives `resume`, for messages.

    Raises:
        UserError: there is no complete checkpoint, options cannot be used, or ranks have different
            options.
    """
    options_alone = default_config()
    merge_opts(options_alone, opts)
    run = run_config(options_alone)
    with open_world(run.device, run.timeout) as world, world.named_errors("a collective"):
        keys = dict(zip(opts[::2], opts[1::2], strict=True))
        check_same_start({name: resume, "--dataset": dataset} | keys | dict(options or {}), world)
        source = checkpoint.find_checkpoint(resume, Path(resume), world, name, weights_only=True)
        if source is None:
            raise UserError(f"{name} {resume}: name a checkpoint or a run")
        yield Deployed(world, source, _configuration(source, data, dataset, opts, world.size))


def check_capacity_factor(option: str, factor: float, layer: MoEConfig) -> None:
    """Check that the capacity factor of an option has an effect on the layers in evaluation.

    Raises:
        UserError: Soft MoE, which has no capacity; 0 (dropless) where experts choose.
    """
    if layer.routing == "soft":
        raise UserError(
            f"--{option} {factor:g}: MODEL.MOE.ROUTER {layer.router!r} has no capacity factor"
        )
    if layer.routing == "expert_choice" and factor == 0:
        raise UserError(
            f"--{option} 0: with MODEL.MOE.ROUTER {layer.router!r} the capacity is the number of"
            " tokens that an expert chooses, it must not be 0"
        )


def _configuration(
    source: Checkpoint, data: str | None, dataset: str | None, opts: Sequence[str], world_size: int
) -> AllSections:
    name = f"checkpoint {source.directory}"
    if data and not dataset:
        trained = data_config(config_from_text(source.meta["config"], name))
        dataset = _dataset_of(Path(data).expanduser(), trained.dataset)
    keys = dict(_NOT_THE_MODELS)
    if data is not None or dataset is not None:
        keys["DATA.VAL_SPLIT"] = 0  # needed if the training's data had no validation images
    if data is not None:
        keys["DATA.PATH"] = data
    if dataset is not None:
        keys["DATA.DATASET"] = dataset
    config = config_from_text(source.meta["config"], name, as_opts(keys) + list(opts))
    return all_sections(resolve_batch_size(config, world_size))


def _dataset_of(data: Path, trained_on: str) -> str:
    """DATA.DATASET for the directory `data`, which may be the moved data of the training."""
    if (data / "index.json").is_file():
        return "shards"
    if (data / "train").is_dir() or not datasets()[trained_on].needs_files:
        return "folder"
    return trained_on
