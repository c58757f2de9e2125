"""mmdetection's detectors on a SwinV2MoE backbone.

Any detector whose backbone is a SwinV2MoE passes the sizes of its images to the backbone, so that
attention and routing ignore padding, and has `loss_moe`, the weighted auxiliary loss, among its
losses. `MoEDetector` adds autocast of the backbone and neck alone.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from mmdet.models import GFL, CascadeRCNN, HybridTaskCascade, MaskRCNN
from mmdet.registry import MODELS
from mmengine.model import BaseModel
from mmengine.structures import BaseDataElement
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from swinv2_moe.detection.backbone import SwinV2MoE
from swinv2_moe.models import separate_aux_loss
from swinv2_moe.models.padding import Size


def _add_hooks(detector: nn.Module, name: str, backbone: nn.Module | None) -> None:
    """Called when a module gets a submodule. mmengine's models have `forward(inputs, data_samples,
    mode)`."""
    if isinstance(backbone, SwinV2MoE) and isinstance(detector, BaseModel):
        names = detector.__dict__.setdefault("moe_backbones", set())
        if name in names:  # mmengine registers submodules again when it reverts SyncBatchNorm
            return
        names.add(name)
        detector.register_forward_pre_hook(partial(_before_forward, name), with_kwargs=True)
        after = partial(_after_forward, name)
        detector.register_forward_hook(after, with_kwargs=True, always_call=True)


register_module_module_registration_hook(_add_hooks)


def _before_forward(name: str, detector: BaseModel, args: tuple, kwargs: dict) -> None:
    samples, mode = _arguments(*args, **kwargs)
    backbone, call = getattr(detector, name), ExitStack()
    call.enter_context(backbone.images_of(_sizes(samples)))
    if mode == "loss":
        call.enter_context(separate_aux_loss(backbone))
    backbone.detector_call = call


def _after_forward(
    name: str, detector: BaseModel, args: tuple, kwargs: dict, results: object
) -> None:
    """Also called after an exception, with None as results."""
    backbone, mode = getattr(detector, name), _arguments(*args, **kwargs)[1]
    backbone.detector_call.close()
    del backbone.detector_call
    aux_loss = backbone.aux_loss()
    if mode == "loss" and isinstance(results, dict) and aux_loss is not None:
        results["loss_moe"] = aux_loss


def _arguments(inputs=None, data_samples=None, mode: str = "tensor", **others) -> tuple:
    return data_samples, mode


def _sizes(samples: object) -> list[Size] | None:
    """Height and width of each image, where mmengine's samples of a batch have them."""
    if not isinstance(samples, (list, tuple)):
        return None
    if not all(isinstance(sample, BaseDataElement) and "img_shape" in sample for sample in samples):
        return None
    return [sample.img_shape[:2] for sample in samples]


class MoEDetector:
    """Mixin of a detector in bfloat16: only backbone and neck use the caller's autocast.

    mmcv's RoIAlign and NMS do not support bfloat16. The mixin comes before the detector's class:

        @MODELS.register_module()
        class MoERetinaNet(MoEDetector, RetinaNet):
            pass
    """

    _autocast: AbstractContextManager = nullcontext()  # the caller's, in the current forward pass

    def forward(self, inputs, data_samples=None, mode: str = "tensor"):
        place = inputs.device.type
        self._autocast = torch.autocast(
            place, torch.get_autocast_dtype(place), torch.is_autocast_enabled(place)
        )
        detector: Any = super()
        with torch.autocast(place, enabled=False):
            return detector.forward(inputs, data_samples, mode)

    def extract_feat(self, batch_inputs):
        detector: Any = super()
        with self._autocast:
            maps = detector.extract_feat(batch_inputs)
        return tuple(x.float() for x in maps)


@MODELS.register_module()
class MoEMaskRCNN(MoEDetector, MaskRCNN):
    """Mask R-CNN, arXiv 1703.06870."""


@MODELS.register_module()
class MoECascadeRCNN(MoEDetector, CascadeRCNN):
    """Cascade (Mask) R-CNN, arXiv 1712.00726 and 1906.09756."""


@MODELS.register_module()
class MoEHybridTaskCascade(MoEDetector, HybridTaskCascade):
    """HTC, arXiv 1901.07518."""


@MODELS.register_module()
class MoEGFL(MoEDetector, GFL):
    """GFL, arXiv 2006.04388. Its boxes end at the picture's edges, not at those of the canvas.

    Before training, a box reaches 2.7 strides from its point to each side. GFL's own 8 strides
    overlap small objects so little that these hardly count as found.
    """

    def init_weights(self):
        super().init_weights()
        head = self.bbox_head
        with torch.no_grad():
            head.gfl_reg.bias.copy_(-0.3 * torch.arange(head.reg_max + 1.0).repeat(4))

    def predict(self, *args, **kwargs):
        samples = super().predict(*args, **kwargs)
        for sample in samples:
            height, width = sample.ori_shape
            boxes = sample.pred_instances.bboxes
            boxes.copy_(boxes.clamp(min=0).minimum(boxes.new_tensor([width, height] * 2)))
        return samples
