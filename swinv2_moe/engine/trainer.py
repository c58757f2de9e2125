"""Training: one class that holds what a run changes, one method for each thing that happens to it."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor
from yacs.config import CfgNode

from moe_core import (
    RoutingStats,
    average_expert_gradients,
    clip_gradients,
    load_strategy_decisions,
    moe_layers,
    strategy_decisions,
)
from swinv2_moe.data import Batch, Data, UnreadableImages
from swinv2_moe.engine import checkpoint, optim
from swinv2_moe.engine.diagnose import explain_non_finite
from swinv2_moe.engine.distributed import World, seed_everything
from swinv2_moe.engine.evaluation import Accuracy, evaluate
from swinv2_moe.engine.parallelize import averaged_copy, gradient_sync, load_whole, parallelize
from swinv2_moe.engine.record import Recorder
from swinv2_moe.errors import UserError
from swinv2_moe.models import SwinTransformerV2MoE


class Trainer:
    """A run: `fit` trains from where it stands to the end, `save` and `resume` move its whole state to and from disk.

    Random numbers are seeded anew from (SEED, epoch, rank) at every epoch, so a resumed run repeats what an
    uninterrupted one would have done.
    """

    def __init__(self, config: CfgNode, world: World, data: Data, model: SwinTransformerV2MoE) -> None:
        self.config, self.world, self.data = config, world, data
        self.model = model.to(world.device)
        self.ema = averaged_copy(self.model, world, config.TRAIN.EMA_DECAY, config.TRAIN.SHARD_TRUNK)
        self.wrapped = parallelize(self.model, world, config.COMPILE, config.TRAIN.SHARD_TRUNK)
        self.global_batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUMULATION_STEPS * world.size
        self.steps_per_epoch = _steps_per_epoch(config, data)
        rate = optim.scaled_learning_rate(config, config.TRAIN.BASE_LR, world.size)
        self.optimizer = optim.build_optimizer(config, self.model, rate)
        self.schedule = optim.build_schedule(config, self.optimizer, self.steps_per_epoch, world.size)
        self.scaler = optim.LossScaler(config.AMP_ENABLE and config.AMP_DTYPE == "float16")
        self.mixup = build_mixup(config, data.num_classes)
        self.autocast = build_autocast(config, world)
        self.unreadable = UnreadableImages(data.train_size + data.val_size, config.DATA.MAX_BAD_SHARE)
        self.epoch = self.step = 0  # done so far
        self.best_top1, self.last_top1 = -1.0, None
        self.seconds, self.images = 0.0, 0  # of training proper, in this process

    @property
    def deployed(self) -> SwinTransformerV2MoE:
        """The weights that are validated: the averaged ones where there are any."""
        return self.ema.module if self.ema else self.model

    @property
    def finished(self) -> bool:
        limit = self.config.TRAIN.MAX_STEPS
        return self.epoch >= self.config.TRAIN.EPOCHS or bool(limit and self.step >= limit)

    # The run

    def fit(self, recorder: Recorder, checkpoints: Path) -> None:
        """Train the epochs that are left, each followed by a validation, a line and (SAVE_FREQ) a checkpoint.

        Raises:
            UserError: a loss or gradient that is not finite, or too many unreadable images.
        """
        while not self.finished:
            started = time.perf_counter()
            train_loss = self._train_epoch(recorder)
            self.epoch += 1
            accuracy = self.validate()
            is_best = accuracy.top1 > self.best_top1
            self.best_top1, self.last_top1 = max(self.best_top1, accuracy.top1), accuracy.top1
            self._record_epoch(recorder, train_loss, accuracy, time.perf_counter() - started)
            if is_best or self.finished or self.epoch % self.config.SAVE_FREQ == 0:
                self.save(checkpoints, is_best)

    def validate(self) -> Accuracy:
        """Accuracy of the deployed weights on the validation set."""
        accuracy = evaluate(self.deployed, self.data.val_loader, self.world, self.autocast)
        self._count_unreadable(accuracy.unreadable)
        return accuracy

    def _train_epoch(self, recorder: Recorder) -> float:
        """One pass over the training set; returns the mean loss of its steps over all ranks."""
        self.data.set_epoch(self.epoch)
        seed_everything(self.config.SEED, self.epoch, self.world.rank)
        self.wrapped.train()
        losses, bad, started = [], [], time.perf_counter()
        with recorder.bar(f"epoch {self.epoch + 1}/{self.config.TRAIN.EPOCHS}", self.steps_per_epoch) as bar:
            for batches in _grouped(self.data.train_loader, self.config.TRAIN.ACCUMULATION_STEPS):
                loss, aux_loss, norm = self._train_step(batches)
                losses.append(loss)
                bad += [path for batch in batches for path in batch.unreadable]
                rate = len(losses) * self.global_batch / (time.perf_counter() - started)
                bar.advance(f"loss {loss:.3f}  val top-1 {self._last_accuracy}  {rate:,.0f} images/s")
                if self.step % self.config.PRINT_FREQ == 0:
                    self._record_step(recorder, loss, aux_loss, norm, rate)
                    self._count_unreadable(bad)
                    bad = []
                if self.finished:
                    break
        self._count_unreadable(bad)
        self.seconds += time.perf_counter() - started
        self.images += len(losses) * self.global_batch
        return self._mean(sum(losses) / len(losses))

    def _train_step(self, batches: Sequence[Batch]) -> tuple[float, float, float]:
        """One optimiser step over the accumulated batches: this rank's mean loss and aux loss, the global norm."""
        total = torch.zeros(2, device=self.world.device)
        for i, batch in enumerate(batches):
            with gradient_sync(self.wrapped, enabled=i == len(batches) - 1):
                loss, aux_loss = self._loss(batch)
                (loss * self.scaler.scale / len(batches)).backward()
            total += torch.stack([loss.detach(), aux_loss.detach()]) / len(batches)
        average_expert_gradients(self.model)
        self.scaler.unscale([p.grad for p in self.model.parameters() if p.grad is not None])
        norm = float(clip_gradients(self.model, self.config.TRAIN.CLIP_GRAD))  # the step's one wait for the device
        self._update(norm, batches)
        return *total.tolist(), norm

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images, targets = self._mixed(batch)
        smoothing = 0.0 if self.mixup else self.config.MODEL.LABEL_SMOOTHING  # mixup smooths its own targets
        with self.autocast():
            logits, aux_loss = self.wrapped(images)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        return loss + self.config.MODEL.MOE.AUX_LOSS_WEIGHT * aux_loss, aux_loss

    def _mixed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images = batch.images.to(self.world.device, non_blocking=True)
        targets = batch.targets.to(self.world.device, non_blocking=True)
        return self.mixup(images, targets) if self.mixup else (images, targets)

    def _update(self, norm: float, batches: Sequence[Batch]) -> None:
        """Step the optimiser, unless the gradient (the same on all ranks) is not finite."""
        finite = norm < float("inf")
        self.scaler.update(finite)
        if finite:
            self.optimizer.step()
        elif self.scaler.exhausted:
            raise UserError(explain_non_finite(self.step + 1, self.wrapped, self._mixed(batches[-1])[0], self.world))
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.schedule.step_update(self.step)
        if self.ema and finite:
            self.ema.update(self.model)

    # Records

    @property
    def _last_accuracy(self) -> str:
        return "-" if self.last_top1 is None else f"{self.last_top1:.1f}%"

    def _mean(self, value: float) -> float:
        return (
            float(self.world.sum(torch.tensor(value, dtype=torch.float64, device=self.world.device))) / self.world.size
        )

    def _count_unreadable(self, paths: list[str]) -> None:
        self.unreadable.add(path for part in self.world.gather(paths) for path in part)

    def _record_step(self, recorder: Recorder, loss: float, aux_loss: float, norm: float, rate: float) -> None:
        values = {
            "step": self.step,
            "epoch": self.epoch + 1,
            "loss": self._mean(loss),
            "aux_loss": self._mean(aux_loss),
        }
        values |= {"lr": max(group["lr"] for group in self.optimizer.param_groups), "grad_norm": norm}
        values |= {"images_per_second": rate} | ({"loss_scale": self.scaler.scale} if self.scaler.enabled else {})
        recorder.step(
            values, {name: self._global_routing(layer.last_routing) for name, layer in moe_layers(self.model).items()}
        )

    def _global_routing(self, routing: RoutingStats) -> RoutingStats:
        counts = self.world.sum(routing.counts.clone())
        shares = self.world.sum(torch.stack([routing.dropped_share, routing.entropy.float()])) / self.world.size
        return RoutingStats(counts, *shares)

    def _record_epoch(self, recorder: Recorder, train_loss: float, accuracy: Accuracy, seconds: float) -> None:
        recorder.epoch(
            {
                "epoch": self.epoch,
                "train_loss": train_loss,
                "val_loss": accuracy.loss,
                "val_top1": accuracy.top1,
                "val_top5": accuracy.top5,
                "seconds": seconds,
            },
            self.step,
        )
        recorder.say(
            f"epoch {self.epoch}/{self.config.TRAIN.EPOCHS}  train loss {train_loss:.4f}  val loss {accuracy.loss:.4f}"
            f"  top-1 {accuracy.top1:.2f}%  best {self.best_top1:.2f}%  {seconds:.1f} s"
        )

    # State on disk

    def save(self, checkpoints: Path, is_best: bool) -> None:
        """Write the whole state as `checkpoints/epoch-<n>`; every rank calls this."""
        sections = {"": self.model.state_dict()} | checkpoint.optimizer_sections(self.optimizer, self.model)
        if self.ema:
            sections["ema"] = self.ema.module.state_dict()
        meta = {
            "epoch": self.epoch,
            "step": self.step,
            "steps_per_epoch": self.steps_per_epoch,
            "best_top1": self.best_top1,
            "last_top1": self.last_top1,
            "loss_scaler": self.scaler.state(),
            "strategies": strategy_decisions(self.model),
            "class_names": self.data.class_names,
            "config": self.config.dump(),
        }
        checkpoint.save_checkpoint(checkpoints, self.world, self.model, sections, meta, is_best)

    def resume(self, directory: Path) -> None:
        """Take over the state in `directory`; everything is read and compared before anything changes.

        Raises:
            UserError: it does not fit this run.
        """
        meta = checkpoint.read_meta(directory)
        parameters = dict(self.model.named_parameters())
        weights = checkpoint.read_section(directory, "", self.model, self.model.state_dict())
        kinds = checkpoint.optimizer_kinds(directory, self.optimizer, meta["loss_scaler"]["updates"])
        moments = {kind: checkpoint.read_section(directory, kind, self.model, parameters) for kind in kinds}
        if self.ema:
            averaged = checkpoint.read_section(directory, "ema", self.model, self.model.state_dict())
            load_whole(self.ema.module, averaged)
        load_whole(self.model, weights)
        checkpoint.restore_optimizer(self.optimizer, self.model, moments, meta["loss_scaler"]["updates"])
        self.scaler.load(meta["loss_scaler"])
        load_strategy_decisions(self.model, meta.get("strategies", []))
        self.epoch, self.step = meta["epoch"], meta["step"]
        if meta["steps_per_epoch"] != self.steps_per_epoch:  # another global batch: the schedule counts epochs
            self.step = self.epoch * self.steps_per_epoch
        self.best_top1, self.last_top1 = meta["best_top1"], meta["last_top1"]
        self.schedule.step_update(self.step)


def build_mixup(config: CfgNode, num_classes: int) -> Mixup | None:
    """timm's mixup and cutmix, or None where both are off."""
    aug = config.AUG
    if aug.MIXUP_PROB == 0 or (aug.MIXUP == 0 and aug.CUTMIX == 0):
        return None
    return Mixup(
        mixup_alpha=aug.MIXUP,
        cutmix_alpha=aug.CUTMIX,
        prob=aug.MIXUP_PROB,
        switch_prob=aug.MIXUP_SWITCH_PROB,
        mode=aug.MIXUP_MODE,
        label_smoothing=config.MODEL.LABEL_SMOOTHING,
        num_classes=num_classes,
    )


def build_autocast(config: CfgNode, world: World) -> partial:
    """A factory of autocast contexts as AMP_ENABLE and AMP_DTYPE say."""
    dtype = getattr(torch, config.AMP_DTYPE)
    return partial(torch.autocast, world.device.type, dtype=dtype, enabled=config.AMP_ENABLE)


def _steps_per_epoch(config: CfgNode, data: Data) -> int:
    steps = len(data.train_loader) // config.TRAIN.ACCUMULATION_STEPS
    if steps == 0:
        raise UserError(
            f"TRAIN.ACCUMULATION_STEPS is {config.TRAIN.ACCUMULATION_STEPS}, an epoch has only"
            f" {len(data.train_loader)} batches"
        )
    return steps


def _grouped(loader, size: int):
    """Lists of `size` consecutive batches; a shorter rest is left out."""
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
