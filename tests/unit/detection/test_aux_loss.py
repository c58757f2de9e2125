"""The auxiliary loss among the losses of each detector, and the images' sizes on their way to the
backbone."""

import pytest
import torch

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import make_data, tiny_config
from mmengine.optim import build_optim_wrapper
from mmengine.runner import Runner

from swinv2_moe.detection import run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("shapes") / "data")


def batch_of(config, part: str = "train_dataloader") -> dict:
    torch.manual_seed(0)
    config[part].sampler.shuffle = False
    return next(iter(Runner.build_dataloader(config[part], seed=0)))


@pytest.mark.parametrize("detector", ["mask_rcnn", "cascade_mask_rcnn", "htc"])
def test_in_the_losses(data, tmp_path, detector):
    config = tiny_config(data, tmp_path, detector)
    model = run.build_detector(config).train()
    inputs = model.data_preprocessor(batch_of(config), training=True)
    losses = model(**inputs, mode="loss")
    assert losses["loss_moe"].requires_grad
    total, logged = model.parse_losses(losses)
    loss_moe = losses["loss_moe"].detach()
    assert loss_moe > 0
    others = sum(v for k, v in logged.items() if "loss" in k and k not in ("loss", "loss_moe"))
    assert float(total.detach()) == pytest.approx(float(others + loss_moe), rel=1e-5)


@pytest.mark.parametrize("detector", ["mask_rcnn", "cascade_mask_rcnn", "htc"])
def test_a_step_in_bfloat16(data, tmp_path, detector):
    config = tiny_config(data, tmp_path, detector, optim_wrapper__dtype="bfloat16")
    model = run.build_detector(config).train()
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with wrapper.optim_context(model):
        losses = model(**model.data_preprocessor(batch_of(config), training=True), mode="loss")
    wrapper.update_params(model.parse_losses(losses)[0])
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {"backbone.trunk.patch_embed.proj.weight", "neck.fpn_convs.0.conv.weight"} <= moved


def test_not_where_layers_are_frozen(data, tmp_path):
    config = tiny_config(data, tmp_path, backbone={"freeze_moe": True})
    model = run.build_detector(config).train()
    losses = model(**model.data_preprocessor(batch_of(config), training=True), mode="loss")
    assert "loss_moe" not in losses


@pytest.mark.parametrize("mode", ["loss", "predict"])
def test_the_backbone_hears_each_image_size(data, tmp_path, mode, monkeypatch):
    config = tiny_config(data, tmp_path)
    model = run.build_detector(config).train(mode == "loss")
    batch = batch_of(config, "train_dataloader" if mode == "loss" else "val_dataloader")
    inputs = model.data_preprocessor(batch, training=mode == "loss")
    heard, forward = [], type(model.backbone).forward

    def listen(self, images):
        heard.append((self._image_sizes, images.shape))
        return forward(self, images)

    monkeypatch.setattr(type(model.backbone), "forward", listen)
    with torch.set_grad_enabled(mode == "loss"):
        model(**inputs, mode=mode)
    [(sizes, shape)] = heard
    assert sizes == [sample.img_shape for sample in inputs["data_samples"]]
    assert any(size != tuple(shape[2:]) for size in sizes)
    assert model.backbone._image_sizes is None
