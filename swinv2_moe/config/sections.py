"""The typed sections of a configuration: every key, its type and its default.

A field with a default is a key of the section's group: `DataConfig.img_size` is `DATA.IMG_SIZE`. A
field without a default belongs to another group, and is there because the same code needs it. Lists
are tuples here. `swinv2_moe.config.defaults` makes the yacs tree from these classes, and
`data_config(config)` and its siblings make a section from a tree.
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

    output: str = "output"  # run directory; tools/train.py --output overrides it
    seed: int = 0
    print_freq: int = 10  # optimiser steps between two logged steps
    # epochs between two checkpoints; the best and the last epoch are always saved
    save_freq: int = 1
    event_log: bool = False  # OUTPUT/events.log, in the MLPerf log format (needs the mlperf extra)
    # wandb or mlflow (needs the extra of that name): a service that gets the curves too
    tracker: str = ""
    device: str = "auto"
    timeout: int = 600  # seconds after which a rank gives up on ranks that do not answer
    amp_enable: bool = False
    amp_dtype: str = "bfloat16"
    # torch.compile of the model; over several ranks its experts stay uncompiled, and it is untried
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """CHECKPOINT: when checkpoints are written and which are kept."""

    # optimiser steps between two checkpoints inside an epoch; 0: after epochs only
    steps: int = 0
    keep_last: int = 2  # besides the best
    # of each layer in one save, in turn (not in the best and the last epoch's); 0: all
    experts: int = 0
    # memory per rank for saving while training goes on; beyond it, training waits
    staging_mb: int = 4096


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """AUG: random changes of training images."""

    scale: tuple[float, float] = (0.08, 1.0)  # random resized crop: share of the area
    ratio: tuple[float, float] = (0.75, 1.3333333333333333)
    hflip: float = 0.5
    color_jitter: float = 0.4
    auto_augment: str = "rand-m9-mstd0.5-inc1"
    reprob: float = 0.25
    remode: str = "pixel"
    recount: int = 1
    mixup: float = 0.8
    cutmix: float = 1.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_mode: str = "batch"


@dataclass(frozen=True, kw_only=True)
class CropConfig:
    """TEST: the part of an image that is evaluated, and the order of the images."""

    # resize the short side to IMG_SIZE / CROP_RATIO, then centre crop; else resize both sides
    crop: bool = True
    crop_ratio: float = 0.875
    # in a fixed permutation; where capacity drops choices, the images of a batch affect each other
    shuffle: bool = False


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """DATA: images and how they are read."""

    dataset: str = "digits"
    # folder: holds train/ and val/ with a folder per class; list: what listed paths are relative
    # to; shards: what data/make_shards.py made
    path: str = ""
    train_list: str = ""  # list: one "path label" a line, or Swin's JSON map
    val_list: str = ""
    # folder: share of each class of train/ held out where there is no val/; 0: none
    val_split: float = 0.0
    # shards: places from which they are read in turn; ranks that divide it read each their own
    shard_streams: int = 64
    batch_size: int = 128  # images per rank per forward pass
    # images per step over all ranks, however many they are; 0: as BATCH_SIZE says
    global_batch_size: int = 0
    img_size: int = 192
    interpolation: str = "bicubic"
    # ImageNet's, as timm and torchvision use them
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    num_workers: int = 2
    pin_memory: bool = True
    # of an image, more than any but a few cameras take; larger ones count as unreadable
    max_pixels: int = 120_000_000
    # the run stops once more than this share of the images could not be read
    max_bad_share: float = 0.01
    # read every image before the first step and list those that cannot be read
    check_files: bool = False

    augment: AugmentConfig
    test: CropConfig
    in_chans: int  # of the model type's group, MODEL.SWINV2 say
    num_classes: int  # MODEL.NUM_CLASSES
    seed: int
    device: str


# Swin-MoE's recipe, arXiv 2206.03382, section 5: the defaults of MODEL.MOE and of the registered
# timm models where they differ from MoEConfig's, which suit any mixture of experts.
PUBLISHED_MOE = {
    "gate_noise": 1.0,
    "normalize_gates": False,
    "batch_prioritized": True,
    "aux_loss": "load_importance",
}
# Fields of MoEConfig that are no keys: the trunk gives the shape, and its feed-forward layers,
# which can become experts, have biases.
_NO_KEYS = ("model_dim", "hidden_dim", "num_experts", "bias")


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

    num_experts: int = 0  # over all ranks; 0: the dense model
    # ranks that share the experts; groups of so many are replicas; 0: all ranks
    expert_parallel_size: int = 0
    # of those ranks. off: the plainest; fixed: the five keys below; auto: found in training
    strategy: str = "off"
    # 0: weights travel; 1: tokens do; E < ranks: any divisor of ranks / E (moe_core
    # ParallelStrategy)
    r: int = 1
    pipeline_degree: int = 1  # chunks that travel while others are worked on
    # or 2dh: inside the nodes, then between them; channels: shared memory in a node
    all_to_all: str = "linear"
    exchange: str = "counted"  # or static: as many rows as the capacity, and no counts
    ranks_per_node: int = 0  # for 2dh; 0: as torchrun says
    # per stage, the blocks (from 0) whose FFN is a mixture of experts
    blocks: tuple[tuple[int, ...], ...] = ((), (), (), ())
    # in place of top_k and capacity_factor in training, such as "epoch 0:2 10:1"
    # (swinv2_moe.config.schedule); "": constant
    top_k_schedule: str = ""
    capacity_schedule: str = ""
    # the share of the tokens that get random experts in training: "epoch 0:1 3:0 linear" leads
    # from a uniform choice to the router's
    random_choice_schedule: str = ""
    # the capacity factor of each layer is the smallest that would have dropped at most
    # capacity_drop_share of the choices in each of the last steps; the first step has
    # capacity_factor
    capacity_auto: bool = False
    capacity_drop_share: float = 0.01
    eval_capacity_factor: float = 1.25  # as capacity_factor, in evaluation
    eval_batch_prioritized: str = "same"  # same: as in training; always; never
    # hidden dim of an expert, in units of that of the FFN which it replaces: 0.5 with TOP_K 2 has
    # the dense model's MACs
    hidden_ratio: float = 1.0
    # of a SwinV2 block with experts. post: behind the experts and their gate value, as published;
    # before_gate: behind the experts, before the gate value; pre: before the experts
    norm: str = "post"
    aux_loss_weight: float = 0.01
    # routers and experts stay as PRETRAINED has them and route as in evaluation
    freeze: bool = False

    # What all layers have in common: model_dim and hidden_dim are 1, each block has its own. None:
    # the dense model.
    layer: MoEConfig | None

    def layer_fields(self) -> dict[str, object]:
        """The fields of `layer` without its shape; none of a dense model."""
        if self.layer is None:
            return {}
        return {name: getattr(self.layer, name) for name in moe_defaults()}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """MODEL: the network and the weights that it starts from."""

    # swinv2_moe: res-post-norm, cosine attention; swin_moe: the released pre-norm form; or another
    # file models/*_moe.py, which declares its group of keys (swinv2_moe.model_types)
    type: str = "swinv2_moe"
    num_classes: int = 0  # 0: as many as the data has
    drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.1
    label_smoothing: float = 0.1
    # a run or checkpoint of this project, a .safetensors/.pth file, or timm:NAME, hf-hub:OWNER/NAME
    pretrained: str = ""
    upcycle: bool = False  # PRETRAINED is dense: copy each dense FFN into every expert of its block
    upcycle_noise: float = 0.0  # std of noise on those copies, in units of the dense weights' own
    # go on as the dense run PRETRAINED would have done: epoch, learning rate and optimiser's state
    upcycle_continue: bool = False
    new_head: bool = False  # PRETRAINED has other classes: leave its head out
    # or take rows of its head: a file with the old class's number for each class, from 0
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

    name: str = "adamw"
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """TRAIN: the schedule and the optimiser's steps."""

    epochs: int = 90
    warmup_epochs: int = 10
    # for 512 images a step; scaled linearly with the global batch, like the two below
    base_lr: float = 1.25e-4
    warmup_lr: float = 1.25e-7
    min_lr: float = 1.25e-6
    weight_decay: float = 0.1
    expert_weight_decay: float = -1.0  # of the routed experts' weights; negative: weight_decay
    layer_decay: float = 1.0
    clip_grad: float = 3.0  # global norm over all ranks; 0: off
    accumulation_steps: int = 1
    use_checkpoint: bool = False  # recompute activations in the backward pass
    # FSDP2 shards the shared parameters, their gradients and moments over the ranks
    shard_trunk: bool = False
    ema_decay: float = 0.0  # 0: no averaged copy of the weights
    max_steps: int = 0  # for trials: stop here, in mid-epoch; 0: no limit
    # the validation accuracy, in percent, whose first time is reported; 0: none
    target_top1: float = 0.0
    # steps in a row with a loss or gradient not finite that are skipped; one more stops
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
