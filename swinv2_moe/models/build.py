"""The model that a configuration describes."""

import torch
from yacs.config import CfgNode

from moe_core.parallel import ExpertGroup, ParallelStrategy
from swinv2_moe.errors import UserError
from swinv2_moe.model_types import model_section, model_type
from swinv2_moe.models.complexity import Complexity, count
from swinv2_moe.models.protocol import MoEModel


def build_model(config: CfgNode, num_classes: int, group: ExpertGroup | None = None) -> MoEModel:
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


def _model(config: CfgNode, num_classes: int, group: ExpertGroup | None) -> MoEModel:
    moe = config.MODEL.MOE
    trunk = {key.lower(): value for key, value in model_section(config).items()}
    return model_type(config).model(
        **trunk,
        img_size=config.DATA.IMG_SIZE,
        num_classes=num_classes,
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
    return {
        "top_k": moe.TOP_K,
        "capacity_factor": moe.CAPACITY_FACTOR,
        "round_to": moe.ROUND_TO,
        "router": moe.ROUTER,
        "gate_noise": moe.GATE_NOISE,
        "normalize_gates": moe.NORMALIZE_GATES,
        "batch_prioritized": moe.BATCH_PRIORITIZED,
        "aux_loss": moe.AUX_LOSS,
        "global_balance": moe.GLOBAL_BALANCE,
        "kernels": moe.KERNELS,
        "input_jitter": moe.INPUT_JITTER,
        "input_dropout": moe.INPUT_DROPOUT,
        "hidden_dropout": moe.HIDDEN_DROPOUT,
        "output_bias": moe.OUTPUT_BIAS,
        "init_std": moe.INIT_STD,
    }


def measure_model(config: CfgNode, num_classes: int) -> Complexity:
    """Parameters over all ranks and MACs per image of the configured model, without building it in
    memory."""
    with torch.device("meta"):
        model = build_model(config, num_classes)
    return count(model, config.DATA.IMG_SIZE, model_section(config).IN_CHANS)
