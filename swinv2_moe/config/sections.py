"""The typed sections of a configuration: every key, its type and its default.

A field that `option` made is a key of the section's group: `DataConfig.img_size` is
`DATA.IMG_SIZE`. Its default, limits, allowed values and meaning stand there alone: the tree, the
checks and the reference (`swinv2-moe config --markdown`) read them. A field without a default
belongs to another group, and is there because the same code needs it. Lists are tuples here.

`swinv2_moe.config.defaults` makes the yacs tree from these classes, and `data_config(config)` and
its siblings make a section from a tree.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from moe_core import MoEConfig
from moe_core.options import Option, option, options
from swinv2_moe.data.section import AugmentConfig, CropConfig, DataConfig
from swinv2_moe.model_types import model_types


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Keys without a group."""

    output: str = option("output", "run directory; `--output` sets it")
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
    )
    save_freq: int = option(
        1,
        "epochs between two checkpoints; the best and the last epoch are always saved",
        least=1,
    )
    event_log: bool = option(
        False,
        "write `events.log` in the MLPerf log format (needs the mlperf extra)",
    )
    tracker: str = option(
        "",
        "a service that also receives the curves: `wandb` or `mlflow` (needs the extra of"
        " that name)",
        choices=("", "wandb", "mlflow"),
    )
    device: str = option(
        "auto",
        "`auto`: a GPU where there is one",
        choices=("auto", "cpu", "cuda"),
    )
    timeout: int = option(
        600,
        "seconds after which a rank stops waiting for other ranks",
        least=1,
        most=10**6,
    )
    amp_enable: bool | str = option(
        False,
        "mixed precision. `auto`: unless the device is a CPU without instructions for `amp_dtype`,"
        " where it is slower than fp32; `True` is off there too, with a warning",
        choices=(False, True, "auto"),
    )
    amp_dtype: str = option("bfloat16", "dtype of mixed precision", choices=("bfloat16", "float16"))
    compile: bool = option(
        False,
        "compile the model; over several ranks the experts stay uncompiled (untested)",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """CHECKPOINT: when checkpoints are written and which are kept."""

    steps: int = option(
        0,
        "optimiser steps between two checkpoints inside an epoch; 0: after epochs only",
        least=0,
    )
    keep_last: int = option(2, "checkpoints to keep besides the best", least=1)
    experts: int = option(
        0,
        "experts of each layer in one save, in turn; 0: all. The best, last and signal saves"
        " hold all",
        least=0,
    )
    staging_mb: int = option(
        4096,
        "host memory per rank for saving while training continues, MB; beyond it, training waits",
        least=0,
    )


# Swin-MoE's recipe, arXiv 2206.03382, section 5: the defaults of MODEL.MOE and of the registered
# timm models where they differ from MoEConfig's, which suit any mixture of experts.
PUBLISHED_MOE = {
    "gate_noise": 1.0,
    "normalize_gates": False,
    "batch_prioritized": True,
    "aux_loss": "load_importance",
}


def moe_defaults() -> dict[str, object]:
    """The keys of MODEL.MOE that are fields of MoEConfig, by the field's name, with their
    defaults."""
    defaults = {field.name: field.default for field, one in options(MoEConfig) if one.is_key}
    # A key has a number; timm initialises the trunk's linear layers with the same.
    return defaults | PUBLISHED_MOE | {"init_std": 0.02}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """MODEL.MOE: where the experts are and how ranks share them. What a layer computes is in
    `layer`; its keys are MoEConfig's fields (`moe_defaults`)."""

    num_experts: int = option(0, "number of experts over all ranks; 0: the dense model", least=0)
    expert_parallel_size: int = option(
        0,
        "ranks per expert group; the groups are replicas; 0: all ranks",
        least=0,
    )
    strategy: str = option(
        "r1 d1 linear",
        "how the ranks of a group exchange data, words in any order. `r0`: weights are"
        " gathered; `r1`: tokens are sent; with fewer experts than ranks `r` may be any"
        " divisor of ranks / experts. `d4`: in 4 chunks, whose exchange overlaps with"
        " computation. `linear`; `2dh`: inside the nodes, then between them; `channels`: CPU"
        " processes through shared memory inside a machine, in one message to each other"
        " machine, or the GPUs of one machine (with `static`); a registered name. `static`:"
        " each expert receives as many rows as its capacity from each rank, so no numbers of"
        " rows are exchanged (`counted`). `n8`: ranks on each node, otherwise torchrun's. In"
        " place of these `auto`, or `auto n8`: the tuner searches, for training and for"
        " validation, and again when times drift",
    )
    blocks: tuple[tuple[int, ...], ...] = option(
        ((), (), (), ()),
        "for each stage, the blocks (from 0) whose FFN is a mixture of experts",
    )
    top_k_schedule: str = option(
        "",
        "in training in place of `TOP_K`, such as `epoch 0:2 10:1`; evaluation uses `TOP_K`",
    )
    capacity_auto: bool = option(
        False,
        "the capacity factor of each layer follows the loads of the last 16 steps;"
        " `CAPACITY_FACTOR` is that of the first step",
    )
    eval_batch_prioritized: str = option(
        "same",
        "`BATCH_PRIORITIZED` in evaluation; `same`: as in training",
        choices=("same", "always", "never"),
    )
    hidden_ratio: float = option(
        1.0,
        "hidden dim of an expert, in units of that of the FFN which it replaces: 0.5 with"
        " `TOP_K` 2, or 0.667 with `GATED`, has the dense model's MACs",
        least=0.001,
    )
    norm: str = option(
        "post",
        "the norm of a SwinV2 block with experts. `post`: behind the experts and their gate"
        " value, as published; `before_gate`: behind the experts, before the gate value",
        choices=("post", "before_gate"),
    )
    aux_loss_weight: float = option(0.01, "factor of the auxiliary loss in the loss", least=0)
    freeze: bool = option(
        False,
        "routers and experts keep the values of `MODEL.PRETRAINED` and route as in evaluation",
    )

    # What all layers have in common: model_dim and hidden_dim are 1, each block has its own. None:
    # the dense model.
    layer: MoEConfig | None

    @property
    def eval_capacity_factor(self) -> float:
        """The capacity factor in evaluation; 0 of a dense model, which drops nothing."""
        if self.layer is None:
            return 0.0
        return self.layer.eval_capacity_factor

    def layer_fields(self) -> dict[str, object]:
        """The fields of `layer` without its shape; none of a dense model."""
        if self.layer is None:
            return {}
        return {name: getattr(self.layer, name) for name in moe_defaults()}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """MODEL: the network and the weights that it starts from."""

    type: str = option(
        "swinv2_moe",
        "`swinv2_moe`: res-post-norm, cosine attention; `swin_moe`: the released pre-norm"
        " form; `vit_moe`: ViT; or a type of your own, which declares its group of keys",
        choices=model_types,
    )
    num_classes: int = option(0, "0: number of classes of the data", least=0)
    drop_path_rate: float = option(0.1, "largest rate of stochastic depth", least=0, most=0.999)
    label_smoothing: float = option(
        0.1,
        "share of a label that is spread over all classes",
        least=0,
        most=0.999,
    )
    pretrained: str = option(
        "",
        "a run or checkpoint of this project; a `.safetensors` or `.pth` file; a directory in"
        " timm's form; or a name: `timm:NAME`, `hf-hub:OWNER/NAME`",
    )
    upcycle: str = option(
        "",
        "`MODEL.PRETRAINED` is dense, and each dense FFN is copied into every expert of its"
        " block. `weights`: a new training begins; `run`: it goes on as that dense run would"
        " have done, at its epoch and learning rate, with its optimiser's state; empty: off",
        choices=("", "weights", "run"),
    )
    upcycle_noise: float = option(
        0.0,
        "standard deviation of noise on those copies, relative to that of the dense weights",
        least=0,
    )
    class_map: str = option(
        "",
        "where `MODEL.PRETRAINED` has other classes. `new`: its head is not loaded; otherwise"
        " a file with the number of the old class for each class, from 0, whose rows of the"
        " head are loaded",
    )

    # The keys of the type's group, MODEL.SWINV2 say, in lower case: arguments of its class.
    trunk: Mapping[str, object]
    in_chans: int  # DATA.CHANNELS
    experts: ExpertsConfig
    img_size: int  # DATA.IMG_SIZE
    use_checkpoint: bool  # TRAIN.USE_CHECKPOINT


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """TRAIN.OPTIMIZER."""

    name: str = option(
        "adamw",
        "the optimiser; lamb, lars: for large batches, with a trust ratio for each expert",
        choices=("adamw", "sgd", "lamb", "lars"),
    )
    eps: float = option(
        1e-8,
        "of AdamW and LAMB: added to the denominator; 1e-3 to compare runs on other numbers of"
        " ranks, whose rounding errors it keeps small",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """TRAIN: the schedule and the optimiser's steps."""

    epochs: int = option(90, "passes over the training images, warm-up included", least=1)
    warmup_epochs: int = option(10, "epochs in which the learning rate rises linearly", least=0)
    base_lr: float = option(
        1.25e-4,
        "learning rate for 512 images per step; scaled with the global batch as `lr_scaling` says",
        least=0,
    )
    lr_scaling: str = option(
        "linear",
        "linear: in proportion to the global batch; sqrt: to its square root",
        choices=("linear", "sqrt"),
    )
    warmup_lr: float = option(
        1.25e-7,
        "learning rate for 512 images at the start of warm-up",
        least=0,
    )
    min_lr: float = option(1.25e-6, "learning rate for 512 images at the end", least=0)
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
    noise_scale_freq: int = option(
        0,
        "measure the noise scale of the gradient in two of so many steps; 0: never",
        least=0,
    )
    accumulation_steps: int = option(1, "forward and backward passes per optimiser step", least=1)
    use_checkpoint: bool = option(False, "recompute activations in the backward pass")
    shard_trunk: bool = option(
        False,
        "shard the shared parameters, their gradients and moments over the ranks (FSDP2)",
    )
    ema_decay: float = option(
        0.0,
        "decay of the averaged weights, t / (t + 9) after t steps where that is less; 0: none",
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
    )
    skip_non_finite: int = option(
        0,
        "consecutive steps with a non-finite loss or gradient that are skipped; one more"
        " stops the run",
        least=0,
    )

    optimizer: OptimizerConfig
    augment: AugmentConfig  # mixup and cutmix
    batch_size: int  # DATA.BATCH_SIZE
    label_smoothing: float  # MODEL.LABEL_SMOOTHING
    aux_loss_weight: float  # MODEL.MOE.AUX_LOSS_WEIGHT
    capacity_auto: bool  # MODEL.MOE.CAPACITY_AUTO of a model with experts
    seed: int
    amp_enable: bool  # also for AMP_ENABLE auto, until `without_slow_amp` knows the CPU
    amp_dtype: str
    compile: bool


@dataclass(frozen=True, kw_only=True)
class AllSections:
    """Every section of a configuration, and the configuration itself as a run records it."""

    run: RunConfig
    checkpoint: CheckpointConfig
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    yaml: str  # the content of config.yaml, and "config" in the meta.json of checkpoints


SECTIONS: tuple[tuple[str, type], ...] = (  # by group
    ("", RunConfig),
    ("CHECKPOINT", CheckpointConfig),
    ("DATA", DataConfig),
    ("MODEL", ModelConfig),
    ("MODEL.MOE", ExpertsConfig),
    ("MODEL.MOE", MoEConfig),
    ("TRAIN", TrainConfig),
    ("TRAIN.OPTIMIZER", OptimizerConfig),
    ("AUG", AugmentConfig),
    ("TEST", CropConfig),
)


@functools.cache
def key_options() -> dict[str, Option]:
    """The option of each key, without those of model types."""
    by_key = {}
    for group, section in SECTIONS:
        for field, one in options(section):
            if one.is_key:
                by_key[f"{group}.{field.name.upper()}".lstrip(".")] = one
    return by_key
