"""The typed sections of a configuration: every key, its type and its default.

A field with a default is a key of the section's group: `DataConfig.img_size` is `DATA.IMG_SIZE`. A
field without a default belongs to another group, and is there because the same code needs it. Lists
are tuples here. `swinv2_moe.config.defaults` makes the yacs tree from these classes, and
`data_config(config)` and its siblings make a section from a tree.

The comment of a key, behind it or on the lines before it, is its meaning in the reference
(`swinv2-moe config --markdown`, `swinv2_moe.config.reference`).
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields

from moe_core import MoEConfig


def is_key(field: Field) -> bool:
    """Whether a section's field is a key of its group."""
    return field.default is not MISSING


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Keys without a group."""

    output: str = "output"  # run directory; `--output` sets it
    seed: int = 0  # seed of initial weights, data order and augmentation
    print_freq: int = 10  # optimiser steps between two logged steps; the last step is logged, too
    # epochs between two checkpoints; the best and the last epoch are always saved
    save_freq: int = 1
    # write `events.log` in the MLPerf log format (needs the mlperf extra)
    event_log: bool = False
    # a service that also receives the curves: `wandb` or `mlflow` (needs the extra of that name)
    tracker: str = ""
    device: str = "auto"  # `auto`: a GPU where there is one
    timeout: int = 600  # seconds after which a rank stops waiting for other ranks
    # mixed precision; off on a CPU without instructions for `AMP_DTYPE`
    amp_enable: bool = False
    amp_dtype: str = "bfloat16"  # dtype of mixed precision
    # compile the model; over several ranks the experts stay uncompiled (untested)
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """CHECKPOINT: when checkpoints are written and which are kept."""

    # optimiser steps between two checkpoints inside an epoch; 0: after epochs only
    steps: int = 0
    keep_last: int = 2  # checkpoints to keep besides the best
    # experts of each layer in one save, in turn; 0: all. The best, last and signal saves hold all
    experts: int = 0
    # host memory per rank for saving while training continues, MB; beyond it, training waits
    staging_mb: int = 4096


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """AUG: random changes of training images."""

    scale: tuple[float, float] = (0.08, 1.0)  # random resized crop: range of the share of the area
    hflip: float = 0.5  # probability of a horizontal flip
    color_jitter: float = 0.4  # strength; 0: off. Only without `AUTO_AUGMENT`
    auto_augment: str = "rand-m9-mstd0.5-inc1"  # a policy of timm; empty or `none`: off
    reprob: float = 0.25  # probability of random erasing
    mixup: float = 0.8  # alpha of mixup; 0: off
    cutmix: float = 1.0  # alpha of cutmix; 0: off


@dataclass(frozen=True, kw_only=True)
class CropConfig:
    """TEST: the part of an image that is evaluated, and the order of the images."""

    # side of the centre crop, as a share of the short side: that is resized to `DATA.IMG_SIZE /
    # CROP_RATIO`; 0: both sides are resized
    crop_ratio: float = 0.875
    # validation and `swinv2-moe evaluate` read the images in a fixed permutation; results are in
    # the order of the data
    shuffle: bool = False


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """DATA: images and how they are read."""

    dataset: str = "digits"  # source of the images, or a registered name (`--import`)
    # `folder`: holds `train/` and `val/` with a folder per class; `list`: root of relative paths;
    # `shards`: output of `swinv2-moe make-shards`. `--data` sets it
    path: str = ""
    # `list`: file with one `path label` per line, or Swin's JSON map
    train_list: str = ""
    val_list: str = ""  # the same for validation
    # `folder`, `imagenet`: share of each class of `train/` that is held out for validation where
    # there is no `val/`; by the files' names, so the same for every `SEED`
    val_split: float = 0.0
    # `shards`: number of runs of consecutive images that are read in turn; if the number of ranks
    # divides it, each rank reads its own shards
    shard_streams: int = 64
    # `shards`: a directory on a disk or in the memory of each node, to which the shards are copied
    # while the first epoch reads them; over several nodes, the source is read once
    stage: str = ""
    batch_size: int = 128  # images per rank per forward pass
    # images per step over all ranks; 0: `DATA.BATCH_SIZE` per rank
    global_batch_size: int = 0
    img_size: int = 192  # side of the square input, pixels
    # interpolation in resizing; `random`: bilinear or bicubic, in training
    interpolation: str = "bicubic"
    # mean of each channel, which is subtracted; the default is ImageNet's
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    # standard deviation of each channel, by which the difference is divided; the default is
    # ImageNet's
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    num_workers: int = 2  # loader processes per rank
    # the run stops when a larger share of the images is unreadable
    max_bad_share: float = 0.01
    # before the first step, read every image and list those that cannot be read; takes as long as
    # reading the images of an epoch
    check_files: bool = False

    augment: AugmentConfig
    test: CropConfig
    in_chans: int  # of the model type's group, MODEL.SWINV2 say
    num_classes: int  # MODEL.NUM_CLASSES
    seed: int
    device: str
    validation_only: bool  # the training images are not needed and need not exist


# Swin-MoE's recipe, arXiv 2206.03382, section 5: the defaults of MODEL.MOE and of the registered
# timm models where they differ from MoEConfig's, which suit any mixture of experts.
PUBLISHED_MOE = {
    "gate_noise": 1.0,
    "normalize_gates": False,
    "batch_prioritized": True,
    "aux_loss": "load_importance",
}
# Fields of MoEConfig that are no keys: the trunk gives the shape, and its feed-forward layers,
# which can become experts, have biases; nobody has needed other values of the last two.
_NO_KEYS = (
    "model_dim",
    "hidden_dim",
    "num_experts",
    "bias",
    "balance_rate",
    "slots_per_expert",
)


def moe_defaults() -> dict[str, object]:
    """The keys of MODEL.MOE that are fields of MoEConfig, by the field's name, with their
    defaults."""
    defaults = {f.name: f.default for f in fields(MoEConfig) if f.name not in _NO_KEYS}
    # A key has a number; timm initialises the trunk's linear layers with the same.
    return defaults | PUBLISHED_MOE | {"init_std": 0.02}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """MODEL.MOE: where the experts are and how ranks share them. What a layer computes is in
    `layer`; its keys are MoEConfig's fields (`moe_defaults`)."""

    num_experts: int = 0  # number of experts over all ranks; 0: the dense model
    # ranks per expert group; the groups are replicas; 0: all ranks
    expert_parallel_size: int = 0
    # how the ranks of a group exchange data, words in any order. `r0`: weights are gathered; `r1`:
    # tokens are sent; with fewer experts than ranks `r` may be any divisor of ranks / experts.
    # `d4`: in 4 chunks, whose exchange overlaps with computation. `linear`; `2dh`: inside the
    # nodes, then between them; `channels`: CPU processes through shared memory inside a machine, in
    # one message to each other machine, or the GPUs of one machine (with `static`); a registered
    # name. `static`: each expert receives as many rows as its capacity from each rank, so no
    # numbers of rows are exchanged (`counted`). `n8`: ranks on each node, otherwise torchrun's. In
    # place of these `auto`, or `auto n8`: the tuner searches, for training and for validation, and
    # again when times drift
    strategy: str = "r1 d1 linear"
    # for each stage, the blocks (from 0) whose FFN is a mixture of experts
    blocks: tuple[tuple[int, ...], ...] = ((), (), (), ())
    # in training in place of `TOP_K`, such as `epoch 0:2 10:1`; evaluation uses `TOP_K`
    top_k_schedule: str = ""
    # in training in place of `CAPACITY_FACTOR`, such as `step 0:1.25 5000:2 linear`
    capacity_schedule: str = ""
    # the capacity factor of each layer follows the loads of the last 16 steps; `CAPACITY_FACTOR` is
    # that of the first step
    capacity_auto: bool = False
    # with `CAPACITY_AUTO`: the share of a rank's choices that a layer may drop
    capacity_drop_share: float = 0.01
    # `BATCH_PRIORITIZED` in evaluation; `same`: as in training
    eval_batch_prioritized: str = "same"
    # hidden dim of an expert, in units of that of the FFN which it replaces: 0.5 with `TOP_K` 2, or
    # 0.667 with `GATED`, has the dense model's MACs
    hidden_ratio: float = 1.0
    # the norm of a SwinV2 block with experts. `post`: behind the experts and their gate value, as
    # published; `before_gate`: behind the experts, before the gate value
    norm: str = "post"
    aux_loss_weight: float = 0.01  # factor of the auxiliary loss in the loss
    # routers and experts keep the values of `MODEL.PRETRAINED` and route as in evaluation
    freeze: bool = False

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

    # `swinv2_moe`: res-post-norm, cosine attention; `swin_moe`: the released pre-norm form;
    # `vit_moe`: ViT; or a type of your own, which declares its group of keys
    type: str = "swinv2_moe"
    num_classes: int = 0  # 0: number of classes of the data
    drop_path_rate: float = 0.1  # largest rate of stochastic depth
    label_smoothing: float = 0.1  # share of a label that is spread over all classes
    # a run or checkpoint of this project; a `.safetensors` or `.pth` file; a directory in timm's
    # form; or a name: `timm:NAME`, `hf-hub:OWNER/NAME`
    pretrained: str = ""
    # `MODEL.PRETRAINED` is dense, and each dense FFN is copied into every expert of its block.
    # `weights`: a new training begins; `run`: it goes on as that dense run would have done, at its
    # epoch and learning rate, with its optimiser's state; empty: off
    upcycle: str = ""
    # standard deviation of noise on those copies, relative to that of the dense weights
    upcycle_noise: float = 0.0
    # where `MODEL.PRETRAINED` has other classes. `new`: its head is not loaded; otherwise a file
    # with the number of the old class for each class, from 0, whose rows of the head are loaded
    class_map: str = ""

    # The keys of the type's group, MODEL.SWINV2 say, in lower case: arguments of its class.
    trunk: Mapping[str, object]
    in_chans: int  # of that group
    experts: ExpertsConfig
    img_size: int  # DATA.IMG_SIZE
    use_checkpoint: bool  # TRAIN.USE_CHECKPOINT


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """TRAIN.OPTIMIZER."""

    # the optimiser; lamb, lars: for large batches, with a trust ratio for each expert
    name: str = "adamw"
    eps: float = 1e-8  # of AdamW and LAMB: added to the denominator


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """TRAIN: the schedule and the optimiser's steps."""

    epochs: int = 90  # passes over the training images, warm-up included
    warmup_epochs: int = 10  # epochs in which the learning rate rises linearly
    # learning rate for 512 images per step; scaled with the global batch as `lr_scaling` says
    base_lr: float = 1.25e-4
    # linear: in proportion to the global batch; sqrt: to its square root
    lr_scaling: str = "linear"
    warmup_lr: float = 1.25e-7  # learning rate for 512 images at the start of warm-up
    min_lr: float = 1.25e-6  # learning rate for 512 images at the end
    weight_decay: float = 0.1  # weight decay; biases and norms have none
    layer_decay: float = 1.0  # factor of the learning rate from a layer to the one below; 1: none
    clip_grad: float = 3.0  # limit of the global gradient norm over all ranks; 0: off
    # measure the noise scale of the gradient in two of so many steps; 0: never
    noise_scale_freq: int = 0
    accumulation_steps: int = 1  # forward and backward passes per optimiser step
    use_checkpoint: bool = False  # recompute activations in the backward pass
    # shard the shared parameters, their gradients and moments over the ranks (FSDP2)
    shard_trunk: bool = False
    # decay of the averaged weights, t / (t + 9) after t steps where that is less; 0: none
    ema_decay: float = 0.0
    max_steps: int = 0  # stop after this many steps, also inside an epoch; 0: no limit
    # report the first time of this validation accuracy, percent; 0: none
    target_top1: float = 0.0
    # consecutive steps with a non-finite loss or gradient that are skipped; one more stops the run
    skip_non_finite: int = 0

    optimizer: OptimizerConfig
    augment: AugmentConfig  # mixup and cutmix
    batch_size: int  # DATA.BATCH_SIZE
    label_smoothing: float  # MODEL.LABEL_SMOOTHING
    aux_loss_weight: float  # MODEL.MOE.AUX_LOSS_WEIGHT
    # MODEL.MOE.CAPACITY_DROP_SHARE; None: not CAPACITY_AUTO
    capacity_drop_share: float | None
    seed: int
    amp_enable: bool
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
