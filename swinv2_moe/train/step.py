"""One optimiser step over all ranks: mixup, forward, backward, clipping and update."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

import moe_core
from moe_core import (
    clip_to_norm,
    finish_gradients,
    reset_balance_loads,
    update_balance,
)
from swinv2_moe.data.datasets import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel
from swinv2_moe.ranks.parallelize import averaged_copy, gradient_sync, parallelize
from swinv2_moe.ranks.precision import build_autocast
from swinv2_moe.ranks.world import StopSignal, World, seed_everything
from swinv2_moe.start.teacher import distillation_loss
from swinv2_moe.train import optim
from swinv2_moe.train.diagnose import explain_non_finite
from swinv2_moe.train.graph import StepGraph, compile_kernels, step_graph
from swinv2_moe.train.section import TrainConfig


class StepResult(NamedTuple):
    """The result of one step. Losses are means over the images of this rank."""

    loss: float  # including the weighted auxiliary loss
    aux_loss: float  # unweighted
    grad_norm: float  # over all ranks, before clipping
    has_finite_loss: bool  # on every rank
    was_skipped: bool  # the optimiser did not change the weights
    stopping: bool  # a rank has received a signal to stop
    # of a run with a teacher, unweighted: the loss of the labels, and that of the teacher
    label_loss: float | None = None
    teacher_loss: float | None = None


class TrainingStep:
    """A model, its optimiser and all other objects of an optimiser step.

    Random numbers are seeded from (SEED, step, rank) at each step: the result depends only on the
    weights, the batches and the number of the step.

    Args:
        num_classes: number of classes of mixup's targets.
        stop: the signal that this process has received, if any. Each step shares it with the other
            ranks.
        teacher: looks up the teacher's logits, float32 [B, classes], for `Batch.indices`; None:
            the labels alone are learned.

    Raises:
        UserError: GRAPH is True, and there are several ranks or the device is no GPU.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        model: MoEModel,
        num_classes: int,
        stop: StopSignal | None = None,
        teacher: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.stop = stop or StopSignal()
        self.teacher = teacher
        self.model = model.to(world.device)
        self.ema = averaged_copy(self.model, world, config.ema_decay, config.shard_trunk)
        self.wrapped = parallelize(self.model, world, config.compile, config.shard_trunk)
        # the highest rate of the schedule, scaled to the global batch
        self.learning_rate = config.scaled_rate(config.base_lr, world.size)
        self.optimizer = optim.build_optimizer(config, self.model, self.learning_rate)
        self.scaler = optim.LossScaler(config.amp_enable and config.amp_dtype == "float16")
        self.autocast = build_autocast(config.amp_enable, config.amp_dtype, world)
        self.mixup: Mixup | None = None
        mixup, cutmix = config.augment.mixup, config.augment.cutmix
        if mixup or cutmix:
            self.mixup = Mixup(
                mixup, cutmix, label_smoothing=config.label_smoothing, num_classes=num_classes
            )
        self.compute_dtype = torch.float32
        if config.amp_enable:
            self.compute_dtype = getattr(torch, config.amp_dtype)
        self.skipped_in_a_row = 0
        self._read: list[str] = []  # names of what `_compute` returns
        # a single GPU's: those of several ranks have collectives between them
        self._kernels_are_compiled = world.device.type != "cuda" or world.size > 1 or config.compile
        self.graph: StepGraph | None = None
        graph = step_graph(config.graph, config.obstacle_to_graph(), self.model, world)
        if graph is not None:
            self.replay_from_now_on(graph)

    def replay_from_now_on(self, graph: StepGraph) -> None:
        """Compute the following steps as a CUDA graph. Whether gradients are clipped and weights
        updated is then decided on the device."""
        self.graph = graph
        self.device_step = optim.DeviceStep(self.optimizer)

    def schedule(self, steps_per_epoch: int) -> CosineLRScheduler:
        """The schedule of the learning rate."""
        return optim.build_schedule(self.config, self.optimizer, steps_per_epoch, self.world.size)

    def train(self) -> None:
        """Put the model into training mode. After a probe, batch norms keep the statistics with
        which the features were computed: those of small batches would replace them."""
        self.wrapped.train()
        if self.config.probe:
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    module.eval()

    @property
    def deployed(self) -> MoEModel:
        """The model to validate: the averaged weights if there are any."""
        if self.ema:
            return self.ema.module
        return self.model

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The sections of a checkpoint: the weights (""), the optimiser's moments
        ("optimizer/exp_avg", ...) and the averaged weights ("ema"), if any."""
        sections = {"": self.model.state_dict()}
        sections |= optim.optimizer_sections(self.optimizer, self.model)
        if self.ema:
            sections["ema"] = self.ema.module.state_dict()
        return sections

    def run(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Run one step on accumulated batches, of equal size on all ranks. Every rank calls this.

        Args:
            step: number of steps before this one.

        Raises:
            UserError: a loss or gradient is not finite, and the SKIP_NON_FINITE steps before this
                one were skipped. The message names the layer with the first such value.
        """
        if not self._kernels_are_compiled:
            self._kernels_are_compiled = True
            shape = batches[0].images.shape
            compile_kernels(self.model, shape, self.world.device, self.compute_dtype, self.autocast)
            torch.cuda.reset_peak_memory_stats(self.world.device)  # without the pass on a copy
        seed_everything(self.config.seed, step, self.world.rank)
        # a fill kernel: a copy from the host would wait for the GPU
        signalled = torch.full((), float(self.stop.received is not None), device=self.world.device)
        inputs = map(self._inputs, batches)  # one batch after the other, for the memory
        if self.graph is None:
            results = self._compute(signalled, inputs, len(batches), step)
        else:
            self.device_step.read_rates()
            compute = partial(self._compute, num_batches=len(batches), step=step)
            results = self.graph(compute, signalled, list(inputs))
        # the only point in a step at which the host waits for the device
        read = dict(zip(self._read, results.tolist(), strict=True))
        has_finite_loss, stopping = not read.pop("bad_loss"), bool(read.pop("signalled"))
        is_finite = has_finite_loss and read["grad_norm"] < float("inf")
        if is_finite and self.graph is None:
            clip_to_norm(self.model, self.config.clip_grad, read["grad_norm"])
        was_skipped = self._update(is_finite, batches, step)
        return StepResult(
            **read, has_finite_loss=has_finite_loss, was_skipped=was_skipped, stopping=stopping
        )

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Images and targets after mixup, and the teacher's logits, if any, on the device."""
        images, targets = self._mixed(batch)
        if self.teacher is None:
            return (images, targets)
        assert batch.indices is not None
        return (images, targets, self.teacher(batch.indices))

    def _compute(
        self,
        signalled: Tensor,
        batches: Iterable[tuple[Tensor, ...]],
        num_batches: int,
        step: int,
    ) -> Tensor:
        """Compute the gradients, and in a graph also the update of the weights. The host waits for
        no result.

        Args:
            signalled: 1 if this rank has received a signal, otherwise 0.
            batches: the inputs of each batch.

        Returns:
            The numbers that `_read` names: the losses, the norm of the gradients, and two flags
            that the ranks have exchanged, whether a loss is not finite and `signalled`.
        """
        totals: dict[str, Tensor] = {}
        with moe_core.step(self.model, self.compute_dtype, equal_tokens=True):
            for i, inputs in enumerate(batches):
                with self._gradient_sync(is_last=i == num_batches - 1):
                    losses = self._forward_and_backward(inputs, step, num_batches)
                for name, loss in losses.items():
                    share = loss.detach() / num_batches
                    totals[name] = totals[name] + share if name in totals else share
        # the biases wait for the losses of all ranks
        norm = finish_gradients(self.model, scale=self.scaler.scale, balance=False)
        is_bad = (~torch.isfinite(totals["loss"])).float()
        flags = self.world.max(torch.stack([is_bad, signalled]))
        if self.graph is not None:
            is_finite = (flags[0] == 0) & torch.isfinite(norm)
            clip_to_norm(self.model, self.config.clip_grad, norm)
            self.device_step(is_finite)
            update_balance(self.model, applies=is_finite)
        self._read = [*totals, "grad_norm", "bad_loss", "signalled"]
        return torch.stack([*totals.values(), norm, *flags])

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[None]:
        """Average the gradients over the ranks in the last pass of a step alone."""
        if self.world.size == 1:
            return nullcontext()
        return gradient_sync(self.wrapped, enabled=is_last)

    def _forward_and_backward(
        self, inputs: tuple[Tensor, ...], step: int, num_batches: int
    ) -> dict[str, Tensor]:
        """The `losses` of a batch, whose gradients are added to the parameters'."""
        with self.world.named_errors(f"the forward pass of step {step + 1}"):
            losses = self.losses(*inputs)
        with self.world.named_errors(f"the backward pass of step {step + 1}"):
            (losses["loss"] * self.scaler.scale / num_batches).backward()
        return losses

    def losses(
        self, images: Tensor, targets: Tensor, taught: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss to minimise, and its unweighted parts, as in `StepResult`. All are scalars.

        Args:
            taught: the teacher's logits, float32 [B, classes].
        """
        smoothing = self.config.label_smoothing
        if self.mixup:  # mixup's targets are already smoothed
            smoothing = 0.0
        with self.autocast():
            logits, aux_loss = self.wrapped(images)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        parts = {"aux_loss": aux_loss}
        if taught is not None:
            distill = self.config.distill
            teacher_loss = distillation_loss(logits.float(), taught, distill.temperature)
            parts |= {"label_loss": loss, "teacher_loss": teacher_loss}
            loss = (1 - distill.weight) * loss + distill.weight * teacher_loss
        return {"loss": loss + self.config.aux_loss_weight * aux_loss} | parts

    def _mixed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and targets on the device, after mixup."""
        images = batch.images.to(self.world.device, non_blocking=True)
        targets = batch.targets.to(self.world.device, non_blocking=True)
        if self.mixup:
            return self.mixup(images, targets)
        return (images, targets)

    def _update(self, is_finite: bool, batches: Sequence[Batch], step: int) -> bool:
        """Update the weights, unless a loss or the gradient on a rank is not finite. With a graph
        they are updated already, and only the rest is done.

        Returns:
            Whether the step counts as skipped. A step in which fp16 searches for a loss scale does
            not count.
        """
        self.scaler.update(is_finite)
        if self.graph is None and is_finite:
            self.optimizer.step()
            update_balance(self.model)
        elif self.graph is None:
            reset_balance_loads(self.model)
        was_skipped = not is_finite and self.scaler.exhausted
        if was_skipped and self.skipped_in_a_row == self.config.skip_non_finite:
            images = [self._mixed(batch)[0] for batch in batches]
            raise UserError(explain_non_finite(step + 1, self.model, images, self.world))
        self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + was_skipped
        if self.graph is None or not self.graph.replayed:  # a graph writes to these gradients
            self.optimizer.zero_grad(set_to_none=True)
        if self.ema and is_finite:
            self.ema.update(self.model, step + 1)
        return was_skipped
