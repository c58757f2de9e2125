"""Finding the layer at which a value stops being finite."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from swinv2_moe.ranks.world import World


def first_non_finite_layer(model: nn.Module, images: Tensor) -> str | None:
    """The name of the first innermost module whose output for `images` has a NaN or an infinity;
    None if all outputs are finite."""
    names: list[str] = []  # in the order in which modules return

    def watch(name: str):
        def hook(module, inputs, output) -> None:
            if not _is_finite(output):
                names.append(name)

        return hook

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(watch(name)))
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    if names:
        return names[0]
    return None


def _is_finite(output: object) -> bool:
    """Whether all tensors of a module's output (a tensor or a tuple) are finite."""
    if not isinstance(output, tuple):
        output = (output,)
    for value in output:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if is_float and not torch.isfinite(value).all():
            return False
    return True


def explain_non_finite(step: int, model: nn.Module, batches: Sequence[Tensor], world: World) -> str:
    """One line that names the step and the first value that is not finite, on any rank. Every rank
    calls this.

    Args:
        batches: the images of the step, in one batch or several accumulated ones. The gradients of
            this step must still be in the parameters.
    """
    ranks = world.gather([_causes(model, images) for images in batches])
    all_causes = [causes for batches_of_rank in ranks for causes in batches_of_rank]
    # An earlier cause explains the later ones, on whichever rank and in whichever batch it occurs.
    for causes in zip(*all_causes, strict=True):
        for cause in causes:
            if cause is not None:
                return _message(step, cause)
    return _message(step, "the loss itself")


def _causes(model: nn.Module, images: Tensor) -> list[str | None]:
    """The possible causes in a batch of this rank, in the order of the computation; None for each
    cause whose values are all finite."""
    bad_images = bad_parameter = bad_layer = bad_gradient = None
    if not torch.isfinite(images).all():
        bad_images = "the input images"
    for name, parameter in model.named_parameters():
        if bad_parameter is None and not torch.isfinite(parameter).all():
            bad_parameter = f"the parameter {name}"
        gradient = parameter.grad
        if gradient is not None and not torch.isfinite(gradient).all():
            # the backward pass goes through the network in reverse order
            bad_gradient = f"the gradient of {name}"
    layer = first_non_finite_layer(model, images)
    if layer is not None:
        bad_layer = f"the output of layer {layer}"
    return [bad_images, bad_parameter, bad_layer, bad_gradient]


def _message(step: int, cause: str) -> str:
    return (
        f"step {step}: the loss or its gradient is not finite (NaN or infinite); it begins at"
        f" {cause}"
    )
