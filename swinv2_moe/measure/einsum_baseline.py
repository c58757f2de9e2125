"""The einsum baseline of a throughput measurement: the same model with its MoE layers in the einsum
form, as in fairseq (moe_core.einsum)."""

import torch
from torch import Tensor, nn
from yacs.config import CfgNode

from moe_core import moe_layers, use_einsum
from swinv2_moe.errors import UserError
from swinv2_moe.models import MoEModel
from swinv2_moe.train.distributed import World

# images/s of Tutel over fairseq, SwinV2-MoE-B with 32 experts on 128 A100s (arXiv 2206.03382)
PUBLISHED_RATIO = {"training": 1.55, "inference": 2.11}
_TOLERANCE = 1e-3  # of the largest value of a layer's output
_FEW_TOKENS = 0.01


def einsum_config(config: CfgNode) -> CfgNode:
    """`config`, with routing and dispatch plan computed by torch operations, as in fairseq."""
    config = config.clone()
    config.defrost()
    config.MODEL.MOE.KERNELS = "torch"
    config.freeze()
    return config


def use_einsum_layers(model: MoEModel) -> None:
    """Make all MoE layers of `model` compute with einsums.

    Raises:
        UserError: the einsum form does not support the model.
    """
    for name, layer in moe_layers(model).items():
        try:
            use_einsum(layer)
        except ValueError as error:
            raise UserError(f"--baseline einsum: {name}: {error}") from error


@torch.no_grad()
def check_same_outputs(model: MoEModel, baseline: MoEModel, images: Tensor, world: World) -> None:
    """Check that each MoE layer has the same fp32 outputs in both models, in evaluation. All ranks
    call this.

    The layers are compared, not the logits, because a new residual post-norm block adds nothing to
    its input. A few tokens may differ: rounding can change the order of two experts with almost
    equal scores.

    Raises:
        UserError: outputs differ, on any rank.
    """
    expected = _layer_outputs(model, images)
    actual = _layer_outputs(baseline, images)
    differing = {}
    for name, output in expected.items():
        is_close = (output - actual[name]).abs().amax(-1) <= _TOLERANCE * output.abs().max()
        differing[name] = 1 - is_close.float().mean().item()
    for shares in world.gather(differing):
        for name, share in shares.items():
            if share > _FEW_TOKENS:
                raise UserError(
                    f"--baseline einsum: the outputs of {name} differ from the model's in"
                    f" {share:.0%} of the tokens"
                )


def _layer_outputs(model: MoEModel, images: Tensor) -> dict[str, Tensor]:
    """The output [..., M] of each MoE layer, by name."""
    outputs = {}
    hooks = []
    for name, layer in moe_layers(model).items():

        def keep(module: nn.Module, args: tuple, result: tuple, name: str = name) -> None:
            outputs[name] = result[0].float()

        hooks.append(layer.register_forward_hook(keep))
    was_training = model.training
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        model(images)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return outputs
