"""The FFNs of timm's blocks: where they are, what they compute, and their tensors as an expert's.

B images, T tokens, M model dim, H hidden dim
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from timm.layers import GELU, ConvMlp, GELUTanh, GluMlp, Mlp, QuickGELU, SwiGLU, Swish
from timm.models.inception_next import ConvMlp as InceptionConvMlp
from torch import Tensor, nn

from swinv2_moe.models.moe_mlp import MoEMlp

Item = TypeVar("Item")

# A block's name for its FFN. The `mlp_tokens` of an MLP-Mixer mixes positions, not channels.
_ATTRIBUTE = re.compile(r"mlp\d?|mlp_channels|ffn")
# Owners of an MLP that are no block of tokens: it computes position biases, or sees one token only.
_NO_BLOCKS = (
    "RelPosMlp",
    "AttentionPoolLatent",
    "LayerScaleBlockClassAttn",
    "ClassAttentionBlock",
    "ClassBlock",
)
_CONTAINER = re.compile(r"(?:(.*)\.)?\d+(?:\.\D[^.]*)*")
_KINDS = (Mlp, GluMlp, SwiGLU, ConvMlp, InceptionConvMlp)
_ACTIVATIONS: dict[type, str] = {
    nn.GELU: "gelu",
    GELU: "gelu",
    GELUTanh: "gelu_tanh",
    QuickGELU: "quick_gelu",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    Swish: "silu",
}


class Block(NamedTuple):
    """A module with an FFN."""

    name: str  # in the model, such as "blocks.11"
    attribute: str  # the block's name for its FFN, mostly "mlp"
    module: nn.Module
    ffn: nn.Module  # a MoEMlp if it has experts


class FFNForm(NamedTuple):
    """What an FFN computes, in the terms of MoEConfig, and how its tensors lie."""

    model_dim: int
    hidden_dim: int
    activation: str
    gated: bool
    bias: bool
    output_bias: bool
    hidden_dropout: float
    dropout: float  # of the result
    channels_first: bool  # images are [B, M, h, w], not [..., M]
    gate_last: bool | None  # the gate is the second half of a packed fc1; None: not packed

    def layer_fields(self) -> dict[str, Any]:
        """The fields of MoEConfig with which an expert computes the same, without its shape."""
        names = ("activation", "gated", "bias", "output_bias", "hidden_dropout")
        return {name: getattr(self, name) for name in names}

    def layout(self) -> dict[str, Any]:
        """The keyword arguments of MoEMlp."""
        names = ("channels_first", "dropout", "gate_last")
        return {name: getattr(self, name) for name in names}


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of a model in the order of its modules, which is that of the forward pass."""
    blocks = []
    for name, module in model.named_modules():
        if type(module).__name__ in _NO_BLOCKS or isinstance(module, (*_KINDS, MoEMlp)):
            continue
        for attribute, ffn in module.named_children():
            if _ATTRIBUTE.fullmatch(attribute) and not isinstance(ffn, nn.Identity):
                blocks.append(Block(name, attribute, module, ffn))
    return blocks


def stages_of(blocks: list[Block]) -> list[list[Block]]:
    """The blocks by the list that they stand in: "stages.0.blocks.1" is in "stages.0.blocks"."""
    stages: dict[str, list[Block]] = {}
    for block in blocks:
        match = _CONTAINER.fullmatch(block.name)
        container = block.name
        if match:
            container = match[1] or ""
        stages.setdefault(container, []).append(block)
    return list(stages.values())


def by_stage(
    stages: Sequence[Sequence[Item]], chosen: Sequence[Sequence[int]], name: str
) -> list[Item]:
    """The blocks that `chosen` names: for each stage their numbers, negative ones from the end.

    Args:
        name: of `chosen`, for messages.

    Raises:
        ValueError: there is no such stage or block.
    """
    if len(chosen) > len(stages):
        raise ValueError(f"{name} ({chosen}) has {len(chosen)} stages, the model has {len(stages)}")
    blocks = []
    for stage, numbers in enumerate(chosen):
        there = len(stages[stage])
        for number in numbers:
            if type(number) is not int or not -there <= number < there:
                raise ValueError(
                    f"{name} names block {number} of stage {stage}, which has {there} blocks"
                )
            blocks.append(stages[stage][number])
    return blocks


def form_of(block: Block) -> FFNForm:
    """What the FFN of a block computes.

    Raises:
        ValueError: experts cannot compute the same. The message names the block and the class.
    """
    ffn: Any = block.ffn
    where = f"{block.name}.{block.attribute}"
    kind = f"{type(ffn).__module__}.{type(ffn).__name__}"
    if isinstance(ffn, MoEMlp):
        raise ValueError(f"{where} has experts already")
    if type(ffn) not in _KINDS:
        raise ValueError(f"{where} is a {kind}; experts cannot replace it")
    first = ffn.fc1_g if isinstance(ffn, SwiGLU) else ffn.fc1
    second = ffn.fc2
    for layer in (first, second):
        if not _is_linear(layer):
            raise ValueError(
                f"{where} is a {kind} with {type(layer).__name__}; experts cannot replace it"
            )
        if hasattr(layer.weight, "placements"):
            raise ValueError(f"{where} is sharded: call add_experts before fully_shard")
    if not isinstance(ffn.norm, nn.Identity):
        raise ValueError(
            f"{where} is a {kind} with {type(ffn.norm).__name__} on its hidden units; experts"
            " cannot replace it"
        )
    model_dim, outputs = first.weight.shape[1], len(second.weight)
    if model_dim != outputs:
        raise ValueError(f"{where} is a {kind} from {model_dim} to {outputs} channels")
    bias, output_bias = first.bias is not None, second.bias is not None
    if output_bias and not bias:
        raise ValueError(f"{where} is a {kind} with a bias in fc2 alone, which experts do not have")
    return FFNForm(
        model_dim=model_dim,
        hidden_dim=second.weight.shape[1],
        activation=_activation(ffn, where),
        gated=isinstance(ffn, (GluMlp, SwiGLU)),
        bias=bias,
        output_bias=output_bias,
        hidden_dropout=(ffn.drop if hasattr(ffn, "drop") else ffn.drop1).p,
        dropout=ffn.drop2.p if hasattr(ffn, "drop2") else 0.0,
        channels_first=isinstance(first, nn.Conv2d),
        gate_last=ffn.gate_last if isinstance(ffn, GluMlp) else None,
    )


def as_expert(tensors: Mapping[str, Tensor], gate_last: bool | None) -> dict[str, Tensor]:
    """The tensors of an expert, of those of a dense FFN.

    Args:
        tensors: by the name in the FFN, such as "fc1.weight" [H, M] or [H, M, 1, 1].
        gate_last: as in `FFNForm`.

    Returns:
        By the name in `moe_core.ExpertWeights`, of one expert: w1 and w3 [H, M], w2 [H, M], b1 and
        b3 [H], b2 [M].
    """
    expert = {}
    for kind, letter in (("weight", "w"), ("bias", "b")):
        found = {}
        for name in ("fc1", "fc1_g", "fc1_x", "fc2"):
            tensor = tensors.get(f"{name}.{kind}")
            if tensor is not None:
                found[name] = tensor.flatten(1) if tensor.ndim > 1 else tensor
        if "fc1" in found and gate_last is not None:
            halves = found.pop("fc1").chunk(2)
            found["fc1_g"], found["fc1_x"] = reversed(halves) if gate_last else halves
        for name, number in (("fc1", 1), ("fc1_g", 1), ("fc1_x", 3)):
            if name in found:
                expert[f"{letter}{number}"] = found[name]
        if "fc2" in found:
            second = found["fc2"]
            expert[f"{letter}2"] = second.t() if kind == "weight" else second
    return expert


def _is_linear(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.kernel_size == (1, 1) and layer.stride == (1, 1) and layer.groups == 1
    return type(layer) is nn.Linear


def _activation(ffn: Any, where: str) -> str:
    act = ffn.act
    name = _ACTIVATIONS.get(type(act))
    if name == "gelu" and getattr(act, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    if name is None:
        raise ValueError(
            f"{where} is a {type(ffn).__name__} with {type(act).__name__}, an activation that"
            " experts do not have"
        )
    return name
