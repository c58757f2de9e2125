"""Convert a yacs tree to typed sections: each part of the program receives its own section."""

from typing import Any

from yacs.config import CfgNode

from moe_core import MoEConfig
from swinv2_moe.config import sections
from swinv2_moe.data.section import AugmentConfig, CropConfig, DataConfig
from swinv2_moe.model_types import model_section


def run_config(config: CfgNode) -> sections.RunConfig:
    """The section of the run itself: keys without a group."""
    return sections.RunConfig(**_values(config))


def checkpoint_config(config: CfgNode) -> sections.CheckpointConfig:
    """The section CHECKPOINT."""
    return sections.CheckpointConfig(**_values(config.CHECKPOINT))


def data_config(config: CfgNode) -> DataConfig:
    """The section DATA, with AUG, TEST and all other keys that reading images needs."""
    return DataConfig(
        **_values(config.DATA),
        augment=_augment(config),
        test=CropConfig(**_values(config.TEST)),
        num_classes=config.MODEL.NUM_CLASSES,
        seed=config.SEED,
        device=config.DEVICE,
        validation_only=False,
    )


def model_config(config: CfgNode) -> sections.ModelConfig:
    """The section MODEL, with the group of its type, MOE and all other keys that building a model
    needs."""
    return sections.ModelConfig(
        **_values(config.MODEL),
        trunk=_values(model_section(config)),
        in_chans=config.DATA.CHANNELS,
        experts=_experts(config),
        img_size=config.DATA.IMG_SIZE,
        use_checkpoint=config.TRAIN.USE_CHECKPOINT,
    )


def train_config(config: CfgNode) -> sections.TrainConfig:
    """The section TRAIN, with OPTIMIZER and all other keys that a training step needs."""
    return sections.TrainConfig(
        **_values(config.TRAIN),
        optimizer=sections.OptimizerConfig(**_values(config.TRAIN.OPTIMIZER)),
        augment=_augment(config),
        batch_size=config.DATA.BATCH_SIZE,
        label_smoothing=config.MODEL.LABEL_SMOOTHING,
        aux_loss_weight=config.MODEL.MOE.AUX_LOSS_WEIGHT,
        capacity_auto=config.MODEL.MOE.CAPACITY_AUTO and config.MODEL.MOE.NUM_EXPERTS > 0,
        seed=config.SEED,
        amp_enable=bool(config.AMP_ENABLE),
        amp_dtype=config.AMP_DTYPE,
        compile=config.COMPILE,
    )


def all_sections(config: CfgNode) -> sections.AllSections:
    """All sections, for code that builds the parts of a run, and the YAML text that the run
    records."""
    return sections.AllSections(
        run=run_config(config),
        checkpoint=checkpoint_config(config),
        data=data_config(config),
        model=model_config(config),
        train=train_config(config),
        yaml=config.dump(),
    )


def _augment(config: CfgNode) -> AugmentConfig:
    return AugmentConfig(**_values(config.AUG))


def layer_config(config: CfgNode) -> MoEConfig | None:
    """What all MoE layers have in common, with a model_dim and hidden_dim of 1; None if
    MODEL.MOE.NUM_EXPERTS is 0.

    Raises:
        ValueError: values that contradict each other.
    """
    values = _values(config.MODEL.MOE)
    num_experts = values["num_experts"]
    if not num_experts:
        return None
    layer_values = {name: values[name] for name in sections.moe_defaults()}
    return MoEConfig(1, 1, num_experts, **layer_values)


def _experts(config: CfgNode) -> sections.ExpertsConfig:
    values = _values(config.MODEL.MOE)
    for name in sections.moe_defaults():
        del values[name]
    return sections.ExpertsConfig(**values, layer=layer_config(config))


def _values(group: CfgNode) -> dict[str, Any]:
    """The values of a group's keys as `{"img_size": 192, ...}`, without nested groups."""
    values = {}
    for key, value in group.items():
        if isinstance(value, list):
            value = _with_tuples(value)
        if not isinstance(value, CfgNode):
            values[key.lower()] = value
    return values


def _with_tuples(value: object) -> object:
    """The value with lists replaced by tuples, also inside of lists."""
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return value
