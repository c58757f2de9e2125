"""The model that a configuration describes."""

import torch
from yacs.config import CfgNode

from moe_core.parallel import ExpertGroup, ParallelStrategy
from swinv2_moe.config.sections import moe_defaults
from swinv2_moe.errors import UserError
from swinv2_moe.models.complexity import Complexity, count
from swinv2_moe.models.swin_moe import SwinTransformerMoE
from swinv2_moe.models.swinv2_moe import SwinTransformerV2MoE

_TYPES = {"swinv2_moe": SwinTransformerV2MoE, "swin_moe": SwinTransformerMoE}


def build_model(
    config: CfgNode, num_classes: int, group: ExpertGroup | None = None
) -> SwinTransformerV2MoE:
    """A freshly initialised model; its values follow torch's seed and not the number of ranks.

    Raises:
        UserError: experts, or a strategy, that do not fit the group.
    """
    try:
        model = _model(config, num_classes, group)
    except ValueError as error:
        raise UserError(f"MODEL: {error}") from error
    model.set_grad_checkpointing(config.TRAIN.USE_CHECKPOINT)
    return model


def _model(config: CfgNode, num_classes: int, group: ExpertGroup | None) -> SwinTransformerV2MoE:
    swin, moe = config.MODEL.SWINV2, config.MODEL.MOE
    return _TYPES[config.MODEL.TYPE](
        img_size=config.DATA.IMG_SIZE,
        num_classes=num_classes,
        patch_size=swin.PATCH_SIZE,
        in_chans=swin.IN_CHANS,
        embed_dim=swin.EMBED_DIM,
        depths=swin.DEPTHS,
        num_heads=swin.NUM_HEADS,
        window_size=swin.WINDOW_SIZE,
        mlp_ratio=swin.MLP_RATIO,
        qkv_bias=swin.QKV_BIAS,
        pretrained_window_sizes=swin.PRETRAINED_WINDOW_SIZES,
        drop_rate=config.MODEL.DROP_RATE,
        attn_drop_rate=config.MODEL.ATTN_DROP_RATE,
        drop_path_rate=config.MODEL.DROP_PATH_RATE,
        num_experts=moe.NUM_EXPERTS,
        moe_blocks=moe.BLOCKS,
        moe=_moe_fields(moe),
        eval_capacity_factor=moe.EVAL_CAPACITY_FACTOR,
        freeze_moe=moe.FREEZE,
        expert_group=group,
        expert_strategy=_strategy(moe) if group else ParallelStrategy(),
    )


def _strategy(moe: CfgNode) -> ParallelStrategy | str:
    if moe.STRATEGY == "fixed":
        return ParallelStrategy(
            moe.R, moe.PIPELINE_DEGREE, moe.ALL_TO_ALL, moe.RANKS_PER_NODE or None
        )
    return "auto" if moe.STRATEGY == "auto" else ParallelStrategy()


def _moe_fields(moe: CfgNode) -> dict:
    return {name: moe[name.upper()] for name in moe_defaults()}


def measure_model(config: CfgNode, num_classes: int) -> Complexity:
    """Parameters over all ranks and MACs per image of the configured model, without building it in
    memory."""
    with torch.device("meta"):
        model = build_model(config, num_classes)
    return count(model, config.DATA.IMG_SIZE, config.MODEL.SWINV2.IN_CHANS)
