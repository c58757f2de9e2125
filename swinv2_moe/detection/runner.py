"""mmengine's runner with checkpoints of the per-expert store and distributed experts."""

import logging
import os
from pathlib import Path
from typing import Any

import pycocotools.coco
import torch
import torch.distributed as dist
from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import coco_api
from mmengine.device import get_device
from mmengine.dist import broadcast
from mmengine.evaluator import Evaluator
from mmengine.hooks import logger_hook
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.registry import RUNNERS
from mmengine.runner import BaseLoop, Runner
from torch import nn
from torch.utils.data import DataLoader

from moe_core import ignore_experts, prepared
from swinv2_moe.checkpoints import checkpoint
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.checkpoints.meta import check_detector
from swinv2_moe.data.build import Loader
from swinv2_moe.detection.datasets import GroundTruth, use_ground_truth
from swinv2_moe.detection.hooks import TuningHook
from swinv2_moe.detection.weights import (
    check_preprocessing,
    load_pth,
    read_pth,
    sharded_experts,
    use_windows,
)
from swinv2_moe.errors import UserError
from swinv2_moe.models import frozen_moe
from swinv2_moe.output import printable
from swinv2_moe.ranks.world import World
from swinv2_moe.train.optim import restore_optimizer

_PACKAGE = Path(__file__).parents[1]


@RUNNERS.register_module()
class MoERunner(Runner):
    """Runner that reads checkpoints of the per-expert store.

    `load_from` may name a run, a checkpoint or a .pth file. `resume` without it uses the newest
    checkpoint of `work_dir`. Weights must fit exactly.

    Raises:
        UserError: a checkpoint that is missing, damaged or another model's.
    """

    _has_loaded: bool

    source: Checkpoint | None = None  # the checkpoint that the run resumes from

    @property
    def detector(self) -> Any:
        """The model without its wrapper."""
        if is_model_wrapper(self.model):
            return self.model.module
        return self.model

    @property
    def world(self) -> World:
        """The processes of this run."""
        group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.group.WORLD
        return World(self.rank, self.world_size, torch.device(get_device()), group)

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader | dict, seed: int | None = None, diff_rank_seed: bool = False
    ) -> DataLoader:
        # Labels are positions in the configured classes, as in `build_evaluator`.
        CocoDataset.COCOAPI = GroundTruth
        if isinstance(dataloader, dict) and dataloader.get("num_workers") == 0:
            dataloader = dataloader | {"persistent_workers": False}  # torch refuses True
        loader = Runner.build_dataloader(dataloader, seed, diff_rank_seed)
        # Its workers ignore Ctrl-C. mmengine has no option for the class.
        loader.__class__ = Loader
        return loader

    def build_evaluator(self, evaluator: dict | list | Evaluator) -> Evaluator:
        built = super().build_evaluator(evaluator)
        for metric in built.metrics:
            use_ground_truth(metric)
        return built

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        if not self.distributed or model_wrapper_cfg is not None:
            return super().wrap_model(model_wrapper_cfg, model)
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm) and not torch.cuda.is_available():
                raise UserError(
                    f"norm_cfg of {name} is SyncBN, which several processes have on GPUs alone:"
                    " train in one process, or with another norm, as"
                    " norm_cfg=dict(type='GN', num_groups=32)"
                )
        device_ids = None
        if torch.cuda.is_available():
            device_ids = [int(os.environ["LOCAL_RANK"])]
        wrapper = {
            "device_ids": device_ids,
            "init_sync": False,  # _init_model_weights synchronises
            "find_unused_parameters": self.cfg.get("find_unused_parameters", False),
        }
        wrapped = super().wrap_model(wrapper, ignore_experts(model))
        wrapped.broadcast_buffers = False  # the argument warns from torch 2.15 on
        return wrapped

    def register_hooks(self, default_hooks=None, custom_hooks=None) -> None:
        super().register_hooks(default_hooks, custom_hooks)
        self.register_hook(TuningHook())

    def build_logger(self, *args, **kwargs) -> MMLogger:
        logger = super().build_logger(*args, **kwargs)
        quiet_console(logger)
        logger.info(f"log of mmengine: {self.log_dir}")
        return logger

    def build_train_loop(self, loop) -> BaseLoop:
        return run_prepared(super().build_train_loop(loop), frozen_moe(self.model))

    def build_val_loop(self, loop) -> BaseLoop:
        return run_prepared(super().build_val_loop(loop), self.model)

    def build_test_loop(self, loop) -> BaseLoop:
        return run_prepared(super().build_test_loop(loop), self.model)

    def _init_model_weights(self) -> None:
        self.detector.init_weights()
        backbone = getattr(self.detector, "backbone", None)
        if getattr(backbone, "trained_with", None):
            assert backbone is not None
            check_preprocessing(self.detector, backbone.trained_with, backbone.pretrained)
        owned = sharded_experts(self.detector)
        for name, tensor in self.detector.state_dict().items():
            if name not in owned:
                broadcast(tensor)

    def load_or_resume(self) -> None:
        if self._has_loaded:
            return
        source = self._find()
        if source is None:
            super().load_or_resume()
            return
        for problem in source.skipped:
            self.logger.warning(f"skipped: {problem}")
        weights = checkpoint.read_weights_of(source, self.detector)
        checkpoint.load_strategies(source, self.detector)
        self.detector.load_state_dict(weights)
        windows = source.meta.get("backbone_windows")
        use_windows(self.detector.backbone.trunk, windows, f"checkpoint {source.directory}")
        if self._resume:
            self._restore(source)
        self._has_loaded = True
        origin = "resuming from" if self._resume else "weights of"
        self.logger.info(f"{origin} {source.directory}")

    def _find(self) -> Checkpoint | None:
        """The checkpoint of the store to load, if any."""
        if self._load_from and not Path(self._load_from).is_dir():
            return None
        if self._load_from:
            return checkpoint.find_checkpoint(
                self._load_from, Path(), self.world, "checkpoint", weights_only=not self._resume
            )
        root = Path(self.work_dir) / "checkpoints"
        if self._resume:
            return checkpoint.find_checkpoint("auto", root, self.world)
        return None

    def _restore(self, source: Checkpoint) -> None:
        """Restore the training state, which `ExpertStoreHook` writes after epochs or iterations."""
        training = source.meta["training"]
        if training is None:
            raise UserError(
                f"checkpoint {source.directory} holds weights alone, no training to resume"
            )
        wrapper, schedulers = self.optim_wrapper, self.param_schedulers or []
        check_detector(source.directory, training, len(wrapper.param_groups), len(schedulers))
        parameters = {name: p for name, p in self.detector.named_parameters() if p.requires_grad}
        sections = source.optimizer_sections()
        moments = {
            kind: checkpoint.read_section(source, kind, self.detector, parameters)
            for kind in sections
        }
        restore_optimizer(
            wrapper.optimizer, self.detector, moments, training["loss_scaler"]["updates"]
        )
        for group, values in zip(wrapper.param_groups, training["param_groups"], strict=True):
            group.update(values)
        wrapper.scaler.load(training["loss_scaler"])
        for scheduler, state in zip(schedulers, training["param_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.train_loop._epoch, self.train_loop._iter = training["epoch"], training["iter"]
        self.source = source

    def load_checkpoint(self, filename: str, *args, **kwargs) -> dict:
        """Load a .pth file of mmengine; weights that do not fit raise, where mmengine warns."""
        content = read_pth(filename)
        self.call_hook("after_load_checkpoint", checkpoint=content)
        load_pth(self.detector, content, filename)
        self._has_loaded = True
        self.logger.info(f"weights of {filename}")
        return content

    def resume(self, filename: str, *args, **kwargs) -> None:
        """Resume from a .pth file of mmengine."""
        try:
            super().resume(filename, *args, **kwargs)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"checkpoint {filename}: its training cannot be resumed ({reason})"
            ) from error

    def save_checkpoint(self, *args, **kwargs) -> None:
        if sharded_experts(self.detector):
            raise UserError(
                "a .pth would hold this rank's experts alone: with expert_parallel use"
                " ExpertStoreHook"
            )
        windows = self.detector.backbone.trunk.position_windows()
        kwargs["meta"] = (kwargs.get("meta") or {}) | {"backbone_windows": windows}
        super().save_checkpoint(*args, **kwargs)


def quiet_console(logger: logging.Logger) -> None:
    """Show warnings, LoggerHook's lines and this package's at the terminal.

    The log's file has everything, as mmengine's report of its environment and configuration.
    """
    quiet_readers()
    for handler in logger.handlers:
        handler.addFilter(_escape)
        if type(handler) is logging.StreamHandler:
            handler.addFilter(_is_shown)


def quiet_readers() -> None:
    """COCO's readers print while they make an index, and have no option to prevent it."""
    for module in (pycocotools.coco, coco_api):
        vars(module)["print"] = _print_nothing


def _print_nothing(*words: object) -> None:
    pass


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage(), keep="\n"), None
    return True


def _is_shown(record: logging.LogRecord) -> bool:
    is_ours = Path(record.pathname).is_relative_to(_PACKAGE)
    is_progress = record.pathname == logger_hook.__file__
    return is_ours or is_progress or record.levelno >= logging.WARNING


def run_prepared(loop: BaseLoop, model: nn.Module) -> BaseLoop:
    """Make the loop run within `moe_core.prepared(model)`."""
    run = loop.run

    def run_within() -> object:
        with prepared(model):
            return run()

    loop.run = run_within
    return loop
