"""The loop of a training run: epochs of steps, a validation after each epoch, and checkpoints."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from moe_core import RoutingStats, moe_layers, prepared, strategy_decisions
from swinv2_moe.checkpoints import checkpoint
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.checkpoints.meta import check_classifier, describe
from swinv2_moe.checkpoints.saver import Saver
from swinv2_moe.config import AllSections, Change, changed_keys, config_from_text, train_config
from swinv2_moe.config.load import left_keys
from swinv2_moe.data.build import Data
from swinv2_moe.data.classes import difference
from swinv2_moe.data.datasets import UnreadableImages
from swinv2_moe.data.sources.base import content_id
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel, frozen_moe
from swinv2_moe.ranks.agreement import DATA_PATHS
from swinv2_moe.ranks.environment import peak_memory
from swinv2_moe.ranks.parallelize import load_sharded, settle_buckets
from swinv2_moe.ranks.world import Stopped, StopSignal, World
from swinv2_moe.start.initial import read_upcycled
from swinv2_moe.start.known import accuracy_in_words
from swinv2_moe.tables import in_words, seconds_left
from swinv2_moe.train import optim
from swinv2_moe.train.distill import Distillation
from swinv2_moe.train.energy import GpuEnergy, total
from swinv2_moe.train.evaluation import Accuracy, evaluate
from swinv2_moe.train.progress import (
    Batches,
    PhaseTimes,
    Progress,
    Throughput,
    TimeToTarget,
    steps_per_epoch,
)
from swinv2_moe.train.record import Recorder
from swinv2_moe.train.step import StepResult, TrainingStep
from swinv2_moe.train.tuning import Tuning


class Trainer:
    """A training run. `fit` trains from the state in `progress` to the end. `save` and `resume`
    write and read the state of the run.

    The order of the images depends only on (SEED, epoch), random numbers only on (SEED, step,
    rank). So a resumed run gives the same results as an uninterrupted one, and no random state is
    saved.
    """

    def __init__(
        self,
        config: AllSections,
        world: World,
        data: Data,
        model: MoEModel,
        phases: PhaseTimes | None = None,
        distillation: Distillation | None = None,
    ) -> None:
        """Create the trainer of a new run.

        Args:
            phases: times of this process since the program began; None: measured from now on.
            distillation: the teacher and its outputs; None: the labels alone are learned.
        """
        if phases is None:
            phases = PhaseTimes()
        self.config = config
        self.world = world
        self.data = data
        val_images = data.val_loader.dataset.source
        self.validation_id = world.agree(content_id(val_images) if world.is_main else "")
        self.stop = StopSignal()
        self.stopped_by: str | None = None  # the signal that ended the run
        self.changes: list[Change] = []  # of the configuration, since the checkpoint
        self.rates: tuple[float, float] | None = None  # of the next step, before and after these
        self.distillation = distillation
        self.step = TrainingStep(
            config.train, world, model, data.num_classes, self.stop, distillation
        )
        accumulation = config.train.accumulation_steps
        self.progress = Progress(
            epochs=config.train.epochs,
            max_steps=config.train.max_steps,
            steps_per_epoch=steps_per_epoch(accumulation, len(data.train_loader)),
            global_batch=config.train.batch_size * accumulation * world.size,
            to_target=TimeToTarget(config.train.target_top1, phases),
            best_by=config.train.best_by,
            patience=config.train.patience,
        )
        self.schedule = self.step.schedule(self.progress.steps_per_epoch)
        self.tuning = Tuning(model)
        self.dense_updates = 0  # optimiser updates before MODEL.UPCYCLE run upcycled the model
        self.throughput = Throughput()
        self.phases = phases
        self.energy = GpuEnergy(world.device)
        self.joules: float | None = None  # of the GPUs in all parts of the run; None: not known
        self.validation_seconds = 0.0  # duration of the last validation
        self.temperature = 1.0  # of the logits in the last validation
        self.novelty: dict | None = None  # of the last validation
        self.epoch_started = time.perf_counter()
        num_images = data.train_size + data.val_size
        self.unreadable = UnreadableImages(num_images, config.data.max_bad_share)

    def data_wait_share(self) -> float | None:
        """The share of training time that the slowest rank waited for its loader, 0 to 1. None
        before training. Every rank calls this."""
        if not self.throughput.seconds:
            return None
        return max(self.world.gather(self.throughput.waited / self.throughput.seconds))

    # The run

    def fit(self, recorder: Recorder, saver: Saver) -> None:
        """Train to the end. Validate and record each epoch; save as SAVE_FREQ and CHECKPOINT say.

        After a signal to stop, this saves the state between two steps, sets `stopped_by` to the
        signal, and returns.

        Raises:
            UserError: a loss or gradient is not finite, too many images cannot be read, or the
                last checkpoint could not be written.
        """
        self.phases.started()
        # with COMPILE, this pass would need a separate compilation
        if not self.config.train.compile:
            settle_buckets(self.step.wrapped, self.step.model, self.world)
        try:
            with prepared(frozen_moe(self.step.model)):
                if self.config.train.probe and not self.progress.step:
                    self._validate_start(recorder, saver)
                while not self.progress.finished:
                    self._train_and_validate(recorder, saver)
        except Stopped as stopped:
            self.stopped_by = str(stopped)
            if self.progress.step:  # the teacher computes before the first step
                self.save(saver)
        with self.phases.phase("saving"):
            saver.close()

    def validate(self) -> Accuracy:
        """Accuracy of the deployed weights on the validation set. Every rank calls this."""
        step, config = self.step, self.config.train
        started = time.perf_counter()
        accuracy = evaluate(
            step.deployed,
            self.data.val_loader,
            self.world,
            step.autocast,
            self.check_stop,
            # a compiled model would not show what its classifier sees
            novelty=config.best_by == "calibrated" and not config.compile,
        )
        self.validation_seconds = time.perf_counter() - started
        self.temperature, self.novelty = accuracy.temperature, accuracy.novelty
        self._count_unreadable(accuracy.unreadable)
        return accuracy

    def train_step(self, batches: list) -> StepResult:
        """One optimiser step on accumulated batches. Every rank calls this.

        Raises:
            UserError: see `TrainingStep.run`.
        """
        result = self.step.run(batches, self.progress.step)
        self.progress.count_step(result)
        self.schedule.step_update(self.progress.schedule_step)
        return result

    def _validate_start(self, recorder: Recorder, saver: Saver) -> None:
        """Validate and save the model before the first step, unless an earlier part has."""
        if self.progress.best_top1 >= 0:
            return
        with self.phases.phase("validation"):
            accuracy = self.validate()
        self.progress.count_validation(accuracy.top1, accuracy.score(self.progress.best_by))
        values = {"epoch": 0} | _validated(accuracy) | {"seconds": self.validation_seconds}
        recorder.epoch(values, 0)
        recorder.print_lines(f"the frozen network: {_in_words(accuracy)}")
        self.save(saver, is_best=True)

    def _train_and_validate(self, recorder: Recorder, saver: Saver) -> None:
        """Train the rest of an epoch, or the steps until MAX_STEPS, and validate if that is due."""
        progress = self.progress
        self.epoch_started = time.perf_counter()
        epoch = progress.epoch + 1
        if not progress.steps_done:
            with self.phases.phase("training"), recorder.interval("epoch", epoch_num=epoch):
                self._train_epoch(recorder, saver)
            self._end_in_time(epoch)
        is_last = progress.steps_done or self._is_last_epoch(epoch)
        if epoch % self.config.run.val_freq and not is_last:
            self._count_epoch(saver, epoch)
            return
        train_loss = mean_over_ranks(self.world, progress.epoch_loss)
        if progress.epoch_losses:
            train_loss /= progress.epoch_losses
        config, loader = self.config.data, self.data.val_loader
        pictures = recorder.routing(
            self.step.deployed, loader, config.mean, config.std, progress.step
        )
        evaluating = recorder.interval("eval", epoch_num=epoch)
        with self.phases.phase("validation"), pictures, evaluating:
            accuracy = self.validate()
            recorder.mark("eval_accuracy", accuracy.top1 / 100, epoch_num=epoch)
        recorder.strategies(self.tuning.take_events(), progress.step)
        is_best = progress.count_validation(accuracy.top1, accuracy.score(progress.best_by))
        self.joules = total([self.joules, *self.world.gather(self.energy.take())])
        self._record_epoch(recorder, epoch, train_loss, accuracy, self._epoch_seconds())
        progress.epoch_seconds = 0.0
        self.epoch_started = time.perf_counter()
        if progress.to_target.validated(epoch, progress.step, accuracy.top1, self.joules):
            recorder.print_lines(str(progress.to_target))
        is_due = epoch % self.config.run.save_freq == 0 or self._is_time_to_save()
        if progress.ended:
            recorder.print_lines(f"training ends: {progress.ended}")
        if is_best or progress.finished or is_due:
            self.save(saver, is_best)

    def _is_last_epoch(self, epoch: int) -> bool:
        return epoch >= self.progress.epochs

    def _count_epoch(self, saver: Saver, epoch: int) -> None:
        """End an epoch that is not validated."""
        self.progress.count_epoch()
        self.progress.epoch_seconds = self._epoch_seconds()  # those since the last validation
        self.epoch_started = time.perf_counter()
        if epoch % self.config.run.save_freq == 0 or self._is_time_to_save():
            self.save(saver)

    def _end_in_time(self, epoch: int) -> None:
        """End the training if its next epoch would end after MINUTES. Every rank calls this."""
        minutes = self.config.train.minutes
        if not minutes or self._is_last_epoch(epoch):
            return
        beside = self.validation_seconds * (1 + 1 / self.config.run.val_freq)
        epoch_seconds = time.perf_counter() - self.epoch_started
        expected = sum(self.phases.seconds().values()) + epoch_seconds + beside
        if self.config.train.on_all:  # the same again, on all pictures
            expected += epoch * epoch_seconds / (1 - self.config.data.val_split)
        if self.world.agree(expected > 60 * minutes):
            self.progress.ended = f"the {minutes:g} minutes (TRAIN.MINUTES) are over"

    def _epoch_seconds(self) -> float:
        """Seconds of the epochs since the last validation, over all parts of a resumed run."""
        return self.progress.epoch_seconds + time.perf_counter() - self.epoch_started

    def _train_epoch(self, recorder: Recorder, saver: Saver) -> None:
        """Train the remaining steps of this epoch."""
        progress = self.progress
        accumulation = self.config.train.accumulation_steps
        if self.distillation is not None:
            view = self.data.view_of_epoch(progress.epoch)
            with self.phases.phase("data"):
                self.distillation.prepare(view, recorder, self.check_stop)
        self.data.set_epoch(progress.epoch, skip_steps=progress.epoch_step * accumulation)
        self.step.train()
        loader = Batches(self.data.train_loader, accumulation, self.phases)
        title = f"epoch {progress.epoch + 1}/{progress.epochs}"
        unreadable: list[str] = []
        images = 0
        started = time.perf_counter()
        with recorder.bar(title, progress.steps_per_epoch, progress.epoch_step) as bar:
            for batches in loader:
                result = self.train_step(batches)
                for batch in batches:
                    unreadable += batch.unreadable
                images += progress.global_batch
                rate = images / (time.perf_counter() - started)
                bar.advance(self._bar_text(result.loss, rate), self._time_left(rate))
                self._warn(recorder, result)
                if self.tuning.tuners:
                    recorder.strategies(self.tuning.take_events(), progress.step)
                if progress.step % self.config.run.print_freq == 0 or progress.is_last_step:
                    self._record_step(recorder, result, rate, loader.wait_share())
                    self._count_unreadable(unreadable)
                    unreadable = []
                if result.stopping:
                    raise Stopped(self._signal())
                if progress.steps_done:
                    break
                # at the end of an epoch, saving follows the validation
                is_inside = progress.epoch_step < progress.steps_per_epoch
                if is_inside and self._is_time_to_save():
                    self.save(saver)
        self._count_unreadable(unreadable)
        self.throughput.add(images, time.perf_counter() - started, loader.waited)

    def _is_time_to_save(self) -> bool:
        every = self.config.checkpoint.steps
        return bool(every) and self.progress.step % every == 0

    def check_stop(self) -> None:
        """Raise Stopped on every rank if a rank has received a signal."""
        signalled = float(self.stop.received is not None)
        if self.world.sum(torch.tensor(signalled, device=self.world.device)) > 0:
            raise Stopped(self._signal())

    def _signal(self) -> str:
        """The signal that a rank has received."""
        return next(filter(None, self.world.gather(self.stop.received)))

    def _count_unreadable(self, paths: list[str]) -> None:
        everyone = self.world.gather(paths)
        self.unreadable.add([path for part in everyone for path in part])

    # Records

    def _bar_text(self, loss: float, rate: float) -> str:
        top1 = self.progress.last_top1
        accuracy = "-"
        if top1 is not None:
            accuracy = f"{top1:.1f}%"
        return f"loss {loss:.3f}  top-1 {accuracy}  {rate:,.0f} images/s"

    def _time_left(self, rate: float) -> str:
        """The end of the progress bar's text: the remaining time of the run, at `rate` images/s."""
        seconds_per_step = self.progress.global_batch / rate
        seconds = seconds_left(self.progress, seconds_per_step, self.validation_seconds)
        return f"left, {in_words(seconds)} of the run"

    def _warn(self, recorder: Recorder, result: StepResult) -> None:
        """Report a skipped step, and a diverging loss."""
        progress = self.progress
        if result.was_skipped:
            recorder.print_lines(
                f"step {progress.step}: loss or gradient not finite, skipped"
                f" ({progress.skipped} so far)"
            )
        warning = progress.loss_watch.add(result.loss)
        if warning:
            recorder.print_lines(f"warning: step {progress.step}: {warning}")

    def _record_step(
        self, recorder: Recorder, result: StepResult, rate: float, data_wait: float
    ) -> None:
        step = self.step
        values = {
            "step": self.progress.step,
            "epoch": self.progress.epoch + 1,
            "loss": mean_over_ranks(self.world, result.loss),
            "aux_loss": mean_over_ranks(self.world, result.aux_loss),
            "lr": max(group["lr"] for group in step.optimizer.param_groups),
            "grad_norm": result.grad_norm,
            "images_per_second": rate,
            "data_wait": max(self.world.gather(data_wait)),
            "memory_bytes": peak_memory(self.world.device),
        }
        if result.label_loss is not None and result.teacher_loss is not None:
            values["label_loss"] = mean_over_ranks(self.world, result.label_loss)
            values["teacher_loss"] = mean_over_ranks(self.world, result.teacher_loss)
        if step.scaler.enabled:
            values["loss_scale"] = step.scaler.scale
        routing = {
            name: self._global_routing(layer.last_routing)
            for name, layer in moe_layers(step.model).items()
        }
        recorder.step(values, routing)

    def _global_routing(self, routing: RoutingStats | None) -> RoutingStats:
        assert routing is not None
        counts = self.world.sum(routing.counts.clone())
        shares = torch.stack([routing.dropped_share, routing.entropy.float()])
        dropped_share, entropy = self.world.sum(shares) / self.world.size
        needed_factor = self.world.max(routing.needed_factor.clone())
        return RoutingStats(counts, dropped_share, entropy, needed_factor)

    def _record_epoch(
        self, recorder: Recorder, epoch: int, train_loss: float, accuracy: Accuracy, seconds: float
    ) -> None:
        values = {"epoch": epoch, "train_loss": train_loss} | _validated(accuracy)
        recorder.epoch(values | {"seconds": seconds}, self.progress.step)
        balanced = ""
        if self.progress.best_by == "balanced":
            balanced = f"  balanced {accuracy.balanced:.2f}%"
        recorder.print_lines(
            f"epoch {epoch}/{self.progress.epochs}  train loss {train_loss:.4f}"
            f"  val loss {accuracy.loss:.4f}  top-1 {accuracy.top1:.2f}%"
            f"{balanced}  best {self.progress.best_top1:.2f}%  {seconds:.1f} s"
        )

    # State on disk

    def save(self, saver: Saver, is_best: bool = False) -> None:
        """Begin to write the state of the run. Every rank calls this.

        Args:
            is_best: the checkpoint `best` is this one from now on.
        """
        with self.phases.phase("saving"):
            saver.save(self.step.model, self.step.state(), self._meta(), is_best)

    def _meta(self) -> dict:
        step = self.step
        training = self.progress.state() | {
            "epoch_loss": mean_over_ranks(self.world, self.progress.epoch_loss),
            "epoch_seconds": self._epoch_seconds(),
            "world_size": self.world.size,
            "images": [self.data.train_size, self.data.val_size],
            "validation": self.validation_id,
            "loss_scaler": step.scaler.state(),
            "strategies": strategy_decisions(step.model),
            "dense_updates": self.dense_updates,
            "joules": self.joules,
        }
        meta = describe(
            step.model, self.progress.step, self.config.yaml, self.data.class_names, training
        )
        if self.config.train.best_by == "calibrated":
            meta["temperature"] = self.temperature
            if self.novelty:
                meta["novelty"] = self.novelty
        return meta

    def resume(self, source: Checkpoint) -> None:
        """Load the state of a checkpoint. Everything is read and compared before anything changes.

        With MODEL.UPCYCLE run, the checkpoint is that of a dense run, and its state is
        upcycled.

        Raises:
            UserError: the state does not fit this run, or the checkpoint holds only weights.
        """
        step = self.step
        training = self._check_training(source)
        self._check_class_names(source)
        if source.has("ema") != (step.ema is not None):
            raise UserError(
                f"checkpoint {source.directory}: its run had averaged weights:"
                f" {source.has('ema')}, TRAIN.EMA_DECAY is {self.config.train.ema_decay}; this"
                " cannot change within a run"
            )
        state = step.model.state_dict()
        is_dense = not source.meta["experts"]
        upcycles = self.config.model.upcycle == "run" and is_dense
        read: Callable[..., dict[str, Tensor]] = checkpoint.read_section
        if upcycles:
            read = read_upcycled
        weights = read(source, "", step.model, state)
        kinds = source.optimizer_sections()
        updates = training["loss_scaler"]["updates"]
        try:
            optim.check_optimizer_sections(step.optimizer, kinds, updates)
        except ValueError as error:
            raise UserError(
                f"checkpoint {source.directory}: {error}; nothing was loaded"
            ) from error
        self._check_frozen(source)
        parameters = optim.trained_parameters(step.model)
        moments = {kind: read(source, kind, step.model, parameters) for kind in kinds}
        checkpoint.load_strategies(source, step.model)
        if step.ema:
            averaged = read(source, "ema", step.model, state)
            load_sharded(step.ema.module, averaged)
        load_sharded(step.model, weights)
        self.dense_updates = training.get("dense_updates", 0)
        self.joules = training.get("joules")
        self.temperature = source.meta.get("temperature", 1.0)
        self.novelty = source.meta.get("novelty")
        if upcycles:
            self.dense_updates = updates
        optim.restore_optimizer(step.optimizer, step.model, moments, updates, self.dense_updates)
        step.scaler.load(training["loss_scaler"])
        self.progress.load(source.meta["step"], training)
        self.schedule.step_update(self.progress.schedule_step)
        self._compare(source, upcycles)

    def _compare(self, source: Checkpoint, upcycles: bool) -> None:
        """Record the changes of the configuration since the checkpoint. Forget its accuracies if
        they were measured of something else."""
        before, now = (
            config_from_text(text, f"checkpoint {source.directory}")
            for text in (source.meta["config"], self.config.yaml)
        )
        self.changes = changed_keys(before, now)
        for name, value in left_keys(source.meta["config"]).items():
            self.changes.append(Change(name, value, None, "training"))
        if upcycles:  # keys of experts have no meaning for the dense run
            self.changes = [one for one in self.changes if not one.key.startswith("MODEL.MOE.")]
            self.changes = [one for one in self.changes if one.affects != "start"]
        training = source.meta["training"]
        is_same = bool(self.validation_id) and training.get("validation") == self.validation_id
        if is_same:  # perhaps moved
            self.changes = [
                one._replace(affects="training") if one.key in DATA_PATHS else one
                for one in self.changes
            ]
        self.rates = (
            optim.learning_rate_after(train_config(before), training),
            optim.learning_rate_after(train_config(now), self.progress.state()),
        )
        counts = [self.data.train_size, self.data.val_size]
        images = training.get("images", counts)
        if images != counts:
            measured = bool(self.config.data.val_split) or images[1] != counts[1]
            affects = "accuracy" if measured and not is_same else "training"
            name = "the number of images (training, validation)"
            self.changes.append(Change(name, images, counts, affects))
        is_measured_otherwise = any(one.affects == "accuracy" for one in self.changes)
        if upcycles or (is_measured_otherwise and not self.progress.finished):
            self.progress.forget_validations()
        limits = ("EPOCHS", "MAX_STEPS", "PATIENCE", "MINUTES")
        if any(before.TRAIN[key] != now.TRAIN[key] for key in limits):
            self.progress.ended = ""

    def _check_training(self, source: Checkpoint) -> dict:
        """The state of the training in a checkpoint, which must be from a classifier's run."""
        training = source.meta["training"]
        if training is None:
            raise UserError(
                f"checkpoint {source.directory} holds only weights, no training state to"
                " continue from; to start from them: MODEL.PRETRAINED"
            )
        check_classifier(source.directory, training)
        return training

    def _check_class_names(self, source: Checkpoint) -> None:
        where = f"checkpoint {source.directory}"
        trained = source.meta["class_names"]
        if not trained:
            return
        other = difference(trained, self.data.class_names, where)
        if other:
            raise UserError(
                f"{where}: was trained on other classes: {other}; to train its weights on these:"
                " MODEL.PRETRAINED"
            )

    def _check_frozen(self, source: Checkpoint) -> None:
        where = f"checkpoint {source.directory}"
        saved = config_from_text(source.meta["config"], where)
        was_frozen = saved.MODEL.MOE.FREEZE
        if was_frozen != self.config.model.experts.freeze:
            raise UserError(
                f"{where}: was written with MODEL.MOE.FREEZE {was_frozen}, which cannot change"
                " within a run; MODEL.PRETRAINED starts another run from its weights"
            )


def _validated(accuracy: Accuracy) -> dict[str, float]:
    """What metrics.jsonl has of a validation."""
    return {
        "val_loss": accuracy.loss,
        "val_top1": accuracy.top1,
        "val_top5": accuracy.top5,
        "val_balanced": accuracy.balanced,
    }


def _in_words(accuracy: Accuracy) -> str:
    return accuracy_in_words(round(accuracy.top1 * accuracy.images / 100), accuracy.images)


def mean_over_ranks(world: World, value: float) -> float:
    """The mean of every rank's `value`. Every rank calls this."""
    total = world.sum(torch.tensor(value, dtype=torch.float64, device=world.device))
    return float(total) / world.size
