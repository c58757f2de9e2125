"""Finding the layer at which a number stops being finite."""

import torch
from torch import Tensor, nn

from swinv2_moe.train.distributed import World


def first_non_finite_layer(model: nn.Module, images: Tensor) -> str | None:
    """The first innermost module whose output for `images` has a NaN or infinity, by name, or
    None."""
    culprits: list[str] = []

    def watch(name: str):
        def hook(module, inputs, output) -> None:
            tensors = [
                t
                for t in (output if isinstance(output, tuple) else (output,))
                if isinstance(t, Tensor)
            ]
            if any(not torch.isfinite(t).all() for t in tensors if t.is_floating_point()):
                culprits.append(name)

        return hook

    handles = [
        module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name
    ]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    if culprits:
        return culprits[0]
    return None


def explain_non_finite(step: int, model: nn.Module, images: Tensor, world: World) -> str:
    """One line that names the step and what stopped being finite, on whichever rank; every rank
    calls this.

    `images` is the step's batch; the gradients of the step are still in place.
    """
    bad_values = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    bad_gradients = [
        name
        for name, p in model.named_parameters()
        if p.grad is not None and not torch.isfinite(p.grad).all()
    ]
    bad_images = not torch.isfinite(images).all()
    layer = first_non_finite_layer(model, images)
    causes = [  # an earlier one explains the later ones, on whichever rank it is
        "the input images" if bad_images else None,
        f"the parameter {bad_values[0]}" if bad_values else None,
        f"the output of layer {layer}" if layer else None,
        # the last gradient in the network is the first in the backward pass
        f"the gradient of {bad_gradients[-1]}" if bad_gradients else None,
    ]
    everywhere = zip(*world.gather(causes), strict=True)
    found = next((cause for ranks in everywhere for cause in ranks if cause), "the loss itself")
    return (
        f"step {step}: the loss or its gradient is not finite (NaN or infinite); it begins at"
        f" {found}"
    )
