"""A checkpoint in use after its training: its configuration, which may name other data, and its
model."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from yacs.config import CfgNode

from moe_core import MoEConfig
from swinv2_moe.checkpoints import checkpoint
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.checkpoints.meta import split_warning
from swinv2_moe.config import (
    AllSections,
    all_sections,
    as_opts,
    config_from_text,
    data_config,
    default_config,
    merge_opts,
    resolve_batch_size,
)
from swinv2_moe.data.classes import are_numbers, match_classes, other_order
from swinv2_moe.data.section import DATASETS, DataConfig
from swinv2_moe.data.sources import Sources
from swinv2_moe.data.sources.base import relabelled
from swinv2_moe.data.sources.folder import VALIDATION_FOLDERS
from swinv2_moe.errors import UserError, shortened
from swinv2_moe.files import is_same_path
from swinv2_moe.models import MoEModel, build_model
from swinv2_moe.models.section import ModelConfig
from swinv2_moe.ranks.agreement import check_same_start
from swinv2_moe.ranks.precision import build_autocast, usable_amp
from swinv2_moe.ranks.world import World, expert_group, open_world

_log = logging.getLogger(__name__)
# Keys about the machines and the data of the training, with the values that any other use gets.
_NOT_THE_MODELS = {
    "MODEL.NUM_CLASSES": 0,
    "DATA.GLOBAL_BATCH_SIZE": 0,
    "MODEL.MOE.EXPERT_PARALLEL_SIZE": 0,
    "MODEL.MOE.STRATEGY": "r1 d1 linear",
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
        run = self.config.run
        return build_autocast(run.amp_enable, run.amp_dtype, self.world)

    def model(self, num_classes: int) -> MoEModel:
        """The checkpoint's model on this rank's device, in evaluation mode.

        Args:
            num_classes: number of classes; 0: without the classifier.

        Raises:
            UserError: the weights do not fit the configuration or the number of classes.
        """
        config = self.model_config
        checkpoint.check_network(self.source, config, num_classes)
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

    def aligned(self, sources: Sources) -> tuple[Sources, str | None]:
        """The sources with the checkpoint's class names and numbers. Classes are matched by name;
        images of classes that the checkpoint does not know are omitted.

        Returns:
            The sources, and a message that names the classes that only one side has; None if both
            have the same classes. Imported weights may have no names; their classes are taken as
            those of the data.

        Raises:
            UserError: checkpoint and data have no class in common, or no validation image is of a
                known class.
        """
        if self.data.val_split:
            training = self.source.meta.get("training")
            warning = split_warning(training, len(sources.train), len(sources.val))
            if warning:
                sources = sources._replace(notes=(*sources.notes, warning))
        trained, names = self.source.meta["class_names"], sources.class_names
        where = f"checkpoint {self.source.directory}"
        if not trained:
            count = checkpoint.count_classes(self.source, self.model_config)
            if count != len(names):
                raise UserError(
                    f"{where}: has {count:,} classes without names, the data ({self._place()}) has"
                    f" {len(names):,}"
                )
        if trained == names:
            return sources, None
        match = match_classes(trained, names, where)
        train = relabelled(sources.train, match.numbers)
        val = relabelled(sources.val, match.numbers)
        if match.by_number:
            names = [name for _, name in sorted(zip(match.numbers, names, strict=True))]
            note = (
                f"{where}: has no class names (`convert-checkpoint import --class-names FILE` gives"
                f" them); its classes are taken to be, in order: {shortened(names)}"
            )
            if trained:
                note = (
                    "the classes are matched by number, since only one side has names: class 0 is"
                    f" {trained[0]!r} in the checkpoint, {names[0]!r} in the data"
                )
            if trained and not are_numbers(trained):
                names = trained
            return Sources(train, val, names, sources.notes), note + other_order(names)
        if not len(val):
            raise UserError(
                f"{where}: knows no class of the validation images ({self._place()}):"
                f" {shortened(match.unknown)}"
            )
        notes = []
        if match.unknown:
            omitted = len(sources.val) - len(val)
            notes.append(
                f"{len(match.unknown):,} of {len(names):,} classes of the data are unknown to the"
                f" checkpoint, their {omitted:,} validation images are left out:"
                f" {shortened(match.unknown)}"
            )
        if match.missing:
            notes.append(
                f"{len(match.missing):,} of {len(trained):,} classes of the checkpoint are not in"
                f" the data: {shortened(match.missing)}{match.hint}"
            )
        return sources._replace(train=train, val=val, class_names=trained), "; ".join(notes) or None

    def _place(self) -> str:
        if DATASETS[self.data.dataset].needs_path:
            return self.data.path
        return self.data.dataset

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
    alone = default_config()
    merge_opts(alone, opts)
    with open_world(alone.DEVICE, alone.TIMEOUT) as world, world.named_errors("a collective"):
        keys = dict(zip(opts[::2], opts[1::2], strict=True))
        check_same_start({name: resume, "--dataset": dataset} | keys | dict(options or {}), world)
        source = checkpoint.find_checkpoint(resume, Path(resume), world, name, weights_only=True)
        if source is None:
            raise UserError(f"{name} {resume}: name a checkpoint or a run")
        config = _configuration(source, data, dataset, opts, world.size)
        amp_enable, notes = usable_amp(config.AMP_ENABLE, config.AMP_DTYPE, world)
        for line in notes * world.is_main:
            _log.warning("%s", line)
        yield Deployed(world, source, all_sections(config, amp_enable))


def open_alone(run: str, device: torch.device, opts: Sequence[str], name: str) -> Deployed:
    """The best checkpoint of a run, a checkpoint, or a single file with its configuration, on this
    process alone.

    Args:
        opts: KEY VALUE ... over the checkpoint's configuration.
        name: the key that gives `run`, for messages.

    Raises:
        UserError: there is no complete checkpoint.
    """
    alone = World(0, 1, device)
    path, _ = checkpoint.select_checkpoint(run)
    source = checkpoint.find_checkpoint(path, Path(path), alone, name, weights_only=True)
    if source is None:  # a directory named "auto"
        raise UserError(f"{name} {run}: name a checkpoint or a run")
    return Deployed(alone, source, all_sections(_configuration(source, None, None, opts, 1)))


def check_alone() -> None:
    """Raise UserError if several processes were started."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise UserError(f"WORLD_SIZE is {size}: this is for one process, without torchrun")


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
) -> CfgNode:
    name = f"checkpoint {source.directory}"
    trained = data_config(config_from_text(source.meta["config"], name))
    is_same = data is None or is_same_path(data, trained.path)
    if data and not dataset:
        dataset = _dataset_of(Path(data).expanduser(), trained.dataset)
    keys = dict(_NOT_THE_MODELS)
    if not is_same or dataset not in (None, trained.dataset):
        keys["DATA.VAL_SPLIT"] = 0  # all images of other data are for validation
    if data is not None:
        keys["DATA.PATH"] = data
    if dataset is not None:
        keys["DATA.DATASET"] = dataset
    config = config_from_text(source.meta["config"], name, as_opts(keys) + list(opts))
    return resolve_batch_size(config, world_size)


def _dataset_of(data: Path, trained_on: str) -> str:
    """DATA.DATASET for the directory `data`, which may be the moved data of the training."""
    if (data / "index.json").is_file():
        return "shards"
    has_folder = any((data / name).is_dir() for name in ("train", *VALIDATION_FOLDERS))
    if has_folder or not DATASETS[trained_on].needs_files:
        return "folder"
    return trained_on
