"""mmengine's runner over checkpoints of the per-expert store, and over several processes on any device."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import broadcast
from mmengine.model import is_model_wrapper
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from moe_core import expert_parameters, moe_layers
from swinv2_moe.data.build import Loader
from swinv2_moe.engine import checkpoint
from swinv2_moe.engine.checkpoint import Checkpoint
from swinv2_moe.engine.distributed import World
from swinv2_moe.engine.optim import restore_optimizer
from swinv2_moe.errors import UserError


@RUNNERS.register_module()
class MoERunner(Runner):
    """`load_from` may name a run, a checkpoint of the store, or a .pth file; `resume` without it means the newest of
    `work_dir`. Weights fit exactly or not at all.

    Raises:
        UserError: a checkpoint that is missing, damaged or another model's.
    """

    source: Checkpoint | None = None  # what the run goes on from

    @property
    def detector(self) -> nn.Module:
        """The model without what wraps it."""
        return self.model.module if is_model_wrapper(self.model) else self.model

    @property
    def world(self) -> World:
        """The processes of this run."""
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        return World(self.rank, self.world_size, torch.device(get_device()), group)

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader | dict, seed: int | None = None, diff_rank_seed: bool = False
    ) -> DataLoader:
        loader = Runner.build_dataloader(dataloader, seed, diff_rank_seed)
        loader.__class__ = Loader  # workers hear no Ctrl-C; mmengine takes no class of its own
        return loader

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        if not self.distributed or model_wrapper_cfg is not None:
            return super().wrap_model(model_wrapper_cfg, model)
        # gradients of experts that this rank alone has are no business of DDP's
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(sharded_experts(model)))
        wrapper = {
            "device_ids": [int(os.environ["LOCAL_RANK"])] if torch.cuda.is_available() else None,
            "broadcast_buffers": False,
            "find_unused_parameters": self.cfg.get("find_unused_parameters", False),
        }
        return super().wrap_model(wrapper, model)

    def _init_model_weights(self) -> None:
        self.detector.init_weights()
        owned = sharded_experts(self.detector)
        for name, tensor in self.detector.state_dict().items():
            if name not in owned:
                broadcast(tensor)

    def load_or_resume(self) -> None:
        if self._has_loaded:
            return
        found = self._find()
        if found is None:
            super().load_or_resume()
            return
        for problem in found.skipped:
            self.logger.warning(f"passed over: {problem}")
        self.detector.load_state_dict(checkpoint.read_weights_of(found, self.detector))
        if self._resume:
            self._restore(found)
        self._has_loaded = True
        self.logger.info(f"{'going on from' if self._resume else 'weights of'} {found.directory}")

    def _find(self) -> Checkpoint | None:
        """The checkpoint of the store that is meant, if any."""
        if self._load_from and not Path(self._load_from).is_dir():
            return None
        if self._load_from:
            return checkpoint.find_checkpoint(
                self._load_from, Path(), self.world, "checkpoint", weights_only=not self._resume
            )
        root = Path(self.work_dir) / "checkpoints"
        return checkpoint.find_checkpoint("auto", root, self.world) if self._resume else None

    def _restore(self, found: Checkpoint) -> None:
        """The state of the training, as `ExpertStoreHook` writes it, at the end of an epoch or iteration."""
        training = found.meta["training"]
        if training is None:
            raise UserError(f"checkpoint {found.directory} holds weights alone, no training to resume")
        wrapper = self.optim_wrapper
        parameters = {name: p for name, p in self.detector.named_parameters() if p.requires_grad}
        sections = found.optimizer_sections()
        moments = {kind: checkpoint.read_section(found, kind, self.detector, parameters) for kind in sections}
        restore_optimizer(wrapper.optimizer, self.detector, moments, training["loss_scaler"]["updates"])
        for group, values in zip(wrapper.param_groups, training["param_groups"], strict=True):
            group.update(values)
        wrapper.scaler.load(training["loss_scaler"])
        for scheduler, state in zip(self.param_schedulers or [], training["param_schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.train_loop._epoch, self.train_loop._iter = training["epoch"], training["iter"]
        self.source = found

    def load_checkpoint(self, filename: str, map_location="cpu", strict: bool = True, **kwargs) -> dict:
        """A .pth of mmengine's; weights that do not fit are an error, where mmengine only warns."""
        try:
            return super().load_checkpoint(filename, map_location, strict, **kwargs)
        except Exception as error:
            raise UserError(f"checkpoint {filename} cannot be used: {' '.join(str(error).split())}") from error

    def save_checkpoint(self, *args, **kwargs) -> None:
        if sharded_experts(self.detector):
            raise UserError("a .pth would hold this rank's experts alone: with expert_parallel use ExpertStoreHook")
        super().save_checkpoint(*args, **kwargs)


def sharded_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Expert parameters by name, where each rank has others; none where every rank has all of them."""
    is_sharded = any(layer.group.size > 1 for layer in moe_layers(model).values())
    return expert_parameters(model) if is_sharded else {}
