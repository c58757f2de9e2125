"""configs/detection: every file builds the detector that its head describes; none is forgotten
here."""

import re
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("mmdet")

import mmengine.config.utils
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope

from moe_core import moe_layers
from swinv2_moe.detection import registry  # noqa: F401 the names that configurations use

CONFIGS = Path(__file__).parents[3] / "configs/detection"
FILES = sorted(
    file.relative_to(CONFIGS) for file in CONFIGS.rglob("*.py") if file.parent.name != "_base_"
)
COCO = [file for file in FILES if file.stem.startswith(("small_", "base_"))]
KINDS = {
    "mask_rcnn": "MoEMaskRCNN",
    "cascade_mask_rcnn": "MoECascadeRCNN",
    "htc": "MoEHybridTaskCascade",
}
# Millions, with a classifier for ImageNet-22K (arXiv 2206.03382)
PARAMETERS = {
    "small_dense": 65.8,
    "small_moe_frozen": 173.3,
    "base_dense": 109.3,
    "base_moe_frozen": 955.3,
}


@pytest.fixture(autouse=True, scope="module")
def quick_reading():
    """mmengine reads a hundred files of mmdetection's again for each `mmdet::` in a
    configuration."""
    with pytest.MonkeyPatch.context() as patch:
        read_metainfo = cache(mmengine.config.utils._get_cfg_metainfo)
        patch.setattr(mmengine.config.utils, "_get_cfg_metainfo", read_metainfo)
        yield


@cache
def read(file: Path) -> Config:
    return Config.fromfile(CONFIGS / file)


def test_every_detector_has_every_kind() -> None:
    kinds = ("dense", "moe_frozen", "moe_tuned")
    kinds = {f"{size}_{kind}" for size in ("small", "base") for kind in kinds}
    for detector in KINDS:
        assert {file.stem for file in FILES if file.parent.name == detector} == kinds
    assert {file.stem for file in FILES if file.parent.name == "shapes"} == set(KINDS)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_is_what_it_says(file: Path) -> None:
    config = read(file)
    detector = file.parent.name if file in COCO else file.stem
    assert config.model.type == KINDS[detector]
    assert config.runner_type == "MoERunner"
    assert config.val_evaluator.type == config.test_evaluator.type == "FasterCocoMetric"
    text = (CONFIGS / file).read_text()
    command = f"detect train detection/{file.with_suffix('')} "
    assert command in text.replace("\\\n#       ", "").replace("\n", " ")
    assert re.search("^# Hardware: ", text, re.MULTILINE)
    assert re.search("^# Published", text, re.MULTILINE) or file not in COCO
    assert re.search("^# Measured", text, re.MULTILINE)
    backbone = config.model.backbone
    channels = [backbone.embed_dim * 2**stage for stage in range(4)]
    assert list(config.model.neck.in_channels) == channels
    if file in COCO:
        size, *kind = file.stem.split("_")
        assert backbone.embed_dim == {"small": 96, "base": 128}[size]
        assert backbone.num_experts == (0 if kind == ["dense"] else {"small": 8, "base": 32}[size])
        assert backbone.get("freeze_moe", False) == (kind[-1] == "frozen")
        assert config.train_dataloader.batch_size * 8 == config.auto_scale_lr.base_batch_size == 16


@pytest.mark.parametrize("stem", sorted(PARAMETERS))
def test_has_the_published_parameters(stem: str) -> None:
    """On the meta device: the largest has 4 GB of weights."""
    backbone = build(Path(f"cascade_mask_rcnn/{stem}.py"), "backbone")
    millions = sum(parameter.numel() for parameter in backbone.parameters()) / 1e6
    classifier = 21841 * (backbone.norms[-1].normalized_shape[0] + 1) / 1e6
    assert millions + classifier == pytest.approx(PARAMETERS[stem], rel=0.003)


@pytest.mark.parametrize("file", ["htc/small_dense.py", "cascade_mask_rcnn/small_moe_frozen.py"])
def test_builds(file: str) -> None:
    build(Path(file))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_builds(file: Path) -> None:
    build(file)


def build(file: Path, part: str | None = None) -> torch.nn.Module:
    config = read(file)
    init_default_scope("mmdet")
    with torch.device("meta"):
        model = MODELS.build(config.model[part] if part else config.model)
    assert bool(moe_layers(model)) == (config.model.backbone.num_experts > 0)
    return model


def test_the_published_recipe() -> None:
    """Swin's for COCO: arXiv 2103.14030, section 4.2."""
    config = read(Path("cascade_mask_rcnn/base_moe_frozen.py"))
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-4, 0.05)
    assert config.train_cfg.max_epochs == 36
    assert config.param_scheduler[1].milestones == [27, 33]
    whole, cropped = config.train_pipeline[3].transforms
    assert list(whole[0].scales) == [(side, 1333) for side in range(480, 801, 32)]
    assert [side for side, _ in cropped[2].scales] == [*range(480, 801, 32)]
    assert [head.num_classes for head in config.model.roi_head.bbox_head] == [80] * 3
    assert {head.type for head in config.model.roi_head.bbox_head} == {"ConvFCBBoxHead"}
