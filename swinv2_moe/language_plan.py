"""A language model described by numbers, for the planner: a decoder with experts in some blocks.

The planner treats a sequence as it treats an image. Parameters and products are computed by
formulas; a test compares them with examples/language_model.py.
"""

# L tokens of a sequence, M model dim, H hidden dim, E experts, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass, fields

from moe_core import MoEConfig
from swinv2_moe.errors import UserError
from swinv2_moe.planner import LayerKind, Model


@dataclass(frozen=True)
class LanguageModel:
    """A decoder: embeddings of tokens and positions, blocks, a norm and a head that shares no
    weights.

    Raises:
        UserError: a number is out of range.
    """

    layers: int  # blocks of attention and a feed-forward network
    dim: int
    hidden: int  # hidden dim of a feed-forward network, and of an expert
    experts: int = 0  # experts per MoE layer; 0: a dense model
    top_k: int = 2
    every: int = 2  # experts are in every second block
    context: int = 1024  # tokens of a sequence
    vocabulary: int = 51200

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1
            if field.name == "experts":
                least = 0
            if value < least:
                raise UserError(
                    f"--language-model: {field.name} is {value}, it must be at least {least}"
                )
        if self.experts and self.top_k > self.experts:
            raise UserError(
                f"--language-model: top_k is {self.top_k}, it must be at most experts"
                f" ({self.experts})"
            )

    @property
    def moe_layers(self) -> int:
        if self.experts == 0:
            return 0
        return self.layers // self.every

    @property
    def expert_parameters(self) -> int:
        """The parameters of all experts in all layers, including biases."""
        expert = 2 * self.dim * self.hidden + self.hidden + self.dim
        return self.moe_layers * self.experts * expert

    @property
    def trunk_parameters(self) -> int:
        attention = 4 * self.dim * self.dim + 4 * self.dim
        norms = 4 * self.dim
        feed_forward = 2 * self.dim * self.hidden + self.hidden + self.dim
        total = self.layers * (attention + norms)
        total += (self.layers - self.moe_layers) * feed_forward
        total += self.moe_layers * self.experts * self.dim  # routers
        total += (self.vocabulary + self.context) * self.dim  # embeddings
        return total + 2 * self.dim + self.vocabulary * (self.dim + 1)  # norm and head


def parse(words: Sequence[str]) -> LanguageModel:
    """A language model from words such as layers=32.

    Raises:
        UserError: an unknown name, a value that is not a whole number, or a missing value.
    """
    allowed = [field.name for field in fields(LanguageModel)]
    values = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in allowed:
            raise UserError(
                f"--language-model {word}: must be NAME=NUMBER, where NAME is one of"
                f" {', '.join(allowed)}"
            )
        try:
            values[name] = int(value)
        except ValueError:
            raise UserError(f"--language-model {word}: {value!r} is not a whole number") from None
    missing = [name for name in ("layers", "dim", "hidden") if name not in values]
    if missing:
        raise UserError(f"--language-model needs {', '.join(f'{name}=NUMBER' for name in missing)}")
    return LanguageModel(**values)


def describe(model: LanguageModel, expert_parallel_size: int, use_checkpoint: bool) -> Model:
    """The input of the planner's prediction for this model.

    Args:
        expert_parallel_size: GPUs that share the experts; 0: all.
        use_checkpoint: activation checkpointing. The backward pass computes each block again from
            its input.
    """
    activations = kept = _activations(model)
    if use_checkpoint:
        kept = model.context * (model.layers * model.dim + model.vocabulary)
    layers = []
    if model.moe_layers:
        config = MoEConfig(
            model.dim, model.hidden, model.experts, top_k=model.top_k, capacity_factor=1.0
        )
        layers.append(LayerKind(config, model.context, model.moe_layers))
    return Model(
        trunk_parameters=model.trunk_parameters,
        expert_parameters=model.expert_parameters,
        trunk_macs=_trunk_macs(model),
        activations=activations,
        kept=kept,
        layers=tuple(layers),
        expert_parallel_size=expert_parallel_size,
        blocks=model.layers,
    )


def _trunk_macs(model: LanguageModel) -> int:
    """Multiply-adds for a sequence, without the MoE layers."""
    # causal attention: scores and values of half of the pairs
    attention = 4 * model.dim * model.dim + model.context * model.dim
    feed_forward = 2 * model.dim * model.hidden
    token = model.layers * attention + (model.layers - model.moe_layers) * feed_forward
    return model.context * (token + model.dim * model.vocabulary)


def _activations(model: LanguageModel) -> int:
    """Elements that autograd keeps for a sequence, with fused attention.

    Kept for each token: the input and output of both norms; queries, keys, values and the
    attention's output; the hidden layer of a feed-forward network before and after the activation.
    Experts keep the hidden layer only before the activation, for K experts, and their outputs.
    Korthikanti et al., arXiv 2205.05198, section 4, count in the same way.
    """
    attention = 6 * model.dim
    dense = 2 * model.dim + 2 * model.hidden
    experts = 2 * model.dim + model.top_k * (model.hidden + model.dim)
    token = model.layers * attention + (model.layers - model.moe_layers) * dense
    token += model.moe_layers * experts
    return model.context * (token + 2 * model.dim + model.vocabulary)
