"""Put mixtures of experts into the blocks of any model of timm."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_core import MoEConfig, MoELayer, ignore_experts
from moe_core.parallel import ExpertGroup, ParallelStrategy
from swinv2_moe.models.ffn import (
    Block,
    FFNForm,
    as_expert,
    by_stage,
    find_blocks,
    form_of,
    stages_of,
)
from swinv2_moe.models.moe_mlp import MoEMlp
from swinv2_moe.models.protocol import (
    MoEModel,
    as_moe_model,
    check_aux_loss_weight,
    complete_config,
)
from swinv2_moe.models.weights import upcycle_layer

_WORDS = re.compile(r"(last|every) ([1-9]\d{0,3})|all")
_SHOWN = 3  # names of blocks in a message


def add_experts(
    model: nn.Module,
    blocks: str | Sequence = "last 2",
    num_experts: int = 8,
    *,
    upcycle: bool = True,
    hidden_ratio: float = 1.0,
    freeze: bool = False,
    aux_loss_weight: float = 0.01,
    eval_capacity_factor: float | None = None,
    expert_group: ExpertGroup | dist.ProcessGroup | None = None,
    expert_strategy: ParallelStrategy | str = ParallelStrategy(),  # noqa: B008 - frozen
    **moe: Any,
) -> MoEModel:
    """Replace the FFN of some blocks by a mixture of experts, in place.

    >>> model = add_experts(timm.create_model("vit_small_patch16_224", pretrained=True))

    Each expert begins as a copy of the dense FFN. By default a token visits two experts, whose gate
    values sum to 1, and none is dropped: the outputs are those of the dense model, up to rounding.
    With `top_k=1` an output is multiplied by its gate value, so they are not.

    The model remains an instance of its class, with the same names of all other parameters.
    `model.blocks[11].mlp.moe` is then the MoELayer of a ViT's last block. In training mode the
    gradient of `aux_loss_weight` times the load-balancing loss is attached to the experts' outputs:
    `loss_of(model(images)).backward()` also balances them. Options without a description are those
    of MoEModel.

    Args:
        model: a model of timm, also one with `features_only=True`. Call this before a wrapper such
            as DistributedDataParallel, torch.compile or fully_shard.
        blocks: "last N", "every N" (the last of N consecutive blocks), "all"; numbers of blocks
            (from 0, negative ones from the end) and names, such as [3, "blocks.5"]; or for each
            stage its numbers, such as [[], [1], [1, 3], [1]].
        num_experts: number of experts of a block, over all ranks of `expert_group`.
        upcycle: False: experts get new weights.
        hidden_ratio: hidden dim of an expert, in units of that of the FFN. Only without `upcycle`
            it may differ from 1.
        freeze: the experts are not trained, and route as in evaluation.
        moe: fields of MoEConfig, such as `top_k=1` or `router="cosine"`. Activation, gated form,
            biases and hidden dropout are those of the FFN unless they are given.

    Returns:
        `model`.

    Raises:
        ValueError: a block that does not exist, an FFN that experts cannot replace (the message
            names the block and the class), or as MoEConfig and MoELayer. The model is unchanged.

    Source: sparse upcycling, arXiv 2212.05055; V-MoE, arXiv 2106.05974.
    """
    _check(model, upcycle, hidden_ratio)
    check_aux_loss_weight(aux_loss_weight)
    group = ExpertGroup.of(expert_group)  # one object for all layers, which share its state
    chosen = choose_blocks(model, blocks)
    forms = [form_of(block) for block in chosen]
    configs = [
        _config(*pair, num_experts, moe, upcycle, hidden_ratio)
        for pair in zip(chosen, forms, strict=True)
    ]
    adapted, replacements = as_moe_model(model), []
    for block, form, config in zip(chosen, forms, configs, strict=True):
        config = complete_config(adapted, block.module, config, eval_capacity_factor)
        like = next(block.ffn.parameters())
        layer = MoELayer(config, group, strategy=expert_strategy, device=like.device)
        layer.to(like.dtype)
        if upcycle:
            upcycle_layer(layer, as_expert(block.ffn.state_dict(), form.gate_last))
        experts = MoEMlp(layer, freeze, aux_loss_weight, **form.layout())
        replacements.append(experts.train(block.ffn.training))
    for block, experts in zip(chosen, replacements, strict=True):
        setattr(block.module, block.attribute, experts)
    ignore_experts(adapted)
    return adapted


def _check(model: nn.Module, upcycle: bool, hidden_ratio: float) -> None:
    if isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ValueError(
            f"the model is wrapped ({type(model).__name__}): call add_experts before"
            " DistributedDataParallel and torch.compile"
        )
    if upcycle and hidden_ratio != 1:
        raise ValueError(
            f"hidden_ratio ({hidden_ratio}) must be 1 with upcycle=True: experts are copies"
        )


def choose_blocks(model: nn.Module, blocks: str | Sequence) -> list[Block]:
    """The blocks of a model that `blocks`, as in `add_experts`, names.

    Raises:
        ValueError: there is no such block.
    """
    found = find_blocks(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no block with an MLP")
    if isinstance(blocks, str):
        return _by_words(found, blocks)
    if not len(blocks):
        raise ValueError(f"blocks ({blocks}) names no block")
    if any(isinstance(entry, (list, tuple)) for entry in blocks):
        named: list = list(blocks)
        chosen = by_stage(stages_of(found), named, "blocks")
    else:
        chosen = [_by_number_or_name(found, entry) for entry in blocks]
    for i, block in enumerate(chosen):
        if any(block.ffn is other.ffn for other in chosen[:i]):
            raise ValueError(f"blocks ({blocks}) names {block.name} twice")
    return chosen


def _by_words(found: list[Block], blocks: str) -> list[Block]:
    match = _WORDS.fullmatch(blocks)
    if match is None:
        raise ValueError(
            f"blocks ({blocks!r}) must be 'last N', 'every N', 'all', or a list of numbers or names"
        )
    if blocks == "all":
        return found
    count = int(match[2])
    if count > len(found):
        raise ValueError(f"blocks ({blocks!r}): the model has {len(found)} blocks with an MLP")
    return found[-count:] if match[1] == "last" else found[count - 1 :: count]


def _by_number_or_name(found: list[Block], entry: object) -> Block:
    if type(entry) is int:
        if not -len(found) <= entry < len(found):
            raise ValueError(
                f"blocks names block {entry}, the model has {len(found)} blocks with an MLP,"
                " numbered from 0"
            )
        return found[entry]
    names = [block.name for block in found]
    same = [block for block in found if block.name == entry]
    if len(same) == 1:
        return same[0]
    hint = f"its blocks are {', '.join(names[:_SHOWN])}, ..., {names[-1]}"
    nearest = difflib.get_close_matches(str(entry), names, n=1)
    if nearest:
        hint = f"did you mean {nearest[0]!r}?"
    raise ValueError(f"blocks names {entry!r}, which is no block with one MLP; {hint}")


def _config(
    block: Block,
    form: FFNForm,
    num_experts: int,
    given: Mapping[str, Any],
    upcycle: bool,
    hidden_ratio: float,
) -> MoEConfig:
    """Experts that compute what the FFN computes, and a routing in which copies of it give its
    outputs, where nothing else is given."""
    of_ffn = form.layer_fields()
    for name in ("activation", "gated", "bias", "output_bias"):
        if upcycle and given.get(name, of_ffn[name]) != of_ffn[name]:
            raise ValueError(
                f"{name} ({given[name]!r}) must be {of_ffn[name]!r}, as in"
                f" {block.name}.{block.attribute}, with upcycle=True"
            )
    routing: dict[str, Any] = {"top_k": max(1, min(2, num_experts))}
    if MoEConfig(1, 1, 1, router=given.get("router", "linear")).routing == "token_choice":
        routing["capacity_factor"] = 0.0
    hidden_dim = round(hidden_ratio * form.hidden_dim)
    return MoEConfig(form.model_dim, hidden_dim, num_experts, **(of_ffn | routing | dict(given)))
