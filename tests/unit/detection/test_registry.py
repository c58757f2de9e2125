"""What detection settles for the libraries that it uses."""

import subprocess
import sys

import pytest

pytest.importorskip("mmdet")

DECODE = """
import io
import swinv2_moe.detection
from mmdet.registry import MODELS
assert MODELS.get("SwinV2MoE") and MODELS.get("MoEMaskRCNN")
import cv2, numpy, PIL.Image
for side in (100, 11_000):
    file = io.BytesIO()
    PIL.Image.new("L", (side, side)).save(file, "PNG")
    try:
        print(cv2.imdecode(numpy.frombuffer(file.getvalue(), numpy.uint8), 1).shape)
    except cv2.error:
        print("refused")
"""


@pytest.mark.timeout(300)
def test_opencv_decodes_no_more_pixels_than_the_rest_of_this_package():
    done = subprocess.run(
        [sys.executable, "-c", DECODE], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["(100, 100, 3)", "refused"]
