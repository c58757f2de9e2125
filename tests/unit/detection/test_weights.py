"""swinv2_moe.detection.weights: a backbone's weights from what this project trains."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import TINY_BACKBONE, tiny_config
from mmdet.registry import MODELS
from mmengine.logging import MMLogger
from safetensors.torch import save_file

from swinv2_moe.checkpoints.checkpoint import write_weights
from swinv2_moe.config import default_config, merge_opts, model_config
from swinv2_moe.convert.convert import export_weights
from swinv2_moe.detection import run
from swinv2_moe.detection.weights import check_preprocessing
from swinv2_moe.errors import UserError
from swinv2_moe.models import build_model

TRAINED = """DATA.IMG_SIZE 64 MODEL.SWINV2.EMBED_DIM 8 MODEL.SWINV2.DEPTHS [1,1,2,1]
    MODEL.SWINV2.NUM_HEADS [1,1,2,2] MODEL.SWINV2.WINDOW_SIZE 4 MODEL.SWINV2.PATCH_SIZE 4
    MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [0,0,0,0] MODEL.MOE.NUM_EXPERTS 2
    MODEL.MOE.BLOCKS [[],[],[1],[0]]"""
TINY = TINY_BACKBONE | {"pretrained_window_sizes": (0, 0, 0, 0)}


def trained(options: str = ""):
    config = default_config()
    merge_opts(config, f"{TRAINED} {options}".split())
    torch.manual_seed(7)
    return config, build_model(model_config(config), 5)


def write_run(directory: Path, options: str = "") -> tuple[str, torch.nn.Module]:
    config, model = trained(options)
    place, state = directory / "checkpoints" / "step-00000003", model.state_dict()
    write_weights(place, model, state, config.dump(), list("abcde"), step=3)
    return str(directory), model


def backbone(pretrained: str, **kwargs):
    torch.manual_seed(1)
    found = MODELS.build({"type": "SwinV2MoE", "pretrained": pretrained, **TINY, **kwargs})
    found.init_weights()
    return found


def assert_trunk_is(found, model) -> None:
    expected = {n: t for n, t in model.state_dict().items() if not n.startswith(("norm.", "head."))}
    torch.testing.assert_close(dict(found.trunk.state_dict()), expected, rtol=0, atol=0)


def test_from_a_run_a_checkpoint_and_a_file(tmp_path):
    run, model = write_run(tmp_path / "run")
    save_file(model.state_dict(), tmp_path / "single.safetensors")
    for source in (run, f"{run}/checkpoints/step-00000003", str(tmp_path / "single.safetensors")):
        assert_trunk_is(backbone(source), model)

    _, dense = trained("MODEL.MOE.NUM_EXPERTS 0")
    torch.save({"model": dense.state_dict()}, tmp_path / "dense.pth")
    assert_trunk_is(backbone(str(tmp_path / "dense.pth"), num_experts=0), dense)


def test_features_are_those_of_the_trained_model(tmp_path):
    """At the size of pretraining, whose last window was 2 x 2: positions are measured by that."""
    run, model = write_run(tmp_path / "run", "MODEL.MOE.EVAL_CAPACITY_FACTOR 0.0")
    found = backbone(run, eval_capacity_factor=0.0, out_indices=(3,)).eval()
    images = torch.randn(2, 3, 64, 64)
    wanted = model.eval().forward_intermediates(images, intermediates_only=True)[-1]
    shown = found.norms[0](wanted.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(found(images)[0], shown, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"embed_dim": 16}, "embed_dim is 8 there, 16 in the backbone"),
        ({"depths": (1, 1, 3, 1)}, "depths is [1, 1, 2, 1] there, [1, 1, 3, 1] in the backbone"),
        ({"num_experts": 4}, "num_experts is 2 there, 4 in the backbone"),
        ({"num_experts": 0}, "num_experts is 2 there, 0 in the backbone"),
        ({"model": "swin_moe"}, "model is swinv2_moe there, swin_moe in the backbone"),
        (
            {"moe_blocks": ((), (), (0,), (0,))},
            "MoE layers is ['2.1', '3.0'] there, ['2.0', '3.0']",
        ),
    ],
)
def test_another_model_is_one_line(tmp_path, kwargs, message):
    run, model = write_run(tmp_path / "run")
    save_file(model.state_dict(), tmp_path / "single.safetensors")
    for source in (run, str(tmp_path / "single.safetensors")):
        with pytest.raises(UserError, match=re.escape(message)) as raised:
            backbone(source, **kwargs)
        assert str(raised.value).startswith(f"backbone.pretrained {source}: of another model: ")
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("kind", ["run", "single", "tables"])
def test_windows_are_those_of_the_weights(tmp_path, kind):
    """Those of the backbone's configuration must be the same; without them they are taken over."""
    source, _ = write_run(tmp_path / "run")
    experts = {}
    if kind == "single":
        export_weights("single", tmp_path / "run", tmp_path / "single.safetensors")
        source = str(tmp_path / "single.safetensors")
    elif kind == "tables":  # as Microsoft's dense files
        experts = {"num_experts": 0}
        _, model = trained("MODEL.MOE.NUM_EXPERTS 0")
        names = [name for name, _ in model.named_buffers() if name.endswith("coords_table")]
        tables = {name: model.get_buffer(name) for name in names}
        save_file(model.state_dict() | tables, tmp_path / "weights.safetensors")
        source = str(tmp_path / "weights.safetensors")
    assert backbone(source, **experts).trunk.position_windows() == [4, 4, 4, 2]
    assert backbone(source, pretrained_window_sizes=(4, 4, 4, 2), **experts).trained_with
    with pytest.raises(
        UserError, match=r"windows of \[4, 4, 4, 2\].*pretrained_window_sizes=\[4, 4, 4, 2\]"
    ):
        backbone(source, pretrained_window_sizes=(2, 2, 2, 2), **experts)


def test_a_file_of_a_detector_keeps_the_windows(tmp_path):
    config = tiny_config(tmp_path, tmp_path)
    first, second = str(tmp_path / "first.pth"), str(tmp_path / "second.pth")
    state = run.build_detector(config).state_dict()
    torch.save({"state_dict": state, "meta": {"backbone_windows": [4, 4, 3, 2]}}, first)
    run.export_pth(tiny_config(tmp_path, tmp_path), first, second)
    for file in (first, second):
        assert run.build_detector(config, file).backbone.trunk.position_windows() == [4, 4, 3, 2]
    config.model.backbone.pretrained_window_sizes = (2, 2, 2, 2)
    with pytest.raises(UserError, match=r"first\.pth: its position biases are for windows of"):
        run.build_detector(config, first)


def test_another_normalisation_is_one_warning(tmp_path, monkeypatch):
    source, _ = write_run(tmp_path / "run", "DATA.STD [0.5,0.5,0.5]")
    lines = []
    monkeypatch.setattr(MMLogger.get_current_instance(), "warning", lines.append)
    detector = run.build_detector(tiny_config(tmp_path, tmp_path))
    check_preprocessing(detector, backbone(source).trained_with, source)
    assert lines == [
        "model.data_preprocessor.std is [58.395, 57.12, 57.375], the weights of"
        f" backbone.pretrained {source} were trained with [127.5, 127.5, 127.5]"
    ]


@pytest.mark.parametrize("content", [None, b"no weights"])
def test_no_weights_is_one_line(tmp_path, content):
    file = tmp_path / "weights.pth"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"weights\.pth") as raised:
        backbone(str(file))
    assert "\n" not in str(raised.value)
