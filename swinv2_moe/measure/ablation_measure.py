"""Measurements of an ablation on a trained model: mutual information of expert and class, router
gradients, speed.

B images of a batch
"""

import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import equal_tokens, moe_layers, prepared
from swinv2_moe.data import IGNORE, Batch, evaluation_loader
from swinv2_moe.data.sources import Subset, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.measure.routing import DROPLESS, class_bits
from swinv2_moe.models import MoEModel
from swinv2_moe.train.deployed import Deployed, open_deployed
from swinv2_moe.train.distributed import seed_everything
from swinv2_moe.train.routing import spread

_GRADIENT_BATCHES = 4
_SPEED_ROUNDS = 9


def measure_run(directory: Path, limit: int, speed: bool) -> dict:
    """Measure the newest checkpoint of a run on the data that it was trained on.

    Args:
        limit: number of validation images for the routing, evenly spaced.
        speed: also measure images/s in inference.

    Returns:
        JSON values: `images`, the limit; `class_bits`, the mutual information in bits of expert and
        class above chance (mean over the layers), and what `router_gradients` returns, each None
        for a dense model; `inference_images_per_second`, None without `speed`.

    Raises:
        UserError: a run or data that cannot be used.
    """
    results: dict = {
        "images": limit,
        "class_bits": None,
        "router_to_experts": None,
        "router_task_share": None,
        "inference_images_per_second": None,
    }
    with open_deployed(str(directory), opts=DROPLESS) as deployed:
        sources, other_classes = deployed.aligned(load_sources(deployed.data))
        if other_classes:
            raise UserError(f"{directory}: its data has other classes now: {other_classes}")
        model = deployed.model(num_classes=len(sources.class_names))
        if moe_layers(model):
            val = Subset(sources.val, spread(len(sources.val), limit))
            results["class_bits"] = class_bits(model, val, deployed, len(sources.class_names))
            count = _GRADIENT_BATCHES * deployed.data.batch_size
            train = Subset(sources.train, spread(len(sources.train), count))
            batches = evaluation_loader(deployed.data, train)
            results |= router_gradients(model, batches, deployed)
    if speed:
        with open_deployed(str(directory)) as deployed:
            model = deployed.model(num_classes=len(sources.class_names))
            results["inference_images_per_second"] = _inference_speed(model, deployed)
    return results


def router_gradients(model: MoEModel, batches: Iterable[Batch], deployed: Deployed) -> dict:
    """The share of the gradient that reaches the routers, in training mode (with gate noise).

    For each batch and MoE layer, g_task(P) is the L2 norm of the gradient of the cross-entropy with
    respect to the parameters P, and g_aux(P) is the norm of the gradient of the weighted auxiliary
    loss. Images are not augmented. Unreadable images are omitted.

    Returns:
        `router_to_experts`: the mean over layers and batches of g_task(router) / g_task(experts).
        `router_task_share`: the mean of g_task(router) / (g_task(router) + g_aux(router)), which is
        1 without an auxiliary loss. A value without gradients is None.
    """
    device = deployed.world.device
    weight = deployed.config.train.aux_loss_weight
    to_experts, task_shares = [], []
    model.train()
    for number, (images, targets, _) in enumerate(batches):
        is_readable = targets != IGNORE
        if not is_readable.any():
            continue
        images, targets = images[is_readable], targets[is_readable]
        seed_everything(0, number)
        with deployed.autocast(), equal_tokens(model):
            logits, aux_loss = model.forward_with_aux(images.to(device))
        task_loss = F.cross_entropy(logits.float(), targets.to(device))
        for layer in moe_layers(model).values():
            router = list(layer.router.parameters())
            task = gradient_norm(task_loss, router)
            experts = gradient_norm(task_loss, list(layer.experts.parameters()))
            aux = gradient_norm(weight * aux_loss, router)
            if experts > 0:
                to_experts.append(task / experts)
            if task + aux > 0:
                task_shares.append(task / (task + aux))
    model.eval()
    return {"router_to_experts": _mean(to_experts), "router_task_share": _mean(task_shares)}


def gradient_norm(loss: Tensor, parameters: list[nn.Parameter]) -> float:
    """L2 norm of the gradient of a scalar; 0 if the scalar does not depend on the parameters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not loss.requires_grad:
        return 0.0
    gradients = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
    squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
    if not squares:
        return 0.0
    return torch.stack(squares).sum().sqrt().item()


def _mean(values: list[float]) -> float | None:
    if not values:
        return None
    return mean(values)


@torch.inference_mode()
def _inference_speed(model: MoEModel, deployed: Deployed) -> float:
    """Images/s for batches of random images that are already on the device: the median over
    rounds."""
    data, device = deployed.data, deployed.world.device
    shape = (data.batch_size, data.in_chans, data.img_size, data.img_size)
    images = torch.randn(shape, device=device)
    seconds = []
    with prepared(model), deployed.autocast():
        for _ in range(_SPEED_ROUNDS + 1):  # the first is a warm-up
            started = time.perf_counter()
            model(images).sum().item()  # waits for the device
            seconds.append(time.perf_counter() - started)
    return len(images) / median(seconds[1:])
