"""Registers everything here that a detection config can name; `custom_imports` of the configs imports it."""

from swinv2_moe.errors import UserError

try:
    import mmcv.ops
    import mmdet

    from swinv2_moe.detection import backbone, detectors, optim, runner, store
except ImportError as error:
    raise UserError(
        f"detection needs mmdetection and mmcv with its compiled operators; `make detection` installs them ({error})"
    ) from error

__all__ = ["backbone", "detectors", "mmcv", "mmdet", "optim", "runner", "store"]
