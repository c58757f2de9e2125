"""Build the model of a configuration, and count its parameters and multiply-accumulates on the meta
device, without memory or computation."""

import importlib
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from moe_core.parallel import ExpertGroup, ParallelStrategy, parse_strategy
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.models.protocol import MoEModel
from swinv2_moe.models.section import MODELS, ModelConfig, model_files
from swinv2_moe.models.timm_model import classifiers

# Model types register themselves, and in registry.py their names for timm.
for _name in ("registry", *model_files()):
    importlib.import_module(f"{__package__}.{_name}")

_LAYER_NORM = {
    torch.ops.aten.native_layer_norm: lambda shape, *_, out_shape=None, **__: 2 * shape.numel()
}


class Complexity(NamedTuple):
    """Parameters over all experts, and the MACs of one image (`macs`)."""

    parameters: int
    macs: int


def classifier_weight(config: ModelConfig) -> str:
    """The name of the weight of the configured model's classifier."""
    if config.name:
        return f"{classifiers(config.name)[0]}.weight"
    model: Any = MODELS[config.type]
    return f"{model.classifier_name}.weight"


def build_model(
    config: ModelConfig, num_classes: int, group: ExpertGroup | None = None
) -> MoEModel:
    """A newly initialised model. Its values depend on torch's seed, not on the number of ranks.

    Raises:
        UserError: the experts or the strategy do not fit the group.
    """
    strategy: ParallelStrategy | str = ParallelStrategy()
    try:
        if group:
            strategy = parse_strategy(config.experts.strategy)[0]
        arguments = model_arguments(config, num_classes)
        model = MODELS[config.type](**arguments, expert_group=group, expert_strategy=strategy)
    except ValueError as error:
        raise UserError(f"MODEL: {error}") from error
    try:
        model.set_grad_checkpointing(config.use_checkpoint)
    except AssertionError as error:  # timm's, of a model that cannot
        raise UserError(f"TRAIN.USE_CHECKPOINT is True: {config.name}: {error}") from error
    return model


def model_arguments(config: ModelConfig, num_classes: int) -> dict[str, Any]:
    """The arguments of the model's class, without those about ranks; ready for JSON."""
    experts = config.experts
    named = {"name": config.name, "args": config.args} if config.name else {}
    return {
        **named,
        **vars(config.trunk),
        "img_size": config.img_size,
        "in_chans": config.in_chans,
        "num_classes": num_classes,
        "drop_path_rate": config.drop_path_rate,
        "num_experts": experts.num_experts,
        "moe_blocks": experts.blocks,
        "moe": experts.layer_fields(),
        "hidden_ratio": experts.hidden_ratio,
        "freeze_moe": experts.freeze,
        "aux_loss_weight": experts.aux_loss_weight,
    }


def measure_model(config: ModelConfig, num_classes: int) -> Complexity:
    """Parameters over all ranks and MACs per image of the configured model, counted on the meta
    device."""
    with torch.device("meta"):
        model = build_model(config, num_classes)
    try:
        return count(model, config.img_size, config.in_chans)
    except Exception as error:
        if not config.name:
            raise
        # models of timm raise any type for a size that they do not take
        raise UserError(
            f"MODEL.NAME {config.name}: does not take images of {config.img_size} pixels"
            f" (DATA.IMG_SIZE), it says: {one_line(str(error))[:200] or type(error).__name__}"
        ) from error


def configured_windows(config: ModelConfig) -> list[int]:
    """The windows of the position biases of the configured model; as `position_windows`."""
    with torch.device("meta"):
        return build_model(config, num_classes=1).position_windows()


def count(model: nn.Module, img_size: int, in_chans: int = 3) -> Complexity:
    """Count a model that lives on the meta device.

    MACs are the cost of one more image in a batch: convolutions, linear layers, attention, and one
    MAC per element of a layer norm. Each token counts in its top-k experts; none is dropped. The
    position bias is computed once per batch and not counted. Swin Transformer's public code counts
    in the same way, and the results agree with the published figures.
    """
    model.eval()
    macs = [
        _batch_macs(model, torch.empty(n, in_chans, img_size, img_size, device="meta"))
        for n in (1, 2)
    ]
    return Complexity(sum(p.numel() for p in model.parameters()), macs[1] - macs[0])


@torch.no_grad()
def _batch_macs(model: nn.Module, images: torch.Tensor) -> int:
    with FlopCounterMode(display=False, custom_mapping=_LAYER_NORM) as counter:
        model(images)
    return counter.get_total_flops() // 2
