"""The auxiliary loss among the losses of each detector, and the images' sizes on their way to the
backbone."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

import mmdet
from detection_cases import TINY_BACKBONE, make_data, tiny_config
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData

from moe_core import moe_layers
from moe_core.ops.native import instruction_sets
from swinv2_moe.detection import run
from swinv2_moe.detection.detectors import MoEDetector


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("shapes") / "data")


def batch_of(config, part: str = "train_dataloader") -> dict:
    torch.manual_seed(0)
    config[part].sampler.shuffle = False
    return next(iter(Runner.build_dataloader(config[part], seed=0)))


@pytest.mark.parametrize("detector", ["mask_rcnn", "cascade_mask_rcnn", "htc"])
def test_in_the_losses_and_a_step_in_bfloat16(data, tmp_path, detector, monkeypatch):
    monkeypatch.setattr(instruction_sets, "cpu_words", frozenset)  # bfloat16 on any CPU
    config = tiny_config(data, tmp_path, detector, optim_wrapper__dtype="bfloat16")
    model = run.build_detector(config).train()
    inputs = model.data_preprocessor(batch_of(config), training=True)
    losses = model(**inputs, mode="loss")
    assert losses["loss_moe"].requires_grad
    total, logged = model.parse_losses(losses)
    loss_moe = losses["loss_moe"].detach()
    assert loss_moe > 0
    others = sum(v for k, v in logged.items() if "loss" in k and k not in ("loss", "loss_moe"))
    # fp32: a sum of at most 30 positive numbers is wrong by less than 30 x 6e-8
    assert float(total.detach()) == pytest.approx(float(others + loss_moe), rel=1e-5)

    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with wrapper.optim_context(model):
        losses = model(**inputs, mode="loss")
    wrapper.update_params(model.parse_losses(losses)[0])
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {"backbone.trunk.patch_embed.proj.weight", "neck.fpn_convs.0.conv.weight"} <= moved


def test_the_backbone_hears_each_image_size(data, tmp_path, monkeypatch):
    config = tiny_config(data, tmp_path)
    model = run.build_detector(config)
    heard, forward = [], type(model.backbone).forward

    def listen(self, images):
        heard.append((self._image_sizes, images.shape))
        return forward(self, images)

    monkeypatch.setattr(type(model.backbone), "forward", listen)
    for mode, part in (("loss", "train_dataloader"), ("predict", "val_dataloader")):
        is_loss = mode == "loss"
        inputs = model.train(is_loss).data_preprocessor(batch_of(config, part), training=is_loss)
        with torch.set_grad_enabled(is_loss):
            model(**inputs, mode=mode)
        sizes, shape = heard.pop()
        assert heard == []
        assert sizes == [sample.img_shape for sample in inputs["data_samples"]]
        assert any(size != tuple(shape[2:]) for size in sizes)
        assert model.backbone._image_sizes is None


# mmdetection's own configurations, by detector
STOCK = {
    "RetinaNet": "retinanet/retinanet_r50_fpn_1x_coco",
    "FasterRCNN": "faster_rcnn/faster-rcnn_r50_fpn_1x_coco",
    "DeformableDETR": "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
    "YOLOX": "yolox/yolox_s_8xb8-300e_coco",
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("FasterRCNN", "DeformableDETR")]


def stock(name: str, **backbone) -> torch.nn.Module:
    """A detector of mmdetection with a tiny SwinV2MoE as backbone, in training mode."""
    init_default_scope("mmdet")
    config = Config.fromfile(Path(mmdet.__file__).parent / f".mim/configs/{STOCK[name]}.py").model
    stages = (1, 2, 3) if name in ("DeformableDETR", "YOLOX") else (0, 1, 2, 3)
    config.backbone = {"type": "SwinV2MoE", "out_indices": stages} | TINY_BACKBONE | backbone
    config.neck.in_channels = [TINY_BACKBONE["embed_dim"] * 2**stage for stage in stages]
    config.pop("data_preprocessor")
    torch.manual_seed(0)
    detector = MODELS.build(config)
    detector.init_weights()  # DeformableDETR's level_embed is uninitialised memory until then
    return detector.train()


def two_images() -> dict:
    """A batch of 64 x 96 px with images of two sizes and an object in each."""
    samples = []
    for size in ((64, 72), (48, 96)):
        meta = {"img_shape": size, "batch_input_shape": (64, 96), "pad_shape": (64, 96)}
        objects = InstanceData(bboxes=torch.tensor([[4.0, 4, 40, 40]]), labels=torch.tensor([1]))
        sample = DetDataSample(metainfo=meta, gt_instances=objects)
        sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0))
        samples.append(sample)
    generator = torch.Generator().manual_seed(0)
    return {"inputs": torch.randn(2, 3, 64, 96, generator=generator), "data_samples": samples}


@pytest.mark.parametrize("name", ["RetinaNet", "YOLOX", *SLOW])
def test_a_stock_detector_has_the_loss_and_the_sizes(name):
    detector, maps = stock(name), []
    detector.backbone.register_forward_hook(lambda module, args, result: maps.extend(result))
    losses = detector(**two_images(), mode="loss")
    detector.parse_losses(losses)[0].backward()
    assert losses["loss_moe"] > 0
    routers = [layer.router for layer in moe_layers(detector).values()]
    assert all(p.grad.any() for router in routers for p in router.parameters())
    height = 48 * maps[0].shape[2] // 64  # of the second image
    assert maps[0][1, :, :height].any()
    assert not maps[0][1, :, height:].any()  # padding


def test_not_where_layers_are_frozen():
    losses = stock("RetinaNet", freeze_moe=True)(**two_images(), mode="loss")
    assert "loss_cls" in losses
    assert "loss_moe" not in losses


def test_outside_of_a_loss_the_balance_is_attached():
    """With a loss of the caller's own on the maps; and after a forward pass that failed."""
    detector, batch = stock("RetinaNet"), two_images()
    detector.add_module("backbone", detector.backbone)  # again, as mmengine's runner does
    samples = [DetDataSample(metainfo=sample.metainfo) for sample in batch["data_samples"]]
    with pytest.raises(AttributeError, match="gt_instances"):
        detector(batch["inputs"], samples, mode="loss")
    assert detector.backbone._image_sizes is None
    copied = deepcopy(detector)
    maps, _ = copied(**batch, mode="tensor")
    sum(0 * x.sum() for x in maps).backward()
    for layer in moe_layers(copied.backbone).values():
        assert any(p.grad.any() for p in layer.router.parameters())
    assert "loss_moe" in copied(**batch, mode="loss")


def test_the_mixin_runs_a_stock_detector_in_bfloat16():
    detector = stock("FasterRCNN")
    detector.__class__ = type("MoEFasterRCNN", (MoEDetector, type(detector)), {})
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector(**two_images(), mode="loss")
    detector.parse_losses(losses)[0].backward()
    assert losses["loss_moe"].dtype == losses["loss_cls"].dtype == torch.float32
