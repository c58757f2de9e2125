"""Convert other programs' state dicts, of the whole model or of each rank, and back.

`swin-moe` is the layout of microsoft/Swin-Transformer (models/swin_transformer_moe.py,
utils_moe.py): its own names, with Tutel's MoE layers as `mlp._moe_layer`. `tutel` has this
project's names, except for Tutel's inside the MoE layers. Buffers that both programs recompute are
omitted in both directions.
"""

# E experts, W ranks, s parts of an expert, H hidden dim of an expert, M model dim

import re

from torch import Tensor, nn

from moe_core import MoELayer, moe_layers
from moe_core.tutel import count_tutel_experts, from_tutel, to_tutel
from swinv2_moe.convert.files import Sources
from swinv2_moe.errors import UserError
from swinv2_moe.models.section import ModelConfig
from swinv2_moe.models.weights import RECOMPUTED

_FC1 = "experts.batched_fc1_w"


def check_layout(kind: str, config: ModelConfig) -> None:
    """Raise UserError if a layout cannot hold the configured model."""
    if kind == "swin-moe" and config.type != "swin_moe":
        raise UserError(
            f"swin-moe files are of MODEL.TYPE 'swin_moe', this model is {config.type!r}"
        )


def released_name(name: str) -> str:
    """A parameter's name in the released models. They merge patches at the end of a stage.

    This project merges them at the start of the next stage.
    """
    name = re.sub(
        r"^layers\.(\d+)\.downsample\.", lambda m: f"layers.{int(m[1]) - 1}.downsample.", name
    )
    return re.sub(r"^head\.fc\.", "head.", name).replace(".mlp.moe.", ".mlp._moe_layer.")


def project_name(name: str) -> str:
    """The inverse of `released_name`."""
    name = re.sub(
        r"^layers\.(\d+)\.downsample\.", lambda m: f"layers.{int(m[1]) + 1}.downsample.", name
    )
    return re.sub(r"^head\.", "head.fc.", name).replace(".mlp._moe_layer.", ".mlp.moe.")


def with_project_names(kind: str, states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The states with Tutel's names in the MoE layers and this project's elsewhere.

    Recomputed buffers are omitted.
    """
    rename = project_name if kind == "swin-moe" else str
    return [
        {rename(name): value for name, value in state.items() if not name.endswith(RECOMPUTED)}
        for state in states
    ]


def joined(
    states: list[dict[str, Tensor]], model: nn.Module, sources: Sources
) -> dict[str, Tensor]:
    """One state dict with this project's names and complete experts.

    Raises:
        UserError: a wrong number of experts or ranks, or a bias that the model does not have.
    """
    layers = moe_layers(model)
    try:
        for name, count in count_tutel_experts(states[0]).items():
            if name in layers:
                _check_experts(name, count, layers[name], states, sources)
        state = from_tutel(states)
    except ValueError as error:
        raise UserError(f"{sources.path}: {error}") from error
    for name, layer in layers.items():
        bias = f"{name}.experts.b2"
        if not (layer.config.bias and layer.config.output_bias) and bias in state:
            if state[bias].any():
                raise UserError(
                    f"{sources.path}: the second bias of {name} (batched_fc2_bias) is not zero, "
                    "and the model has none (MODEL.MOE.OUTPUT_BIAS false)"
                )
            del state[bias]
    return state


def _check_experts(
    name: str, count: int, layer: MoELayer, states: list[dict[str, Tensor]], sources: Sources
) -> None:
    """Check the number of experts and ranks. Otherwise errors would list the shapes of hundreds of
    tensors.

    Raises:
        UserError: a wrong number.
    """
    config, ranks = layer.config, len(states)
    if count != config.num_experts:
        raise UserError(
            f"{sources.path}: {name} has {count} experts, MODEL.MOE.NUM_EXPERTS is"
            f" {config.num_experts}"
        )
    piece = states[0][f"{name}.{_FC1}"]  # [E/W, H, M] or [1, H/s, M]
    if piece.shape[2:] != (config.model_dim,) or not piece.numel():
        return  # another architecture; a later check reports the names of its tensors
    num_elements = config.num_experts * config.hidden_dim * config.model_dim
    needed, remainder = divmod(num_elements, piece.numel())
    if ranks != needed and not remainder:
        missing = ""
        if 1 < ranks < needed:
            missing = f"; missing {sources.missing(needed)}"
        raise UserError(
            f"{sources.path}: {count} experts of {config.hidden_dim} hidden units in pieces of "
            f"{list(piece.shape)} ({name}) are those of {needed} ranks, there are files of "
            f"{ranks}{missing}"
        )


def split(
    kind: str, state: dict[str, Tensor], num_ranks: int, legacy: bool
) -> list[dict[str, Tensor]]:
    """The state dict of each rank: the inverse of `joined` and `with_project_names`.

    Raises:
        UserError: the experts cannot be divided over `num_ranks`.
    """
    if num_ranks > 1 and not any(".experts." in name for name in state):
        raise UserError(
            f"--ranks {num_ranks}: the model has no experts to divide; leave out --ranks"
        )
    try:
        states = to_tutel(state, num_ranks, legacy)
    except ValueError as error:
        raise UserError(f"--ranks {num_ranks}: {error}") from error
    rename = released_name if kind == "swin-moe" else str
    return [{rename(name): value for name, value in state.items()} for state in states]


def is_rank_specific(name: str, has_output_bias: bool) -> bool:
    """Whether the released code stores a tensor in the ranks' files: trained parameters of experts.

    Without MODEL.MOE.OUTPUT_BIAS, Tutel's second bias stays zero, is not trained and is stored in
    the master file.
    """
    return ".experts.batched_" in name and (
        has_output_bias or not name.endswith("batched_fc2_bias")
    )
