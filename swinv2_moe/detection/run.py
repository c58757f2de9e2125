"""Detection runs from their configuration: what tools/detect.py calls."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from swinv2_moe.detection import registry  # before mmengine: it says in one line what is missing

# isort: split

from mmdet.registry import MODELS
from mmengine.config import Config, DictAction
from mmengine.registry import init_default_scope
from mmengine.runner import save_checkpoint
from torch import nn

from moe_core import expert_parameters
from swinv2_moe.detection.pth import load_pth, read_pth
from swinv2_moe.errors import UserError
from swinv2_moe.imports import imported_files
from swinv2_moe.train import checkpoint
from swinv2_moe.train.agreement import check_same_start
from swinv2_moe.train.distributed import World, open_world
from swinv2_moe.train.run_lock import only_run

MoERunner = registry.runner.MoERunner
# may be another on each machine's own disk
_PLACES_OF_DATA = ("data_root", "ann_file", "data_prefix")


def load_config(file: str, options: Sequence[str] = (), work_dir: str | None = None) -> Config:
    """The configuration in a file of configs/detection, with `KEY=VALUE` options over it.

    Raises:
        UserError: no such file, not a detection configuration, or an option that cannot be read.
    """
    if not Path(file).is_file():
        raise UserError(f"configuration {file}: no such file")
    try:
        config = Config.fromfile(file)
        config.merge_from_dict(_parsed(options))
    except UserError:
        raise
    except Exception as error:  # a configuration is Python: anything may be raised in it
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


def train(config: Config, resume: str | None = None) -> dict[str, float]:
    """Train, under torchrun on all its processes; returns the last validation's metrics.

    Args:
        resume: "auto" (the newest whole checkpoint of `work_dir`, or a fresh start), a run or a
            checkpoint.

    Raises:
        UserError: input that cannot be used, or another training in `work_dir`.
        CollectiveError: another rank has ended, or is stuck.
    """
    config.resume = resume is not None
    if resume not in (None, "auto"):
        config.load_from = resume
    with _world(config) as world, only_run(Path(config.work_dir), world, "--work-dir"):
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
    """The metrics on the test set of a checkpoint of the store (a run's newest), or of a .pth.

    Raises:
        UserError, CollectiveError: as `train`.
    """
    config.load_from, config.resume = source, False
    with _world(config):
        return MoERunner.from_cfg(config).test()


@contextmanager
def _world(config: Config) -> Iterator[World]:
    """The processes that torchrun started, if it did, for the length of the block; all have the
    same configuration."""
    with open_world() as world, world.named_errors("a collective"):
        check_same_start(dict(_values(config.to_dict())), world)
        config.launcher = "none" if world.size == 1 else "pytorch"
        yield world


def _values(part: object, name: str = "") -> Iterator[tuple[str, object]]:
    """What a configuration holds, by names like "model.neck.in_channels[0]", without the places of
    data."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key not in _PLACES_OF_DATA:
                yield from _values(value, f"{name}.{key}" if name else str(key))
    elif isinstance(part, (list, tuple)):
        for i, value in enumerate(part):
            yield from _values(value, f"{name}[{i}]")
    else:
        yield name, part


def build_detector(config: Config, source: str | None = None) -> nn.Module:
    """The detector on this one process's CPU, in evaluation mode, with the weights of a checkpoint
    if one is given.

    Raises:
        UserError: a checkpoint that cannot be used.
    """
    init_default_scope(config.get("default_scope", "mmdet"))
    model = MODELS.build(config.model)
    if source is None:
        return model.eval()
    if Path(source).is_dir():
        found = checkpoint.find_checkpoint(source, Path(), key="checkpoint", weights_only=True)
        model.load_state_dict(checkpoint.read_weights_of(found, model))
    else:
        load_pth(model, read_pth(source), source)
    return model.eval()


def export_pth(config: Config, source: str, file: str) -> None:
    """All weights of a checkpoint in one .pth, as mmdetection's own tools read it.

    Raises:
        UserError: a checkpoint that cannot be used, or `file` exists.
    """
    if Path(file).exists():
        raise UserError(f"{file} already exists")
    model = build_detector(config, source)
    save_checkpoint({"state_dict": model.state_dict(), "meta": {"cfg": config.pretty_text}}, file)


def count_parameters(config: Config) -> dict[str, int]:
    """How many parameters the detector has: `all`, `trained`, and `trained_experts` among these."""
    model = build_detector(config)
    experts = expert_parameters(model).values()
    return {
        "all": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "trained_experts": sum(p.numel() for p in experts if p.requires_grad),
    }
