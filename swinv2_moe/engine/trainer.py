"""Training: one class that holds what a run changes, one method for each thing that happens to
it."""

import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from yacs.config import CfgNode

from moe_core import (
    RoutingStats,
    average_expert_gradients,
    clip_gradients,
    moe_layers,
    prepared,
    strategy_decisions,
)
from swinv2_moe.config import config_from_text, data_config, train_config
from swinv2_moe.data import Batch, Data, UnreadableImages
from swinv2_moe.engine import checkpoint, optim
from swinv2_moe.engine.checkpoint import Checkpoint
from swinv2_moe.engine.diagnose import explain_non_finite
from swinv2_moe.engine.distributed import World, seed_everything
from swinv2_moe.engine.environment import peak_memory
from swinv2_moe.engine.evaluation import Accuracy, evaluate
from swinv2_moe.engine.meta import check_classifier
from swinv2_moe.engine.mixup import build_mixup
from swinv2_moe.engine.parallelize import (
    averaged_copy,
    gradient_sync,
    load_whole,
    parallelize,
    settle_buckets,
)
from swinv2_moe.engine.record import Recorder
from swinv2_moe.engine.run_warnings import LossWatch
from swinv2_moe.engine.saver import Saver
from swinv2_moe.engine.stopping import Stopped, StopSignal
from swinv2_moe.engine.timing import Batches, TimeToTarget
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel, frozen_moe


class Trainer:
    """A run: `fit` trains from where it stands to the end, `save` and `resume` move its whole state
    to and from disk.

    Random numbers are seeded anew from (SEED, step, rank) at every step, and the order of the
    images follows from (SEED, epoch): a resumed run repeats what an uninterrupted one would have
    done, and no random state is ever saved.
    """

    def __init__(self, config: CfgNode, world: World, data: Data, model: MoEModel) -> None:
        self.config, self.world, self.data = config, world, data
        self.model = model.to(world.device)
        self.ema = averaged_copy(
            self.model, world, config.TRAIN.EMA_DECAY, config.TRAIN.SHARD_TRUNK
        )
        self.wrapped = parallelize(self.model, world, config.COMPILE, config.TRAIN.SHARD_TRUNK)
        self.global_batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUMULATION_STEPS * world.size
        self.steps_per_epoch = _steps_per_epoch(config, data)
        schedule = train_config(config)
        rate = optim.scaled_learning_rate(schedule, schedule.base_lr, world.size)
        self.optimizer = optim.build_optimizer(schedule, self.model, rate)
        self.schedule = optim.build_schedule(
            schedule, self.optimizer, self.steps_per_epoch, world.size
        )
        self.scaler = optim.LossScaler(config.AMP_ENABLE and config.AMP_DTYPE == "float16")
        self.mixup = build_mixup(
            data_config(config).augment, config.MODEL.LABEL_SMOOTHING, data.num_classes
        )
        self.autocast = build_autocast(config, world)
        self.unreadable = UnreadableImages(
            data.train_size + data.val_size, config.DATA.MAX_BAD_SHARE
        )
        # this rank's, and whether any rank has received one
        self.stop, self.stopping = StopSignal(), False
        self.stopped_by: str | None = None  # the signal that has ended the run
        # epochs, steps of the epoch at hand and steps in all done so far
        self.epoch = self.epoch_step = self.step = 0
        self.validated_step = 0  # the step of the last validation
        self.epoch_loss = 0.0  # the sum over the steps of this epoch
        self.skipped = self.skipped_in_a_row = 0  # steps whose gradient was not finite
        self.best_top1, self.last_top1 = -1.0, None
        self.seconds, self.waited, self.images = 0.0, 0.0, 0  # of training proper, in this process
        self.to_target = TimeToTarget(config.TRAIN.TARGET_TOP1)
        self.loss_watch = LossWatch()

    @property
    def deployed(self) -> MoEModel:
        """The weights that are validated: the averaged ones where there are any."""
        return self.ema.module if self.ema else self.model

    @property
    def steps_done(self) -> bool:
        limit = self.config.TRAIN.MAX_STEPS
        return self.epoch >= self.config.TRAIN.EPOCHS or bool(limit and self.step >= limit)

    @property
    def finished(self) -> bool:
        return self.steps_done and self.validated_step == self.step

    def data_wait_share(self) -> float | None:
        """Of the time of training proper in this process, what the slowest rank waited for its
        loader; every rank calls this."""
        return max(self.world.gather(self.waited / self.seconds)) if self.seconds else None

    # The run

    def fit(self, recorder: Recorder, saver: Saver) -> None:
        """Train what is left, validate and record each epoch, save as SAVE_FREQ and CHECKPOINT say.

        When `stop` has received a signal, the state is saved between two steps and this returns,
        with the signal in `stopped_by`.

        Raises:
            UserError: a loss or gradient that is not finite, or too many unreadable images; the
                last checkpoint could not be written.
        """
        self.to_target.start()
        if not self.config.COMPILE:  # it would compile once more, for this pass alone
            settle_buckets(self.wrapped, self.model, self.world)
        try:
            with prepared(frozen_moe(self.model)):
                while not self.finished:
                    self._train_and_validate(recorder, saver)
        except Stopped as stopped:
            self.stopped_by = str(stopped)
            self.save(saver)
        saver.close()

    def validate(self) -> Accuracy:
        """Accuracy of the deployed weights on the validation set."""
        accuracy = evaluate(
            self.deployed, self.data.val_loader, self.world, self.autocast, self._check_stop
        )
        self._count_unreadable(accuracy.unreadable)
        return accuracy

    def _train_and_validate(self, recorder: Recorder, saver: Saver) -> None:
        """What is left of an epoch (or until MAX_STEPS)."""
        started, epoch = time.perf_counter(), self.epoch + 1
        if not self.steps_done:
            with recorder.interval("epoch", epoch_num=epoch):
                self._train_epoch(recorder, saver)
        train_loss = self._mean(self.epoch_loss) / max(self.epoch_step, 1)
        pictures = recorder.routing(
            self.deployed, self.data.val_loader, self.config.DATA, self.step
        )
        with pictures, recorder.interval("eval", epoch_num=epoch):
            accuracy = self.validate()
            recorder.event("eval_accuracy", accuracy.top1 / 100, epoch_num=epoch)
        self.validated_step = self.step
        if self.epoch_step == self.steps_per_epoch:
            self.epoch, self.epoch_step, self.epoch_loss = epoch, 0, 0.0
        is_best = accuracy.top1 > self.best_top1
        self.best_top1, self.last_top1 = max(self.best_top1, accuracy.top1), accuracy.top1
        self._record_epoch(recorder, epoch, train_loss, accuracy, time.perf_counter() - started)
        if self.to_target.validated(epoch, self.step, accuracy.top1):
            recorder.say(str(self.to_target))
        if (
            is_best
            or self.finished
            or epoch % self.config.SAVE_FREQ == 0
            or self._is_time_to_save()
        ):
            self.save(saver, is_best, whole=is_best or self.finished)

    def _train_epoch(self, recorder: Recorder, saver: Saver) -> None:
        """The steps that are left of this epoch."""
        accumulation = self.config.TRAIN.ACCUMULATION_STEPS
        self.data.set_epoch(self.epoch, skip_steps=self.epoch_step * accumulation)
        self.wrapped.train()
        first, bad, started = self.step, [], time.perf_counter()
        loader = Batches(self.data.train_loader, accumulation)
        title = f"epoch {self.epoch + 1}/{self.config.TRAIN.EPOCHS}"
        with recorder.bar(title, self.steps_per_epoch, self.epoch_step) as bar:
            for batches in loader:
                loss, aux_loss, norm = self.train_step(batches)
                bad += [path for batch in batches for path in batch.unreadable]
                rate = (self.step - first) * self.global_batch / (time.perf_counter() - started)
                bar.advance(
                    f"loss {loss:.3f}  val top-1 {self._last_accuracy}  {rate:,.0f} images/s"
                )
                if self.skipped_in_a_row:
                    recorder.say(
                        f"step {self.step}: loss or gradient not finite, skipped ({self.skipped} so"
                        " far)"
                    )
                if warning := self.loss_watch.add(loss):
                    recorder.say(f"warning: step {self.step}: {warning}")
                if self.step % self.config.PRINT_FREQ == 0:
                    self._record_step(recorder, loss, aux_loss, norm, rate, loader.wait_share())
                    self._count_unreadable(bad)
                    bad = []
                if self.stopping:
                    raise Stopped(self._signal())
                if self.steps_done:
                    break
                # else after the validation
                if self._is_time_to_save() and self.epoch_step < self.steps_per_epoch:
                    self.save(saver, whole=False)
        self._count_unreadable(bad)
        self.seconds += time.perf_counter() - started
        self.waited += loader.waited
        self.images += (self.step - first) * self.global_batch

    def _is_time_to_save(self) -> bool:
        every = self.config.CHECKPOINT.STEPS
        return bool(every) and self.step % every == 0

    def _check_stop(self) -> None:
        """Raise Stopped on every rank if any of them has received a signal."""
        if (
            self.world.sum(
                torch.tensor(float(self.stop.received is not None), device=self.world.device)
            )
            > 0
        ):
            raise Stopped(self._signal())

    def _signal(self) -> str:
        """The signal that some rank has received."""
        return next(filter(None, self.world.gather(self.stop.received)))

    def train_step(self, batches: Sequence[Batch]) -> tuple[float, float, float]:
        """One optimiser step over the accumulated batches: this rank's mean loss and aux loss, the
        global norm."""
        seed_everything(self.config.SEED, self.step, self.world.rank)
        total = torch.zeros(2, device=self.world.device)
        for i, batch in enumerate(batches):
            with gradient_sync(self.wrapped, enabled=i == len(batches) - 1):
                loss, aux_loss = self.loss(batch)
                with self.world.named_errors(f"the backward pass of step {self.step + 1}"):
                    (loss * self.scaler.scale / len(batches)).backward()
            total += torch.stack([loss.detach(), aux_loss.detach()]) / len(batches)
        average_expert_gradients(self.model)
        self.scaler.unscale([p.grad for p in self.model.parameters() if p.grad is not None])
        norm = clip_gradients(self.model, self.config.TRAIN.CLIP_GRAD)
        # a fill; a copy would wait for the GPU
        signalled = torch.full_like(total[0], self.stop.received is not None)
        flags = torch.stack([(~torch.isfinite(total[0])).float(), signalled])
        bad_losses, stops = self.world.sum(flags).tolist()  # the step's one wait for it
        loss, aux_loss, norm = *total.tolist(), float(norm)
        self._update(bad_losses == 0 and norm < float("inf"), batches)
        self.stopping = stops > 0
        self.epoch_loss += loss if bad_losses == 0 else 0.0
        return loss, aux_loss, norm

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss to minimise, with the weighted auxiliary loss in it, and that loss alone,
        unweighted: scalars."""
        images, targets = self._mixed(batch)
        # mixup smooths its own targets
        smoothing = 0.0 if self.mixup else self.config.MODEL.LABEL_SMOOTHING
        with self.autocast(), self.world.named_errors(f"the forward pass of step {self.step + 1}"):
            logits, aux_loss = self.wrapped(images)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        return loss + self.config.MODEL.MOE.AUX_LOSS_WEIGHT * aux_loss, aux_loss

    def _mixed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images = batch.images.to(self.world.device, non_blocking=True)
        targets = batch.targets.to(self.world.device, non_blocking=True)
        return self.mixup(images, targets) if self.mixup else (images, targets)

    def _update(self, finite: bool, batches: Sequence[Batch]) -> None:
        """Step the optimiser, unless a loss or the gradient, of whichever rank, is not `finite`."""
        self.scaler.update(finite)
        if finite:
            self.optimizer.step()
            self.skipped_in_a_row = 0
        elif self.scaler.exhausted:
            if self.skipped_in_a_row == self.config.TRAIN.SKIP_NON_FINITE:
                images = self._mixed(batches[-1])[0]
                raise UserError(explain_non_finite(self.step + 1, self.model, images, self.world))
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        self.optimizer.zero_grad(set_to_none=True)
        self.step, self.epoch_step = self.step + 1, self.epoch_step + 1
        self._update_schedule()
        if self.ema and finite:
            self.ema.update(self.model)

    def _update_schedule(self) -> None:
        """The learning rate follows epochs: on another number of ranks they may have another number
        of steps."""
        self.schedule.step_update(self.epoch * self.steps_per_epoch + self.epoch_step)

    # Records

    @property
    def _last_accuracy(self) -> str:
        return "-" if self.last_top1 is None else f"{self.last_top1:.1f}%"

    def _mean(self, value: float) -> float:
        return (
            float(
                self.world.sum(torch.tensor(value, dtype=torch.float64, device=self.world.device))
            )
            / self.world.size
        )

    def _count_unreadable(self, paths: list[str]) -> None:
        self.unreadable.add(path for part in self.world.gather(paths) for path in part)

    def _record_step(
        self,
        recorder: Recorder,
        loss: float,
        aux_loss: float,
        norm: float,
        rate: float,
        data_wait: float,
    ) -> None:
        values = {
            "step": self.step,
            "epoch": self.epoch + 1,
            "loss": self._mean(loss),
            "aux_loss": self._mean(aux_loss),
        }
        values |= {
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "grad_norm": norm,
        }
        values |= {"images_per_second": rate, "data_wait": max(self.world.gather(data_wait))}
        values |= {"memory_bytes": peak_memory(self.world.device)}
        values |= {"loss_scale": self.scaler.scale} if self.scaler.enabled else {}
        recorder.step(
            values,
            {
                name: self._global_routing(layer.last_routing)
                for name, layer in moe_layers(self.model).items()
            },
        )

    def _global_routing(self, routing: RoutingStats) -> RoutingStats:
        counts = self.world.sum(routing.counts.clone())
        shares = (
            self.world.sum(torch.stack([routing.dropped_share, routing.entropy.float()]))
            / self.world.size
        )
        return RoutingStats(counts, *shares)

    def _record_epoch(
        self, recorder: Recorder, epoch: int, train_loss: float, accuracy: Accuracy, seconds: float
    ) -> None:
        recorder.epoch(
            {
                "epoch": epoch,
                "train_loss": train_loss,
                "val_loss": accuracy.loss,
                "val_top1": accuracy.top1,
                "val_top5": accuracy.top5,
                "seconds": seconds,
            },
            self.step,
        )
        recorder.say(
            f"epoch {epoch}/{self.config.TRAIN.EPOCHS}  train loss {train_loss:.4f}  val loss"
            f" {accuracy.loss:.4f}"
            f"  top-1 {accuracy.top1:.2f}%  best {self.best_top1:.2f}%  {seconds:.1f} s"
        )

    # State on disk

    def save(self, saver: Saver, is_best: bool = False, whole: bool = True) -> None:
        """Begin to write the whole state; every rank calls this. Arguments as in `Saver.save`."""
        sections = {"": self.model.state_dict()} | optim.optimizer_sections(
            self.optimizer, self.model
        )
        if self.ema:
            sections["ema"] = self.ema.module.state_dict()
        training = {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "epoch_loss": self._mean(self.epoch_loss),
            "validated_step": self.validated_step,
            "steps_per_epoch": self.steps_per_epoch,
            "global_batch": self.global_batch,
            "world_size": self.world.size,
            "best_top1": self.best_top1,
            "last_top1": self.last_top1,
            "time_to_target": self.to_target.state(),
            "loss_watch": self.loss_watch.state(),
            "skipped": self.skipped,
            "loss_scaler": self.scaler.state(),
            "strategies": strategy_decisions(self.model),
        }
        meta = checkpoint.describe(
            self.model, self.step, self.config, self.data.class_names, training
        )
        saver.save(self.model, sections, meta, is_best, whole)

    def resume(self, source: Checkpoint) -> None:
        """Take over the state of a checkpoint; everything is read and compared before anything
        changes.

        Raises:
            UserError: it does not fit this run, or holds weights alone.
        """
        training = source.meta["training"]
        if training is None:
            raise UserError(
                f"checkpoint {source.directory} holds weights alone, no state of a training run to"
                " go on from; to start"
                " from them: MODEL.PRETRAINED"
            )
        check_classifier(source.directory, training)
        updates = training["loss_scaler"]["updates"]
        parameters = optim.trained_parameters(self.model)
        weights = checkpoint.read_section(source, "", self.model, self.model.state_dict())
        kinds = source.optimizer_sections()
        try:
            optim.check_optimizer_sections(self.optimizer, kinds, updates)
        except ValueError as error:
            raise UserError(
                f"checkpoint {source.directory}: {error}; nothing was loaded"
            ) from error
        was_frozen = config_from_text(
            source.meta["config"], f"checkpoint {source.directory}"
        ).MODEL.MOE.FREEZE
        if was_frozen != self.config.MODEL.MOE.FREEZE:
            raise UserError(
                f"checkpoint {source.directory}: was written with MODEL.MOE.FREEZE {was_frozen},"
                " which a run cannot"
                " change on its way; MODEL.PRETRAINED starts another from its weights"
            )
        moments = {
            kind: checkpoint.read_section(source, kind, self.model, parameters) for kind in kinds
        }
        checkpoint.load_strategies(source, self.model)
        if self.ema:
            load_whole(
                self.ema.module,
                checkpoint.read_section(source, "ema", self.model, self.model.state_dict()),
            )
        load_whole(self.model, weights)
        optim.restore_optimizer(self.optimizer, self.model, moments, updates)
        self.scaler.load(training["loss_scaler"])
        self.step, self.epoch = source.meta["step"], training["epoch"]
        self.best_top1, self.last_top1 = training["best_top1"], training["last_top1"]
        self.validated_step = training["validated_step"]
        self.skipped = training["skipped"]
        if "time_to_target" in training:  # earlier versions lack it
            self.to_target.load(training["time_to_target"])
        if "loss_watch" in training:
            self.loss_watch.load(training["loss_watch"])
        # Another global batch: the steps that the images seen so far would have been. (A few may be
        # seen again.)
        seen = training["epoch_step"] * training["global_batch"] // self.global_batch
        self.epoch_step = min(seen, self.steps_per_epoch)
        self.epoch_loss = training["epoch_loss"] * self.epoch_step / max(training["epoch_step"], 1)
        self._update_schedule()


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
