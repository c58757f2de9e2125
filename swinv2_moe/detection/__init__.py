"""COCO detection with mmdetection.

Importing this package registers its names with mmdetection, so that a configuration of mmdetection
needs `custom_imports = dict(imports=["swinv2_moe.detection"])`. Without mmdetection, the modules
that need it raise UserError when they are imported.
"""

from contextlib import suppress
from importlib.util import find_spec

from swinv2_moe.errors import UserError

if find_spec("mmdet") is not None:
    with suppress(UserError):  # the other modules work without mmdetection's operators
        from swinv2_moe.detection import registry  # noqa: F401
