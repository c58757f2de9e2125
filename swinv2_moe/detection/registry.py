"""Registers everything here that a detection config can name; `custom_imports` of the configs
imports it."""

import os

from swinv2_moe.data.images import MAX_PIXELS
from swinv2_moe.errors import UserError

# OpenCV, by which mmcv decodes images, allows a thousand million pixels. It reads this where it is
# first imported.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

try:
    import mmcv.ops
    import mmdet

    from swinv2_moe.detection import backbone, detectors, optim, runner, store
except ImportError as error:
    raise UserError(
        "detection needs mmdetection and mmcv with its compiled operators; `make detection`"
        f" installs them ({error})"
    ) from error

__all__ = ["backbone", "detectors", "mmcv", "mmdet", "optim", "runner", "store"]
