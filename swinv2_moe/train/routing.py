"""Record what goes through MoE layers: the expert of each token of an image, and samples of tokens.

B images, C channels, S pixels a side, h x w tokens, K choices of a token, T tokens, M model dim
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moe_core import MoELayer, moe_layers
from swinv2_moe.models import MoEModel, block_name


@contextmanager
def record_choices(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the experts chosen in the latest forward pass, in each MoE layer.

    Forward hooks record the router's choices, including choices that are dropped. They work in
    evaluation mode only, since in training noise is added after the router. They do not work for a
    compiled model, which was compiled without the hooks.

    Args:
        model: a MoEModel, or a module that contains one.

    Yields:
        By the layer's name, int64 [B, h, w, K] on the model's device: each token at its place in
        the image, its first choice first. Layers whose tokens have no known places are left out.
    """
    choices: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for prefix, backbone in model.named_modules():
            if isinstance(backbone, MoEModel):
                _watch(backbone, f"{prefix}." if prefix else "", choices, hooks)
        yield choices


def _watch(backbone: MoEModel, prefix: str, choices: dict[str, Tensor], hooks: ExitStack) -> None:
    for name, layer in moe_layers(backbone).items():
        block = backbone.get_submodule(block_name(name))
        record, place = _hooks(backbone, layer, prefix + name, choices)
        hooks.callback(layer.router.register_forward_hook(record).remove)
        hooks.callback(block.register_forward_hook(place).remove)


def _hooks(
    backbone: MoEModel, layer: MoELayer, name: str, choices: dict[str, Tensor]
) -> tuple[Callable, Callable]:
    """Forward hooks of a layer's router and of its block."""

    def record(router: nn.Module, args: tuple, logits: Tensor) -> None:  # logits [T, E]
        assert not layer.training, "the noise of training is not in these logits"
        logits = layer.expert_logits(logits)
        choices[name] = logits.topk(min(layer.config.top_k, logits.shape[1])).indices

    def place(block: nn.Module, args: tuple, output: Tensor) -> None:
        maps = backbone.token_maps(choices.pop(name), output)
        if maps is not None:
            choices[name] = maps

    return record, place


@dataclass
class RoutingSample:
    """Some of the images of a forward pass, and the choices of their tokens."""

    images: list[Tensor] = field(default_factory=list)  # float32 [C, S, S], normalised
    choices: dict[str, list[Tensor]] = field(default_factory=dict)  # of each layer int64 [h, w, K]


@contextmanager
def sample_choices(model: nn.Module, num_images: int, count: int) -> Iterator[RoutingSample]:
    """Keep some of the images that go through `model`, and their choices, on the CPU.

    Up to `count` images are kept, evenly spaced among the `num_images` of the forward passes in the
    block. The restrictions of `record_choices` apply.
    """
    positions, sample, seen = evenly_spaced(num_images, count), RoutingSample(), 0

    def keep(model: nn.Module, args: tuple, output: Tensor) -> None:
        nonlocal seen
        images = args[0]
        for row in [i - seen for i in positions if seen <= i < seen + len(images)]:
            sample.images.append(images[row].cpu())
            for name, ids in choices.items():
                sample.choices.setdefault(name, []).append(ids[row].cpu())
        seen += len(images)

    with record_choices(model) as choices:
        hook = model.register_forward_hook(keep)
        try:
            yield sample
        finally:
            hook.remove()


def evenly_spaced(size: int, count: int) -> list[int]:
    """Up to `count` evenly spaced integers from 0 to `size` - 1."""
    count = min(size, count)
    return [i * size // count for i in range(count)]


@torch.no_grad()
def sample_tokens(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    batches: Iterable[Tensor],
    per_image: int,
) -> dict[str, Tensor]:
    """Tokens that reach some layers of a model, by the layer's name: [T, M] on the CPU.

    Args:
        layers: modules of the model whose first argument is [..., M].
        batches: images [B, C, S, S].
        per_image: tokens of an image to keep, drawn at random with seed 0; fewer if it has fewer.
    """
    tokens: dict[str, list[Tensor]] = {name: [] for name in layers}
    generator = torch.Generator().manual_seed(0)
    count = 0  # tokens to keep of the current batch

    def keep(name: str) -> Callable:
        def hook(layer: nn.Module, args: tuple) -> None:
            x = args[0].flatten(0, -2)
            rows = torch.randperm(len(x), generator=generator)[:count]
            tokens[name].append(x[rows.to(x.device)].float().cpu())

        return hook

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(keep(name)).remove)
        for images in batches:
            count = per_image * len(images)
            model(images)
    return {name: torch.cat(parts) for name, parts in tokens.items()}
