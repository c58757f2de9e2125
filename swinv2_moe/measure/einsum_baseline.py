"""The einsum baseline of a throughput measurement: the same model with the einsum form of its MoE
layers, as in fairseq (moe_core.einsum)."""

import statistics

import torch
from torch import Tensor
from yacs.config import CfgNode

from moe_core import moe_layers, use_einsum
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel
from swinv2_moe.train.distributed import World

# images/s of Tutel over fairseq, SwinV2-MoE-B with 32 experts on 128 A100s (arXiv 2206.03382)
PUBLISHED_RATIO = {"training": 1.55, "inference": 2.11}
_TOLERANCE = 1e-3  # of the largest logit of an image, fp32


def einsum_config(config: CfgNode) -> CfgNode:
    """`config` with routing and dispatch plan in plain torch, as in fairseq."""
    config = config.clone()
    config.defrost()
    config.MODEL.MOE.KERNELS = "torch"
    config.freeze()
    return config


def use_einsum_layers(model: MoEModel) -> None:
    """Make all MoE layers of `model` compute with einsums.

    Raises:
        UserError: a model that the einsum form cannot compute.
    """
    for name, layer in moe_layers(model).items():
        try:
            use_einsum(layer)
        except ValueError as error:
            raise UserError(f"--baseline einsum: {name}: {error}") from error


@torch.no_grad()
def check_same_outputs(model: MoEModel, baseline: MoEModel, images: Tensor, world: World) -> None:
    """Whether both models have the same fp32 logits in evaluation. All ranks call this.

    The median of the images is compared: rounding may flip a near tie of two experts, which changes
    an image or two of a large batch.

    Raises:
        UserError: they differ, on any rank.
    """
    logits = [_evaluate(each, images) for each in (model, baseline)]
    difference = (logits[0] - logits[1]).abs().amax(1) / logits[0].abs().amax(1)
    errors = world.gather(statistics.median(difference.tolist()))
    if not max(errors) < _TOLERANCE:
        raise UserError(
            f"--baseline einsum: its logits differ from the model's by {max(errors):.1e} of the"
            " largest: they do not compute the same"
        )


def _evaluate(model: MoEModel, images: Tensor) -> Tensor:
    was_training = model.training
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        logits = model(images)
    model.train(was_training)
    return logits.float()
