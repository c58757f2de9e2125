"""The teacher of a distilled run: a trained model, its input and its classes.

TRAIN.DISTILL.TEACHER names a model of timm, a file for one, a run, a checkpoint or a single file of
ours, a model of this package, or the weights in the package of the extra `teacher`.
"""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models import get_pretrained_cfg
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from swinv2_moe.checkpoints.checkpoint import trained_windows
from swinv2_moe.checkpoints.deployed import open_alone
from swinv2_moe.data.build import relabel
from swinv2_moe.data.classes import imagenet_names, match_all
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import Sources
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.models.bundled import PACKAGED, located
from swinv2_moe.models.hub import (
    NO_CONFIG,
    description,
    fetch_weights,
    is_hub_name,
    label_names,
    local_file,
    read_timm_config,
    timm_config,
)
from swinv2_moe.models.packaged import PACKAGED_AS, packaged_weights
from swinv2_moe.models.section import TRUNKS
from swinv2_moe.models.weight_files import read_weights
from swinv2_moe.models.weights import larger_than
from swinv2_moe.ranks.world import World

_KEY = "TRAIN.DISTILL.TEACHER"
_WINDOWS = "pretrained_window_sizes"
_MAX_REASON = 300  # characters of another library's message


@dataclass(frozen=True)
class Teacher:
    """A trained model in evaluation mode on this rank's device.

    Attributes:
        name: the value of TRAIN.DISTILL.TEACHER.
        architecture: what the outputs depend on besides weights and input.
        weights: SHA-256 of the weights.
        class_names: in the order of its outputs; numbers as text if the names are not known.
        channels, img_size, mean, std, interpolation: of its input, as in `DataConfig`.
    """

    name: str
    architecture: str
    module: nn.Module
    class_names: list[str]
    channels: int
    img_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    weights: str = ""

    def numbers(self, names: list[str]) -> list[int]:
        """The teacher's number of each class of the data. Raises UserError, see `match_all`."""
        return match_all(self.class_names, names, f"{_KEY} {self.name}")

    def relabel(self, sources: Sources) -> Sources:
        """The sources with the teacher's classes. Those of the data keep their names, by which
        later commands find them. Raises UserError, see `match_all`."""
        numbers, names = self.numbers(sources.class_names), list(self.class_names)
        for name, number in zip(sources.class_names, numbers, strict=True):
            names[number] = name
        return relabel(sources, numbers, names)

    def data_config(self, config: DataConfig, batch_size: int) -> DataConfig:
        """The configuration of images that are augmented as for the student, for this input.

        The random numbers are the same: the size of the output does not change them, and random
        erasing, which the student alone has, draws last. A random interpolation stays, because it
        draws, too.
        """
        interpolation = self.interpolation
        if config.interpolation == "random":
            interpolation = "random"
        return replace(
            config,
            channels=self.channels,
            img_size=self.img_size,
            mean=self.mean,
            std=self.std,
            interpolation=interpolation,
            batch_size=batch_size,
            augment=replace(config.augment, reprob=0.0),
        )


def open_teacher(name: str, img_size: int, world: World) -> Teacher | None:
    """The teacher that TRAIN.DISTILL.TEACHER names, on each rank; None for "". Collective.

    Args:
        img_size: TRAIN.DISTILL.IMG_SIZE.

    Raises:
        UserError: on every rank, if the teacher cannot be used on any of them.
    """
    if not name:
        return None
    teacher = world.on_every_rank(lambda: _open(name, img_size, world.device), is_hub_name(name))
    for rank, weights in enumerate(world.gather(teacher.weights)):
        if weights != teacher.weights:
            raise UserError(
                f"{_KEY} {name}: ranks {world.rank} and {rank} read different weights; name a"
                " file or a run that does not change"
            )
    world.on_every_rank(lambda: _try(teacher, world.device))
    return teacher


def _open(name: str, img_size: int, device: torch.device) -> Teacher:
    if name == PACKAGED:
        weights = packaged_weights(_KEY)
        teacher = _timm(name, img_size, {"architecture": PACKAGED_AS}, weights)
    elif name.startswith("timm:") and "@" in name:
        teacher = _timm_with_file(name, img_size)
    elif is_hub_name(name):
        file = fetch_weights(name, _KEY)
        content = timm_config(name)
        if content is None:
            raise UserError(f"{_KEY} {name}: {NO_CONFIG}; nothing else says which model it is")
        teacher = _timm(name, img_size, content, read_weights(file))
    else:
        path = Path(located(name)).expanduser()
        is_single = path.is_file() and path.suffix == ".safetensors"
        if not path.is_dir() and not is_single:
            raise UserError(
                f"{_KEY} is {name!r}: no such directory; other teachers: timm:NAME,"
                f" timm:NAME@FILE, hf-hub:OWNER/NAME, bundled:NAME, {PACKAGED}"
            )
        if not is_single and local_file(str(path)) != str(path):
            content = read_timm_config(path / "config.json")
            teacher = _timm(name, img_size, content, read_weights(Path(local_file(str(path)))))
        else:
            teacher = _run(name, img_size, path, device)
    if teacher.channels not in (1, 3):
        raise UserError(f"{_KEY} {name}: its input has {teacher.channels} channels, not 1 or 3")
    module = teacher.module.to(device).eval().requires_grad_(False)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's types
    shape = (2, teacher.channels, teacher.img_size, teacher.img_size)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))  # the same on each rank
    return replace(teacher, module=fused(module, noise.to(device)), weights=_checksum(module))


def _checksum(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@torch.no_grad()
def fused(module: nn.Module, images: Tensor) -> nn.Module:
    """The module with each batch norm folded into the convolution before it: a third faster.

    A norm belongs to the convolution that is defined before it. That is not known to hold for every
    model, so the outputs for `images` are compared; if they differ, the module stays as it is.
    """
    try:
        expected = module(images)
        faster = copy.deepcopy(module)
        _fuse(faster)
        if torch.allclose(faster(images), expected, rtol=1e-3, atol=1e-3):
            return faster
    except Exception:  # models raise any type; what cannot be used is told by `_try`
        pass
    return module


def _fuse(module: nn.Module) -> None:
    before: tuple[str, nn.Module] = ("", module)
    for name, child in list(module.named_children()):
        _fuse(child)
        convolution = before[1]
        if isinstance(convolution, nn.Conv2d) and isinstance(child, nn.BatchNorm2d):
            setattr(module, before[0], fuse_conv_bn_eval(convolution, child))
            # timm's norms have an activation
            after = [child.get_submodule(part) for part in ("drop", "act") if hasattr(child, part)]
            setattr(module, name, nn.Sequential(*after))
        before = (name, child)


def _timm_with_file(name: str, img_size: int) -> Teacher:
    architecture, _, file = name.removeprefix("timm:").partition("@")
    if not timm.is_model(architecture):
        raise UserError(
            f"{_KEY} is {name!r}: timm {timm.__version__} has no model {architecture!r}"
        )
    path = Path(file).expanduser()
    content = read_timm_config(path.parent / "config.json")
    if content.get("architecture") != architecture.partition(".")[0]:
        content = {}  # of another model
    return _timm(name, img_size, {**content, "architecture": architecture}, read_weights(path))


def _timm(name: str, img_size: int, content: Mapping, state: dict[str, Tensor]) -> Teacher:
    """A model of timm with these weights.

    Args:
        img_size: of its input; 0: its own.
        content: a config.json in timm's form, of which only "architecture" must be there.
    """
    where = f"{_KEY} {name}"
    architecture = content.get("architecture")
    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise UserError(f"{where}: timm {timm.__version__} has no model {architecture!r}")
    known = get_pretrained_cfg(architecture)
    described = dict(known.to_dict() if known else {}) | dict(description(content))
    expected: dict[str, Any] = {name: one for name, one in described.items() if one is not None}
    arguments = dict(content.get("model_args") or {})
    num_classes = _count_classes(described, state)
    channels, native, _ = expected.get("input_size", (3, 224, 224))
    size = img_size or native
    if size != native and described.get("fixed_input_size"):
        arguments["img_size"] = size
    _check_size(architecture, arguments | {"num_classes": num_classes}, state, where)
    overlay = {"state_dict": state, "num_classes": num_classes, "custom_load": False}
    try:
        module = timm.create_model(
            architecture,
            pretrained=True,
            num_classes=num_classes,
            pretrained_cfg=described | overlay,
            **arguments,
        )
    except Exception as error:  # timm and its models raise any type for weights that do not fit
        reason = one_line(str(error))[:_MAX_REASON]
        raise UserError(f"{where}: its weights do not fit {architecture} ({reason})") from error
    names = label_names(content) or imagenet_names(num_classes)
    if len(names) != num_classes:
        raise UserError(f"{where}: has {num_classes:,} classes and {len(names):,} class names")
    return Teacher(
        name,
        f"{architecture} {arguments or ''}".rstrip(),
        module,
        names,
        channels,
        size,
        tuple(expected.get("mean", (0.485, 0.456, 0.406))),
        tuple(expected.get("std", (0.229, 0.224, 0.225))),
        expected.get("interpolation", "bicubic"),
    )


def _check_size(
    architecture: str, arguments: dict[str, Any], state: dict[str, Tensor], where: str
) -> None:
    """Raise UserError for a model that is far larger than its weights, before it is built."""
    problem = larger_than(state, arguments, "model_args: ")
    if not problem:
        try:
            with torch.device("meta"):
                module = timm.create_model(architecture, **arguments)
        except Exception:  # the model itself says what is wrong; some cannot be on this device
            return
        here, there = (
            sum(tensor.numel() for tensor in each) for each in (module.parameters(), state.values())
        )
        if here > 2 * there:  # timm may resize positions
            problem = f"the model has {here:,} numbers, its weights have {there:,}"
    if problem:
        raise UserError(f"{where}: its weights do not fit {architecture} ({problem})")


def _count_classes(described: Mapping, state: Mapping[str, Tensor]) -> int:
    """The number of classes: rows of the classifier, whose name timm's description has."""
    classifier = described.get("classifier")
    if isinstance(classifier, (list, tuple)):
        classifier = classifier[0]
    head = state.get(f"{classifier}.weight")
    if head is not None:
        return len(head)
    return int(described.get("num_classes", 1000))


def _run(name: str, img_size: int, path: Path, device: torch.device) -> Teacher:
    """The best checkpoint of a run of ours, or a single file. No token is dropped."""
    opts = ["MODEL.MOE.EVAL_CAPACITY_FACTOR", "0.0"]
    deployed = open_alone(str(path), device, opts, _KEY)
    if img_size not in (0, deployed.data.img_size):
        opts += ["DATA.IMG_SIZE", str(img_size)]
        windows, trunk = trained_windows(deployed.source), TRUNKS[deployed.model_config.type]
        if windows and not any(getattr(deployed.model_config.trunk, _WINDOWS, [1])):
            opts += [f"MODEL.{trunk.group}.{_WINDOWS.upper()}", str(windows)]
        deployed = open_alone(str(path), device, opts, _KEY)
    names, data = deployed.class_names(), deployed.data
    return Teacher(
        name,
        str(deployed.model_config),
        deployed.model(len(names)),
        names,
        data.channels,
        data.img_size,
        data.mean,
        data.std,
        data.interpolation,
    )


@torch.inference_mode()
def _try(teacher: Teacher, device: torch.device) -> None:
    """Raise UserError unless the teacher computes an output of each class for its input."""
    side = teacher.img_size
    where = f"{_KEY} {teacher.name}"
    try:
        output = teacher.module(torch.zeros(1, teacher.channels, side, side, device=device))
    except Exception as error:  # models raise any type for a size that they cannot take
        reason = one_line(str(error))[:_MAX_REASON]
        raise UserError(
            f"{where}: does not take images of {side} pixels, see TRAIN.DISTILL.IMG_SIZE ({reason})"
        ) from error
    if not isinstance(output, Tensor) or output.shape != (1, len(teacher.class_names)):
        shape = list(getattr(output, "shape", []))
        raise UserError(
            f"{where}: its output has the shape {shape}, not a number for each of"
            f" {len(teacher.class_names):,} classes"
        )
    if not output.isfinite().all():
        raise UserError(f"{where}: its output is not finite")


def distillation_loss(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student), the mean over the images.

    T^2 keeps the size of the gradients as T changes. Source: arXiv 1503.02531, section 2.1.

    Args:
        logits, taught: of the student and of the teacher, float32 [B, C].
        temperature: T, by which both are divided before the softmax.
    """
    student = F.log_softmax(logits / temperature, dim=1)
    teacher = F.log_softmax(taught / temperature, dim=1)
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return temperature**2 * divergence
