"""Register everything that detection configs can name."""

import contextlib
import io
import os

from swinv2_moe.data.images import MAX_PIXELS
from swinv2_moe.errors import UserError

# mmcv decodes images with OpenCV, whose default limit is 10^9 pixels. OpenCV reads this when it is
# first imported.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))

try:
    import mmcv.ops
    import mmdet

    with contextlib.redirect_stdout(io.StringIO()):  # a line about a data format
        import mmdet.datasets

    from swinv2_moe.detection import backbone, detectors, hooks, optim, runner, transforms
except (ImportError, AssertionError) as error:  # mmdet asserts the version of mmcv
    raise UserError(
        "detection needs mmdetection and mmcv with its compiled operators; `make detection`"
        f" installs them ({error})"
    ) from error

__all__ = ["backbone", "detectors", "hooks", "mmcv", "mmdet", "optim", "runner", "transforms"]
