"""mmdetection's two-stage detectors on a SwinV2MoE backbone."""

from contextlib import AbstractContextManager, nullcontext

import torch
from mmdet.models import CascadeRCNN, HybridTaskCascade, MaskRCNN
from mmdet.registry import MODELS

from swinv2_moe.models import separate_aux_loss


class _OnMoE:
    """Mixin that passes image sizes to the backbone and adds its auxiliary loss as `loss_moe`.

    Only backbone and neck use autocast: mmcv's RoIAlign and NMS do not support bfloat16.
    """

    _autocast: AbstractContextManager = nullcontext()  # the caller's, in the current forward pass

    def forward(self, inputs, data_samples=None, mode: str = "tensor"):
        sizes = None
        if data_samples is not None:
            sizes = [sample.img_shape[:2] for sample in data_samples]
        place = inputs.device.type
        self._autocast = torch.autocast(
            place, torch.get_autocast_dtype(place), torch.is_autocast_enabled(place)
        )
        with (
            self.backbone.images_of(sizes),
            separate_aux_loss(self.backbone),
            torch.autocast(place, enabled=False),
        ):
            results = super().forward(inputs, data_samples, mode)
        aux_loss = self.backbone.aux_loss()
        if mode == "loss" and aux_loss is not None:
            results["loss_moe"] = aux_loss
        return results

    def extract_feat(self, batch_inputs):
        with self._autocast:
            maps = super().extract_feat(batch_inputs)
        return tuple(x.float() for x in maps)


@MODELS.register_module()
class MoEMaskRCNN(_OnMoE, MaskRCNN):
    """Mask R-CNN, arXiv 1703.06870."""


@MODELS.register_module()
class MoECascadeRCNN(_OnMoE, CascadeRCNN):
    """Cascade (Mask) R-CNN, arXiv 1712.00726 and 1906.09756."""


@MODELS.register_module()
class MoEHybridTaskCascade(_OnMoE, HybridTaskCascade):
    """HTC, arXiv 1901.07518."""
