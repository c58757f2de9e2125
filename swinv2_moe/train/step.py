"""One optimiser step over all ranks: forward, backward, clipping and update. With mixup, and the
noise scale of the gradient."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

import moe_core
from moe_core import (
    clip_to_norm,
    finish_gradients,
    global_grad_dot,
    moe_layers,
    reset_balance_loads,
    update_balance,
)
from swinv2_moe.data.datasets import Batch
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel
from swinv2_moe.train import optim
from swinv2_moe.train.diagnose import explain_non_finite
from swinv2_moe.train.distributed import StopSignal, World, seed_everything
from swinv2_moe.train.parallelize import averaged_copy, gradient_sync, parallelize
from swinv2_moe.train.section import TrainConfig

_DROP_SHARE = 0.01  # of a rank's choices that a layer may drop with MODEL.MOE.CAPACITY_AUTO

_NOISE_DECAY = 0.9  # of the averages over measurements of the noise scale


class StepResult(NamedTuple):
    """The result of one step. Losses are means over the images of this rank."""

    loss: float  # including the weighted auxiliary loss
    aux_loss: float  # unweighted
    grad_norm: float  # over all ranks, before clipping
    has_finite_loss: bool  # on every rank
    was_skipped: bool  # the optimiser did not change the weights
    stopping: bool  # a rank has received a signal to stop
    # the capacity factor that each MoE layer needed; empty without CAPACITY_AUTO
    needed_factors: tuple[float, ...] = ()
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
        self.learning_rate = optim.scaled_learning_rate(config, config.base_lr, world.size)
        self.optimizer = optim.build_optimizer(config, self.model, self.learning_rate)
        self.scaler = optim.LossScaler(config.amp_enable and config.amp_dtype == "float16")
        self.autocast = optim.build_autocast(config, world)
        alphas = (config.augment.mixup, config.augment.cutmix)
        self.mixup = build_mixup(*alphas, config.label_smoothing, num_classes)
        self.compute_dtype = torch.float32
        if config.amp_enable:
            self.compute_dtype = getattr(torch, config.amp_dtype)
        global_batch = config.batch_size * config.accumulation_steps * world.size
        self.noise = NoiseScale(config.noise_scale_freq, global_batch)
        self.skipped_in_a_row = 0
        # the MoE layers whose needed capacity is measured
        self.measured_layers = []
        if config.capacity_auto:
            self.measured_layers = list(moe_layers(self.model).values())

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
        seed_everything(self.config.seed, step, self.world.rank)
        num_losses = 2 if self.teacher is None else 4
        total = torch.zeros(num_losses, device=self.world.device)
        needed = total.new_zeros(len(self.measured_layers))
        with moe_core.step(self.model, self.compute_dtype, equal_tokens=True):
            for i, batch in enumerate(batches):
                is_last = i == len(batches) - 1
                with gradient_sync(self.wrapped, enabled=is_last):
                    losses = self._forward_and_backward(batch, step, len(batches))
                total += losses / len(batches)
                needed = self._needed_factors(needed)
        # the biases wait for the losses of all ranks
        norm = finish_gradients(self.model, scale=self.scaler.scale, balance=False)
        agreed = self._agree(total[0], needed)
        product = self.noise.inner_product(self.model)
        # the only point in a step at which the host waits for the device
        values = torch.cat([total, norm.reshape(1), agreed, product]).tolist()
        loss, aux_loss, *of_teacher = values[:num_losses]
        norm, bad_loss, signalled, *measured = values[num_losses:]
        needed_factors = measured[: len(needed)]
        is_finite = bad_loss == 0 and norm < float("inf")
        if is_finite:
            self.noise.add(self.model, step, norm, measured[len(needed) :])
            clip_to_norm(self.model, self.config.clip_grad, norm)
        else:
            self.noise.forget()
        was_skipped = self._update(is_finite, batches, step)
        return StepResult(
            loss,
            aux_loss,
            norm,
            bad_loss == 0,
            was_skipped,
            signalled > 0,
            tuple(needed_factors),
            *of_teacher,
        )

    def _forward_and_backward(self, batch: Batch, step: int, num_batches: int) -> Tensor:
        """Compute `loss` of the batch and add its gradients to the parameters'. Returns the loss
        and its parts, detached, [2] or [4]."""
        with self.world.named_errors(f"the forward pass of step {step + 1}"):
            loss, parts = self.loss(batch)
        with self.world.named_errors(f"the backward pass of step {step + 1}"):
            (loss * self.scaler.scale / num_batches).backward()
        return torch.stack([loss, *parts]).detach()

    def loss(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss to minimise, and its unweighted parts: the auxiliary loss; with a teacher, also
        the loss of the labels and that of the teacher. All are scalars."""
        images, targets = self._mixed(batch)
        smoothing = self.config.label_smoothing
        if self.mixup:  # mixup's targets are already smoothed
            smoothing = 0.0
        with self.autocast():
            logits, aux_loss = self.wrapped(images)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        parts = [aux_loss]
        if self.teacher is not None:
            assert batch.indices is not None
            taught = self.teacher(batch.indices)
            distill = self.config.distill
            teacher_loss = distillation_loss(logits.float(), taught, distill.temperature)
            parts += [loss, teacher_loss]
            loss = (1 - distill.weight) * loss + distill.weight * teacher_loss
        return loss + self.config.aux_loss_weight * aux_loss, tuple(parts)

    def _mixed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Images and targets on the device, after mixup."""
        images = batch.images.to(self.world.device, non_blocking=True)
        targets = batch.targets.to(self.world.device, non_blocking=True)
        if self.mixup:
            return self.mixup(images, targets)
        return (images, targets)

    def _needed_factors(self, earlier: Tensor) -> Tensor:
        """The elementwise maximum of `earlier` [L] and the factors that the measured layers needed
        in this forward pass."""
        if not self.measured_layers:
            return earlier
        factors = [layer.needed_capacity_factor(_DROP_SHARE) for layer in self.measured_layers]
        return torch.maximum(earlier, torch.stack(factors).float())

    def _agree(self, loss: Tensor, needed: Tensor) -> Tensor:
        """Exchange flags and factors between the ranks, [2 + L]: whether the loss of a rank is not
        finite, whether a rank has received a signal, and the largest needed factor of each layer
        over all ranks."""
        is_bad = (~torch.isfinite(loss)).float()
        # a fill kernel: a copy from the host would wait for the GPU
        signalled = torch.full_like(loss, self.stop.received is not None)
        return self.world.max(torch.cat([torch.stack([is_bad, signalled]), needed]))

    def _update(self, is_finite: bool, batches: Sequence[Batch], step: int) -> bool:
        """Update the weights, unless a loss or the gradient on a rank is not finite.

        Returns:
            Whether the step counts as skipped. A step in which fp16 searches for a loss scale does
            not count.
        """
        self.scaler.update(is_finite)
        was_skipped = False
        if is_finite:
            self.optimizer.step()
            update_balance(self.model)
            self.skipped_in_a_row = 0
        else:
            reset_balance_loads(self.model)
            was_skipped = self.scaler.exhausted
        if was_skipped:
            if self.skipped_in_a_row == self.config.skip_non_finite:
                images = [self._mixed(batch)[0] for batch in batches]
                raise UserError(explain_non_finite(step + 1, self.model, images, self.world))
            self.skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema and is_finite:
            self.ema.update(self.model, step + 1)
        return was_skipped


def distillation_loss(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student), the mean over the images.

    T^2 keeps the size of the gradients as T changes. Source: arXiv 1503.02531, section 2.1.

    Args:
        logits, taught: of the student and of the teacher, float32 [B, C].
        temperature: T, by which both are divided before the softmax.
    """
    student = F.log_softmax(logits / temperature, dim=1)
    teacher = F.log_softmax(taught / temperature, dim=1)
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return temperature**2 * divergence


def build_mixup(
    mixup: float, cutmix: float, label_smoothing: float, num_classes: int
) -> Mixup | None:
    """timm's mixup and cutmix with these alphas, or None if both are 0."""
    if mixup == 0 and cutmix == 0:
        return None
    return Mixup(
        mixup_alpha=mixup,
        cutmix_alpha=cutmix,
        label_smoothing=label_smoothing,
        num_classes=num_classes,
    )


class NoiseScale:
    """Estimates the noise scale from pairs of successive steps: the batch size up to which larger
    batches save steps.

    S = tr(covariance of one image's gradient) / |mean gradient|^2, in images. This is the "simple"
    noise scale of arXiv 1812.06162, section 2.2. For batches much smaller than S, doubling the
    batch halves the number of steps. For batches much larger than S, it does not change the number
    of steps.

    B images per step over all ranks; g1 and g2: the gradients of two successive steps. The batches
    of a pair are independent and the weights almost equal. Let G be the mean gradient.
    Then the mean of g1.g2 is |G|^2, and the mean of |g1|^2 and |g2|^2 is |G|^2 + tr / B. Both are
    averaged over the measurements, as in the paper, because the quotient of single measurements is
    biased.

    Args:
        every: steps from one pair to the next; 0: nothing is measured.
        images: B.
    """

    def __init__(self, every: int, images: int) -> None:
        self.every = every
        self.images = images
        # in images; None: not known, or the estimate of |G|^2 is not positive
        self.value: float | None = None
        self._first: dict[nn.Parameter, Tensor] = {}  # g1, between the steps of a pair
        self._first_norm = 0.0
        self._squared_norm = 0.0
        self._squared_mean = 0.0

    def inner_product(self, model: nn.Module) -> Tensor:
        """g1.g2 over all ranks, [1], after the second backward pass of a pair; otherwise an empty
        tensor, [0]."""
        device = next(model.parameters()).device
        if not self._first:
            return torch.zeros(0, device=device)
        return global_grad_dot(model, self._first).reshape(1)

    def add(self, model: nn.Module, step: int, norm: float, inner_products: list[float]) -> None:
        """Count a step, before its gradients are clipped.

        Args:
            step: number of steps before this one.
            norm: norm of the gradient over all ranks.
            inner_products: what `inner_product` returned in this step.
        """
        if inner_products:
            self._first.clear()
            self._average(self._first_norm, norm, inner_products[0])
        elif self.every and step % self.every == 0:
            gradients = ((p, p.grad) for p in model.parameters() if p.grad is not None)
            self._first = {p: gradient.clone() for p, gradient in gradients}
            self._first_norm = norm

    def forget(self) -> None:
        """Discard the first step of a pair, for example if the second step has no finite
        gradient."""
        self._first.clear()

    def _average(self, first: float, second: float, product: float) -> None:
        squared_norm = (first**2 + second**2) / 2
        # both averages start at 0; this bias cancels in their quotient
        self._squared_norm = _NOISE_DECAY * self._squared_norm + (1 - _NOISE_DECAY) * squared_norm
        self._squared_mean = _NOISE_DECAY * self._squared_mean + (1 - _NOISE_DECAY) * product
        self.value = None
        if self._squared_mean > 0:
            noise = self.images * (self._squared_norm - self._squared_mean)
            self.value = max(0.0, noise / self._squared_mean)
