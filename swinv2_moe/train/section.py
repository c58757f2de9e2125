"""The sections CHECKPOINT, TRAIN, TRAIN.OPTIMIZER and TRAIN.DISTILL of a configuration, and the
keys without a group."""

import math
from dataclasses import dataclass

from moe_core.options import option
from swinv2_moe.data.section import AugmentConfig

_REFERENCE_BATCH = 512  # images per step for which TRAIN.BASE_LR is given


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Keys without a group."""

    output: str = option("output", "run directory; `--output` sets it", affects="")
    seed: int = option(
        0,
        "seed of initial weights, data order and augmentation",
        least=0,
        most=2**31,
    )
    print_freq: int = option(
        10,
        "optimiser steps between two logged steps; the last step is logged, too",
        least=1,
        affects="",
    )
    save_freq: int = option(
        1,
        "epochs between two checkpoints; the best and the last epoch are always saved",
        least=1,
        affects="",
    )
    val_freq: int = option(
        1,
        "epochs between two validations; the last epoch is always validated",
        least=1,
        affects="",
    )
    tracker: str = option(
        "",
        "a service that also receives the curves (needs the extra of its name)",
        choices=("", "wandb", "mlflow", "mlperf"),
        affects="",
    )
    device: str = option(
        "auto",
        "where the model runs; `auto`: on a GPU where there is one",
        choices=("auto", "cpu", "cuda"),
        affects="",
    )
    timeout: int = option(
        600,
        "seconds after which a rank stops waiting for other ranks",
        least=1,
        most=10**6,
        affects="",
    )
    amp_enable: bool | str = option(
        False,
        "mixed precision. `auto`: not on a CPU without instructions for `amp_dtype`, where fp32"
        " is faster; `True`: there with a warning",
        choices=(False, True, "auto"),
    )
    amp_dtype: str = option("bfloat16", "dtype of mixed precision", choices=("bfloat16", "float16"))
    compile: bool = option(
        False,
        "compile the model; over several ranks the experts stay uncompiled (untested)",
        affects="",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """CHECKPOINT: when checkpoints are written and which are kept."""

    steps: int = option(
        0,
        "optimiser steps between two checkpoints inside an epoch; 0: after epochs only",
        least=0,
        affects="",
    )
    keep_last: int = option(2, "checkpoints to keep besides the best", least=1, affects="")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """TRAIN.OPTIMIZER."""

    name: str = option("adamw", "the optimiser", choices=("adamw", "sgd"))
    eps: float = option(
        1e-8,
        "epsilon of AdamW, added to the denominator; 1e-3 hides rounding where numbers of ranks"
        " are compared",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """TRAIN.DISTILL: a trained model, the teacher, whose outputs are learned."""

    teacher: str = option(
        "",
        "the teacher; empty: none. `timm:NAME`; `timm:NAME@FILE`; `hf-hub:OWNER/NAME`; a run, a"
        " checkpoint or a single file; `bundled:tiny`; `efficientnet_lite2` (needs the teacher"
        " extra)",
    )
    img_size: int = option(
        0,
        "side of the teacher's input, pixels; 0: as the teacher was trained",
        least=0,
        most=2**12,
    )
    classes: str = option(
        "data",
        "classes of the model: those of the data, or all classes of the teacher",
        choices=("data", "teacher"),
    )
    temperature: float = option(
        2.0,
        "both outputs are divided by it before the softmax",
        least=0.01,
        most=1000,
    )
    weight: float = option(
        0.9,
        "weight of the teacher's loss; the loss of the labels has the rest",
        least=0,
        most=1,
    )
    views: int = option(
        4,
        "augmentations of each image, which the epochs use in turn; the teacher sees each of"
        " them once",
        least=1,
    )
    cache: str = option(
        "",
        "directory of the teacher's outputs, for all runs and ranks; empty:"
        " `~/.cache/swinv2-moe/teacher`",
        affects="",
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """TRAIN: the schedule and the optimiser's steps."""

    epochs: int = option(
        90,
        "passes over the training images, warm-up included",
        least=1,
        affects="rate",
    )
    warmup_epochs: int = option(
        10,
        "epochs in which the learning rate rises linearly",
        least=0,
        affects="rate",
    )
    base_lr: float = option(
        1.25e-4,
        "learning rate for 512 images per step; scaled with the global batch as `lr_scaling` says",
        least=0,
        affects="rate",
    )
    lr_scaling: str = option(
        "linear",
        "how learning rates scale with the global batch: in proportion, with its square root, or"
        " not",
        choices=("linear", "sqrt", "none"),
        affects="rate",
    )
    warmup_lr: float = option(
        1.25e-7,
        "learning rate for 512 images at the start of warm-up",
        least=0,
        affects="rate",
    )
    min_lr: float = option(
        1.25e-6,
        "learning rate at the end, for 512 images",
        least=0,
        affects="rate",
    )
    weight_decay: float = option(0.1, "weight decay; biases and norms have none", least=0)
    layer_decay: float = option(
        1.0,
        "factor of the learning rate from a layer to the one below; 1: none",
        least=0.001,
        most=1,
    )
    clip_grad: float = option(
        3.0,
        "limit of the global gradient norm over all ranks; 0: off",
        least=0,
    )
    accumulation_steps: int = option(
        1,
        "forward and backward passes per optimiser step",
        least=1,
        affects="rate",
    )
    graph: bool | str = option(
        "auto",
        "replay a step's kernels as a CUDA graph, so that it does not wait for the host: one"
        " process, one GPU, AdamW. `auto`: where this can be done",
        choices=("auto", True, False),
        affects="",
    )
    use_checkpoint: bool = option(False, "recompute activations in the backward pass", affects="")
    shard_trunk: bool = option(
        False,
        "shard the shared parameters, their gradients and moments over the ranks (FSDP2)",
        affects="",
    )
    ema_decay: float = option(
        0.0,
        "decay of the averaged weights; after t steps at most t / (t + 9); 0: no averaging",
        least=0,
        most=0.999999,
    )
    max_steps: int = option(
        0,
        "stop after this many steps, also inside an epoch; 0: no limit",
        least=0,
    )
    target_top1: float = option(
        0.0,
        "report the first time of this validation accuracy, percent; 0: none",
        least=0,
        most=100,
        affects="",
    )
    best_by: str = option(
        "top1",
        "what the checkpoint `best` is best in: validation accuracy (`top1`), its mean over"
        " classes (`balanced`), the validation loss (`loss`), or that loss at its best"
        " temperature (`calibrated`, for few images), which then divides the logits wherever its"
        " checkpoints are used",
        choices=("top1", "balanced", "loss", "calibrated"),
    )
    probe: bool = option(
        False,
        "fit the classifier to the features of the frozen network first; this is saved as step 0",
    )
    on_all: bool = option(
        False,
        "at the end, train again on all pictures, also those that `DATA.VAL_SPLIT` holds out, as"
        " long as the best model was trained; `predict` and `export` use these weights. On one"
        " process",
        affects="",
    )
    patience: int = option(
        0,
        "epochs without a better validation after which training ends; 0: never",
        least=0,
        affects="",
    )
    minutes: float = option(
        0.0,
        "the most that a run may take, in whole epochs; 0: any time",
        least=0,
        affects="",
    )
    skip_non_finite: int = option(
        0,
        "steps in a row with a non-finite loss or gradient that are skipped",
        least=0,
    )

    optimizer: OptimizerConfig
    distill: DistillConfig
    augment: AugmentConfig  # mixup and cutmix
    batch_size: int  # DATA.BATCH_SIZE
    label_smoothing: float  # MODEL.LABEL_SMOOTHING
    aux_loss_weight: float  # MODEL.MOE.AUX_LOSS_WEIGHT
    seed: int
    amp_enable: bool  # also for AMP_ENABLE auto, until `usable_amp` knows the CPU
    amp_dtype: str
    compile: bool

    def scaled_rate(self, per_512: float, world_size: float) -> float:
        """A learning rate for 512 images a step, scaled to the global batch as LR_SCALING says."""
        if self.lr_scaling == "none":
            return per_512
        ratio = self.batch_size * self.accumulation_steps * world_size / _REFERENCE_BATCH
        if self.lr_scaling == "sqrt":
            ratio = math.sqrt(ratio)
        return per_512 * ratio

    def obstacle_to_graph(self) -> str:
        """Why a step cannot be captured as a CUDA graph: a key, its value and the reason; "" if
        nothing is known that prevents it."""
        for key, value, allowed, reason in (
            ("COMPILE", self.compile, False, "captures of compiled models are not supported"),
            (
                "TRAIN.OPTIMIZER.NAME",
                self.optimizer.name,
                "adamw",
                "only 'adamw' can skip a step on the device",
            ),
            (
                "TRAIN.USE_CHECKPOINT",
                self.use_checkpoint,
                False,
                "it saves the state of random numbers on the host",
            ),
        ):
            if value != allowed:
                return f"{key} is {value!r}: {reason}"
        if self.amp_enable and self.amp_dtype == "float16":
            return "AMP_DTYPE is 'float16', whose loss scale changes; take 'bfloat16'"
        return ""
