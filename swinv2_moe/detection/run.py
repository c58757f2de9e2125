"""Run detection from a configuration; `swinv2-moe detect` calls these functions."""

import argparse
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from swinv2_moe.detection import registry  # first: it reports missing packages in one line

# isort: split

from mmdet.registry import MODELS
from mmengine.config import Config, DictAction
from mmengine.registry import init_default_scope
from mmengine.runner import save_checkpoint

from moe_core import expert_parameters
from swinv2_moe.checkpoints import checkpoint
from swinv2_moe.checkpoints.meta import DamagedError, read_meta
from swinv2_moe.config.load import find_config
from swinv2_moe.detection.annotations import listed
from swinv2_moe.detection.datasets import class_names, coco_datasets
from swinv2_moe.detection.weights import load_pth, read_pth, use_windows
from swinv2_moe.errors import UserError
from swinv2_moe.imports import imported_files
from swinv2_moe.ranks.agreement import check_same_start
from swinv2_moe.ranks.run_lock import only_run
from swinv2_moe.ranks.world import World, open_world

MoERunner = registry.runner.MoERunner
# keys that may differ between machines
_DATA_PATHS = ("data_root", "ann_file", "data_prefix")


def load_config(file: str, options: Sequence[str] = (), work_dir: str | None = None) -> Config:
    """Read a configuration (a path or a name, see `find_config`) and override keys with `KEY=VALUE`
    options.

    Raises:
        UserError: no such file, not a detection configuration, or an option that cannot be read.
    """
    file = str(find_config(file))
    if not Path(file).is_file():
        raise UserError(f"configuration {file}: no such file")
    try:
        config = Config.fromfile(file)
        config.merge_from_dict(_parsed(options))
    except UserError:
        raise
    except Exception as error:  # a configuration is Python code, which may raise anything
        raise UserError(
            f"configuration {file}: {' '.join(str(error).split()) or type(error).__name__}"
        ) from error
    if config.get("runner_type") != "MoERunner" or "backbone" not in config.get("model", {}):
        raise UserError(
            f"configuration {file}: is none of a detector here (runner_type = 'MoERunner',"
            " model.backbone)"
        )
    config.work_dir = work_dir or config.get("work_dir") or str(Path("output") / Path(file).stem)
    return config


def _parsed(options: Sequence[str]) -> dict:
    wrong = [option for option in options if not option.partition("=")[1]]
    if wrong:
        raise UserError(f"option {wrong[0]!r}: must be KEY=VALUE")
    parser = argparse.ArgumentParser()
    parser.add_argument("options", nargs="*", action=DictAction)
    return parser.parse_args(list(options)).options or {}


def trained_classes(source: str) -> list[str]:
    """The classes of a detector's checkpoint in the order of its outputs; [] if it names none.

    Args:
        source: a run, a checkpoint, or a .pth file.

    Raises:
        UserError: the file cannot be read.
    """
    path = Path(source)
    if path.is_file():
        meta = read_pth(source).get("meta")
        dataset_meta = meta.get("dataset_meta") if isinstance(meta, dict) else None
        names = dataset_meta.get("classes") if isinstance(dataset_meta, dict) else None
        if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
            return list(names)
        return []
    newest_first = checkpoint.checkpoints_below(path / "checkpoints")
    for directory in [path, *newest_first, *checkpoint.checkpoints_below(path)]:
        try:
            return read_meta(directory)["class_names"]
        except DamagedError:  # another one has the same classes; loading names the damage
            continue
    return []


def use_trained_classes(
    config: Config, source: str | None, splits: Sequence[str], any_names: bool = False
) -> str:
    """Number the classes of the configuration's data sets as a checkpoint's outputs.

    Args:
        source: as of `trained_classes`; None: nothing is changed.
        splits: "train", "val" and "test".
        any_names: accept a checkpoint with other classes than the configuration.

    Returns:
        A line about classes that differ; empty if none do.

    Raises:
        UserError: the checkpoint cannot be read, or has other classes.
    """
    names = trained_classes(source) if source else []
    line = ""
    for split in splits:
        for dataset in coco_datasets(config.get(f"{split}_dataloader")):
            configured = class_names(dataset)
            if not names or tuple(names) == configured:
                continue
            line = f"classes are numbered as in {source}"
            trained_only = [name for name in names if name not in configured]
            configured_only = [name for name in configured if name not in names]
            if trained_only or configured_only:
                line = (
                    f"checkpoint {source}: has the classes {listed(trained_only) or 'none'} that"
                    f" the configuration lacks, and lacks {listed(configured_only) or 'none'}"
                )
                if not any_names:
                    raise UserError(f"{line}; model.backbone.pretrained loads the backbone alone")
            dataset.metainfo = dict(dataset.get("metainfo", {}), classes=tuple(names))
    return line


def starting_checkpoint(config: Config, resume: str | None) -> str | None:
    """What a training with `resume` loads into the whole detector, if anything."""
    if resume == "auto":
        return config.work_dir
    return resume or config.get("load_from")


def train(
    config: Config, resume: str | None = None, world: World | None = None
) -> dict[str, float]:
    """Train on all processes of torchrun, and return the metrics of the last validation.

    Args:
        world: the processes, if they have already met.
        resume: "auto" (the newest complete checkpoint of `work_dir`, if any), a run or a
            checkpoint.

    Raises:
        UserError: input that cannot be used, or another training in `work_dir`.
        CollectiveError: another rank has ended, or does not answer.
    """
    config.resume = resume is not None
    if resume not in (None, "auto"):
        config.load_from = resume
    use_trained_classes(config, starting_checkpoint(config, resume), ["train", "val"])
    with _world(config, world) as world, only_run(Path(config.work_dir), world):
        runner = MoERunner.from_cfg(config)
        for file in imported_files():
            runner.logger.info(f"imported {file}")
        runner.train()
        scalars = runner.message_hub.log_scalars
        return {
            name.removeprefix("val/"): scalars[name].current()
            for name in scalars
            if name.startswith("val/coco")
        }


def test(config: Config, source: str) -> dict[str, float]:
    """Metrics on the test set of a run's newest checkpoint, a checkpoint, or a .pth file.

    Raises:
        UserError, CollectiveError: as `train`.
    """
    config.load_from, config.resume = source, False
    use_trained_classes(config, source, ["test"], any_names=True)
    with _world(config):
        return MoERunner.from_cfg(config).test()


@contextmanager
def _world(config: Config, met: World | None = None) -> Iterator[World]:
    """The processes of this run, within the block, after checking that they agree.

    Raises:
        UserError: the processes have different configurations.
    """
    met_here = open_world() if met is None else nullcontext(met)
    with met_here as world, world.named_errors("a collective"):
        check_same_start(dict(_values(config.to_dict())), world)
        config.launcher = "none" if world.size == 1 else "pytorch"
        yield world


def _values(part: object, name: str = "") -> Iterator[tuple[str, object]]:
    """A configuration's values by names like "model.neck.in_channels[0]", without paths of data."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key not in _DATA_PATHS:
                yield from _values(value, f"{name}.{key}" if name else str(key))
    elif isinstance(part, (list, tuple)):
        for i, value in enumerate(part):
            yield from _values(value, f"{name}[{i}]")
    else:
        yield name, part


def build_detector(config: Config, source: str | None = None) -> Any:
    """The detector on the CPU, in evaluation mode, with the weights of a checkpoint if given.

    Raises:
        UserError: a checkpoint that cannot be used.
    """
    init_default_scope(config.get("default_scope", "mmdet"))
    model = MODELS.build(copy.deepcopy(config.model))  # mmdetection writes into what it gets
    if source is None:
        return model.eval()
    if Path(source).is_dir():
        weights = checkpoint.open_newest(Path(source))
        model.load_state_dict(checkpoint.read_weights_of(weights, model))
        windows = weights.meta.get("backbone_windows")
        use_windows(model.backbone.trunk, windows, f"checkpoint {weights.directory}")
    else:
        load_pth(model, read_pth(source), source)
    return model.eval()


def export_pth(config: Config, source: str, file: str) -> None:
    """Write all weights of a checkpoint to one .pth file for mmdetection's tools.

    Raises:
        UserError: a checkpoint that cannot be used, or `file` exists.
    """
    if Path(file).exists():
        raise UserError(f"{file} already exists")
    model = build_detector(config, source)
    windows = model.backbone.trunk.position_windows()
    config.model.backbone.pretrained_window_sizes = windows
    # as mmengine's hook writes them
    meta = {"cfg": config.pretty_text, "dataset_meta": {"classes": trained_classes(source)}}
    meta["backbone_windows"] = windows
    save_checkpoint({"state_dict": model.state_dict(), "meta": meta}, file)


def count_parameters(config: Config) -> dict[str, int]:
    """Number of parameters: `all`, `trained`, and `trained_experts`, a part of `trained`."""
    model = build_detector(config)
    experts = expert_parameters(model).values()
    return {
        "all": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "trained_experts": sum(p.numel() for p in experts if p.requires_grad),
    }
