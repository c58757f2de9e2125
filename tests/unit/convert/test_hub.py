"""`export hub`: a directory that timm.create_model loads, and its model card."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from moe_core import moe_layers
from swinv2_moe.checkpoints.checkpoint import write_weights
from swinv2_moe.checkpoints.deployed import open_deployed
from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.convert.hub import timm_preprocessing
from swinv2_moe.data.transforms import build_transform
from swinv2_moe.models import build_model, measure_model

CONFIGS = Path(__file__).parents[3] / "configs"
TYPES = {
    "released form": ["MODEL.TYPE", "swin_moe"],
    "V2": ["MODEL.TYPE", "swinv2_moe"],
    "dense": ["MODEL.TYPE", "swinv2_moe", "MODEL.MOE.NUM_EXPERTS", "0"],
    "cosine, top 2": ["MODEL.MOE.ROUTER", "cosine", "MODEL.MOE.TOP_K", "2"],
}


@pytest.mark.parametrize("opts", TYPES.values(), ids=TYPES)
def test_timm_loads_the_directory(opts, convert, make_checkpoint, images, tmp_path):
    ours, model = make_checkpoint(*opts)
    directory = tmp_path / "hub"
    status, out, err = convert("export", "hub", ours, "--output", directory)
    assert (status, err) == (0, "")
    assert f"{directory}: README.md, config.json, model.safetensors, " in out
    names = {"config.json", "model.safetensors", "README.md"}
    assert {file.name for file in directory.iterdir()} == names
    loaded = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images), model.eval()(images))
    assert loaded.pretrained_cfg["label_names"] == ["a", "b", "c", "d", "e"]
    data = timm.data.resolve_model_data_config(loaded)
    assert (data["input_size"], data["crop_pct"]) == ((3, 16, 16), 0.875)
    assert data["interpolation"] == "bicubic"
    # a user of timm may replace the classifier
    other = timm.create_model(f"local-dir:{directory}", pretrained=True, num_classes=2)
    assert other(images).shape == (3, 2)


def test_earlier_checkpoints_and_exports_keep_their_capacity(convert, make_checkpoint, tmp_path):
    """Whose configuration says 1.25."""
    ours, _ = make_checkpoint("MODEL.MOE.EVAL_CAPACITY_FACTOR", 1.25)
    with open_deployed(str(ours)) as deployed:
        assert deployed.config.model.experts.eval_capacity_factor == 1.25
    assert convert("export", "hub", ours, "--output", tmp_path / "hub").status == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True)
    factors = [layer.config.eval_capacity_factor for layer in moe_layers(model).values()]
    assert factors == [1.25] * 3


def test_a_vit_of_one_channel(convert, tmp_path):
    opts = ["DATA.CHANNELS", "1", "DATA.MEAN", "[0.5]", "DATA.STD", "[0.25]"]
    sizes = "patch_size=4 embed_dim=64 depth=2 num_heads=4 global_pool=avg"
    opts += ["MODEL.ARGS", sizes, "MODEL.MOE.BLOCKS", "[[1]]", "TEST.CROP_RATIO", "0"]
    config = load_config(CONFIGS / "vit_moe_digits.yaml", opts)
    model = build_model(model_config(config), 10).eval()
    write_weights(tmp_path / "ours", model, model.state_dict(), config.dump(), [])
    directory = tmp_path / "hub"
    assert convert("export", "hub", tmp_path / "ours", "--output", directory)[::2] == (0, "")
    loaded = timm.create_model(f"local-dir:{directory}", pretrained=True).eval()
    size = config.DATA.IMG_SIZE
    images = torch.randn(2, 1, size, size)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    data = timm.data.resolve_model_data_config(loaded)
    assert (list(data["mean"]), data["crop_mode"]) == ([0.5], "squash")
    assert "label_names" not in json.loads((directory / "config.json").read_text())


def test_the_model_card(convert, make_checkpoint, make_config, tmp_path):
    ours, _ = make_checkpoint("OUTPUT", "/private/place", "DATA.PATH", "/private/data")
    convert("export", "hub", ours, "--output", tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    size = measure_model(model_config(make_config()), 5)
    assert f"; {size.parameters / 1e6:,.2f}M parameters, {size.macs / 1e6:,.1f}M MACs" in card
    assert card.startswith("---\nlibrary_name: timm\n")
    assert "import swinv2_moe  #" in card
    assert "not measured with these weights" in card
    assert "# license:" in card
    assert "private" not in card


def test_nothing_is_written_over(convert, make_checkpoint, tmp_path):
    ours, _ = make_checkpoint()
    finished = convert("export", "hub", ours, "--output", ours)
    assert finished.status == 2
    assert finished.err == f"error: --output {ours}: already exists\n"
    finished = convert("export", "hub", ours, "--ranks", 2, "--output", tmp_path / "hub")
    assert finished.err == "error: --ranks 2: a directory for the hub holds the whole model\n"
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("ratio", [0.875, 0])
def test_timm_prepares_images_as_evaluation_does(ratio):
    config = load_config(CONFIGS / "quickstart_digits.yaml", ["TEST.CROP_RATIO", str(ratio)])
    section = data_config(config)
    ours = build_transform(section, is_train=False)
    theirs = timm.data.create_transform(**timm_preprocessing(section), is_training=False)
    noise = torch.randint(0, 256, (40, 64, 3), generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(noise.byte().numpy())
    torch.testing.assert_close(theirs(image), ours(image))
