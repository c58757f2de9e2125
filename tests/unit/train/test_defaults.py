"""A training without --cfg: what is found in a folder, the settings that follow, and the line for
each folder and for weights that cannot be used."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError
from swinv2_moe.models import bundled
from swinv2_moe.start import defaults
from swinv2_moe.start.defaults import (
    Pictures,
    Weights,
    apply_rules,
    choose,
    largest_batch,
    values_of,
)

SWIN = {
    "DATA.IMG_SIZE": 64,
    "MODEL.SWINV2.PATCH_SIZE": 4,
    "MODEL.SWINV2.DEPTHS": [1, 2, 4],
    "MODEL.SWINV2.WINDOW_SIZE": 8,
}


def write(root: Path, classes: dict[str, int], size: tuple[int, int] = (24, 20)) -> Path:
    """A folder of classes with so many pictures each."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", size, (number % 256, 0, 0)).save(root / name / f"{number}.png")
    return root


def message(data: Path, *opts: str) -> str:
    with pytest.raises(UserError) as error:
        choose(str(data), opts)
    text = str(error.value)
    assert "\n" not in text
    return text


def ruled(pictures: Pictures, given: dict[str, object] | None = None, **keys: object) -> dict:
    weights = Weights("some", SWIN | keys, "")
    return values_of(apply_rules(pictures, weights, given or {}))


def photographs(num_train: int = 1000, side: int = 224) -> Pictures:
    return Pictures("photos", num_train, 100, list("0123456789"), side + 50, side, 0.0)


@pytest.fixture(autouse=True)
def no_bundled_model(monkeypatch, tmp_path):
    """The tests do not depend on the file of the package."""
    monkeypatch.setattr(bundled, "DIRECTORY", tmp_path / "bundled")


def test_a_flat_folder_is_split_by_file_names(tmp_path):
    found = choose(str(write(tmp_path / "photos", {"cat": 10, "dog": 20})))
    assert found.config.DATA.VAL_SPLIT == 0.2
    assert found.lines[0].startswith(f"{tmp_path / 'photos'}: 2 classes, 24 pictures to train on")
    assert "6 to validate" in found.lines[0]
    assert "24 x 20" in found.lines[0]
    assert str(found.config.OUTPUT) == "output/photos"


@pytest.mark.parametrize(("folders", "split"), [(("train", "val"), 0.0), (("train",), 0.2)])
def test_folders_of_a_data_set(tmp_path, folders, split):
    for name in folders:
        write(tmp_path / name, {"cat": 10, "dog": 10})
    found = choose(str(tmp_path))
    assert split == found.config.DATA.VAL_SPLIT


def test_every_choice_can_be_overridden(tmp_path):
    opts = [
        "TRAIN.EPOCHS",
        "4",
        "AUG.MIXUP",
        "0.3",
        "DATA.VAL_SPLIT",
        "0.5",
        "DATA.BATCH_SIZE",
        "6",
    ]
    found = choose(str(write(tmp_path / "photos", {"cat": 10, "dog": 10})), opts, "elsewhere")
    config = found.config
    assert (config.TRAIN.EPOCHS, config.AUG.MIXUP, config.DATA.VAL_SPLIT) == (4, 0.3, 0.5)
    assert (config.DATA.BATCH_SIZE, config.OUTPUT, found.largest_batch) == (6, "elsewhere", 0)
    assert config.TRAIN.WARMUP_EPOCHS == 1  # follows from the epochs that are given
    assert any("AUG.MIXUP 0.3" in line and line.endswith(": given") for line in found.lines)


def test_a_size_is_given_without_weights(tmp_path):
    found = choose(
        str(write(tmp_path / "photos", {"cat": 10, "dog": 10})), ["DATA.IMG_SIZE", "192"]
    )
    assert found.config.DATA.IMG_SIZE == 192
    assert "  DATA.IMG_SIZE 192: given" in found.lines


def test_a_model_of_timm_without_weights_has_no_blocks_of_another(tmp_path):
    opts = ["MODEL.PRETRAINED", "", "MODEL.TYPE", "timm", "MODEL.NAME", "vit_tiny_patch16_224"]
    found = choose(str(write(tmp_path / "photos", {"cat": 10, "dog": 10})), opts)
    assert found.config.MODEL.MOE.BLOCKS == []


def test_without_weights_the_line_says_what_to_put_where(tmp_path):
    found = choose(str(write(tmp_path / "photos", {"cat": 10, "dog": 10})))
    line = found.lines[1]
    assert "random" in line
    assert "far lower" in line
    assert str(tmp_path / "bundled" / "tiny.safetensors") in line
    assert "timm:swinv2_" in line
    scratch = load_config(defaults.FROM_SCRATCH, data=str(tmp_path))
    assert found.config.MODEL == scratch.MODEL
    assert found.config.DATA.IMG_SIZE == scratch.DATA.IMG_SIZE


def test_epochs_follow_the_number_of_pictures():
    counts = [20, 1500, 10**6]
    assert [ruled(photographs(n))["TRAIN.EPOCHS"] for n in counts] == [20, 13, 10]
    taught = {"TRAIN.DISTILL.TEACHER": "efficientnet_lite2"}
    assert [ruled(photographs(n), taught)["TRAIN.EPOCHS"] for n in counts] == [60, 40, 10]
    scratch = values_of(apply_rules(photographs(), Weights("", {}, ""), {}))
    assert scratch["TRAIN.EPOCHS"] == 60
    assert "DATA.IMG_SIZE" not in scratch
    assert "TRAIN.LAYER_DECAY" not in scratch


def test_a_classifier_on_the_frozen_network_comes_first():
    """With pretrained weights; a teacher has other targets, random weights know nothing."""
    chosen = ruled(photographs(100))
    assert (chosen["TRAIN.PROBE"], chosen["TRAIN.BEST_BY"]) == (True, "calibrated")
    assert (chosen["VAL_FREQ"], chosen["TRAIN.PATIENCE"]) == (4, 12)  # of 20 epochs
    assert [ruled(photographs(n))["TRAIN.MINUTES"] for n in (199, 200)] == [3, 10]
    given = {"TRAIN.EPOCHS": 3}
    assert "TRAIN.MINUTES" not in ruled(photographs(100), given)
    assert ruled(photographs(100), given)["VAL_FREQ"] == 1
    taught = ruled(photographs(100), {"TRAIN.DISTILL.TEACHER": "efficientnet_lite2"})
    scratch = values_of(apply_rules(photographs(100), Weights("", {}, ""), {}))
    for others in (taught, scratch):
        assert not {"TRAIN.PROBE", "TRAIN.BEST_BY", "VAL_FREQ", "TRAIN.PATIENCE"} & others.keys()


def test_sizes_that_the_frozen_network_is_tried_at():
    """Also those that are larger than the pictures, with windows that tile them."""
    weights = Weights("some", SWIN, "")
    size, window = "DATA.IMG_SIZE", "MODEL.SWINV2.WINDOW_SIZE"
    assert defaults.sizes_to_try(weights, {}) == [{size: 64}, {size: 96, window: 12}, {size: 128}]
    large = Weights("some", SWIN | {size: 256}, "")
    assert defaults.sizes_to_try(large, {}) == [{size: 128}, {size: 256}]
    assert defaults.sizes_to_try(weights, {size: 80}) == []
    assert defaults.sizes_to_try(weights, {"TRAIN.DISTILL.TEACHER": "some"}) == []
    assert defaults.sizes_to_try(Weights("", {}, ""), {}) == []


@pytest.mark.parametrize(
    ("given", "mixed"),
    [
        ({}, True),
        ({"DATA.BATCH_SIZE": 6}, True),
        ({"DATA.BATCH_SIZE": 7}, False),
        ({"DATA.GLOBAL_BATCH_SIZE": 6}, False),
        ({"TRAIN.DISTILL.TEACHER": "efficientnet_lite2"}, False),
    ],
)
def test_pictures_are_mixed_where_they_can_be(given, mixed):
    chosen = ruled(photographs(), given)
    assert (chosen["AUG.MIXUP"], chosen["AUG.CUTMIX"]) == ((0.2, 0.5) if mixed else (0, 0))
    scratch = values_of(apply_rules(photographs(), Weights("", {}, ""), given))
    assert (scratch["AUG.MIXUP"], scratch["AUG.CUTMIX"]) == (0, 0)


def test_the_image_follows_the_weights_and_the_pictures():
    """Windows grow with an image that those of the weights do not tile. A size or a window is not
    chosen if windows would not tile the image."""
    sizes = [ruled(photographs(side=side))["DATA.IMG_SIZE"] for side in (32, 33, 127, 128, 1000)]
    assert sizes == [32, 64, 64, 128, 128]
    assert "MODEL.SWINV2.WINDOW_SIZE" not in ruled(photographs())
    of_larger = {"DATA.IMG_SIZE": 96, "MODEL.SWINV2.WINDOW_SIZE": 12}
    assert ruled(photographs(), **of_larger)["DATA.IMG_SIZE"] == 96
    cannot_tile = {"MODEL.SWINV2.PATCH_SIZE": 8, "MODEL.SWINV2.WINDOW_SIZE": 5}
    assert ruled(photographs(), **cannot_tile)["DATA.IMG_SIZE"] == 64
    coarse = {"MODEL.SWINV2.PATCH_SIZE": 16, "MODEL.SWINV2.WINDOW_SIZE": 4}
    assert ruled(photographs(side=32), **coarse)["DATA.IMG_SIZE"] == 64
    larger = ruled(photographs(), {"DATA.IMG_SIZE": 96})
    assert larger["DATA.IMG_SIZE"] == 96
    assert larger["MODEL.SWINV2.WINDOW_SIZE"] == 12
    assert ruled(photographs(), {"DATA.IMG_SIZE": 192})["MODEL.SWINV2.WINDOW_SIZE"] == 12
    assert "MODEL.SWINV2.WINDOW_SIZE" not in ruled(photographs(), {"DATA.IMG_SIZE": 72})


@pytest.mark.parametrize(
    ("trained", "class_map", "reason"),
    [
        ([], "new", "the weights know none of the classes"),
        (["dogs", "cats"], "new", "the weights know none of the classes"),
        (["dog", "cats"], "", "the weights know 1 of the 2 classes by name"),
        (["n01440764", "n02123045"], "", "the weights know 1 of the 2"),  # the second is a tabby
    ],
)
def test_rows_of_known_classes_are_kept(trained, class_map, reason):
    pictures = photographs()._replace(class_names=["dog", "Tabby"])
    decisions = apply_rules(pictures, Weights("some", SWIN, "", trained), {})
    assert values_of(decisions)["MODEL.CLASS_MAP"] == class_map
    assert any(reason in str(decision) for decision in decisions)
    assert "MODEL.CLASS_MAP" not in values_of(apply_rules(pictures, Weights("", {}, ""), {}))


@pytest.mark.parametrize(
    ("meta", "class_map"),
    [
        ('{"class_names": ["dog"]}', ""),
        ('{"class_names": [1]}', "new"),
        ("{", "new"),
        (None, "new"),
    ],
)
def test_the_classes_of_a_run(tmp_path, meta, class_map):
    """A damaged checkpoint is no reason to refuse a run, which may have others."""
    latest = tmp_path / "run" / "checkpoints" / "latest"
    latest.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("MODEL: {MOE: {NUM_EXPERTS: 0}}\n")
    if meta:
        (latest / "meta.json").write_text(meta)
    photos = write(tmp_path / "photos", {"cat": 5, "dog": 5})
    found = choose(str(photos), ["MODEL.PRETRAINED", str(tmp_path / "run")])
    assert class_map == found.config.MODEL.CLASS_MAP


def test_the_largest_batch():
    assert [largest_batch(n) for n in (4, 9, 100, 1000, 10**6)] == [4, 8, 8, 32, 128]


def test_one_class(tmp_path):
    assert "one class (cat)" in message(write(tmp_path, {"cat": 9}))


def test_three_pictures(tmp_path):
    for name in ("train", "val"):
        write(tmp_path / name, {"cat": 2, "dog": 1})
    assert "has 3 pictures to train 2 classes on" in message(tmp_path)
    shutil.rmtree(tmp_path / "val")
    shutil.rmtree(tmp_path / "train")
    assert "hold a single image: dog" in message(write(tmp_path / "flat", {"cat": 2, "dog": 1}))


def test_pictures_that_cannot_be_read(tmp_path):
    write(tmp_path, {"cat": 10, "dog": 10})
    broken = tmp_path / "cat" / "5.png"
    for name in ("cat", "dog"):
        for path in (tmp_path / name).iterdir():
            path.write_bytes(f"no picture {path}".encode())
    text = message(tmp_path)
    assert re.search(r"16 of 16 pictures .* cannot be read, the first: \S+png \(no readable", text)
    for path in sorted((tmp_path / "dog").iterdir()):
        Image.new("RGB", (9, 9), int(path.stem)).save(path)
    assert "8 of 16" in message(tmp_path)
    assert broken.exists()
    found = choose(str(tmp_path), ["DATA.MAX_BAD_SHARE", "0.5"])
    assert "9 x 9" in found.lines[0]


def test_a_share_of_bad_pictures_that_allows_all(tmp_path):
    write(tmp_path, {"cat": 5, "dog": 5})
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(f"no picture {path}".encode())
    assert "8 of 8 pictures" in message(tmp_path, "DATA.MAX_BAD_SHARE", "1.0")


def test_two_folders_of_data(tmp_path):
    write(tmp_path / "a", {"cat": 5, "dog": 5})
    text = message(tmp_path / "a", "DATA.PATH", str(tmp_path / "b"))
    assert text == f"DATA.PATH is '{tmp_path}/b' and --data '{tmp_path}/a': give one of them"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("size", "says"), [(12_000, "12,000 x 12,000"), (20_000, "more pixels")])
def test_pictures_with_too_many_pixels(tmp_path, size, says):
    write(tmp_path, {"cat": 5, "dog": 5})
    first, *others = tmp_path.glob("*/*.png")
    Image.new("1", (size, size)).save(first)
    for path in others:
        path.write_bytes(first.read_bytes() + str(path).encode())
    assert says in message(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    for name in ("train", "val"):
        write(tmp_path / name, {"cat": 3, "dog": 3})
    os.mkfifo(tmp_path / "train" / "cat" / "3.png")
    assert "3.png (not a regular file)" in message(tmp_path)


def test_another_dataset_needs_a_configuration(tmp_path):
    assert "without --cfg" in message(tmp_path, "DATA.DATASET", "shards")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none.safetensors", "no such file"),
        ("weights.pth", "does not say what its model is"),
        ("broken.safetensors", "cannot be read"),
        ("hf-hub:someone/model", "does not say what its model is; name a configuration by --cfg"),
        ("bundled:huge", "no such model"),
        ("bundled:tiny", "has no .*tiny.safetensors; put the file there"),
        ("timm:swinv2_nowhere", "has no such model"),
    ],
)
def test_weights_that_cannot_be_used(tmp_path, name, reason):
    write(tmp_path / "photos", {"cat": 5, "dog": 5})
    for file in ("weights.pth", "broken.safetensors"):
        (tmp_path / file).write_bytes(b"nothing")
    if ":" not in name:
        name = str(tmp_path / name)
    assert re.search(reason, message(tmp_path / "photos", "MODEL.PRETRAINED", name))


def test_weights_of_timm_upcycled_by_one_key(tmp_path):
    photos = str(write(tmp_path / "photos", {"cat": 5, "dog": 5}))
    opts = ["MODEL.PRETRAINED", "timm:swinv2_tiny_window8_256.ms_in1k"]
    dense = choose(photos, opts).config
    assert dense.MODEL.MOE.NUM_EXPERTS == 0
    assert dense.MODEL.SWINV2.DEPTHS == [2, 2, 6, 2]
    assert (dense.MODEL.SWINV2.WINDOW_SIZE, dense.DATA.IMG_SIZE) == (8, 128)
    experts = choose(photos, [*opts, "MODEL.UPCYCLE", "weights"]).config
    assert experts.MODEL.MOE.NUM_EXPERTS == 8
    assert experts.MODEL.MOE.BLOCKS == [[], [], [1, 3, 5], [1]]
    four = choose(photos, [*opts, "MODEL.MOE.NUM_EXPERTS", "4"]).config
    assert (four.MODEL.MOE.NUM_EXPERTS, four.MODEL.UPCYCLE) == (4, "weights")
    assert four.MODEL.MOE.BLOCKS == experts.MODEL.MOE.BLOCKS
    vit = ["MODEL.PRETRAINED", "timm:vit_tiny_patch16_224", "MODEL.MOE.NUM_EXPERTS", "4"]
    adapted = choose(photos, vit).config.MODEL
    assert (adapted.TYPE, adapted.MOE.NUM_EXPERTS, adapted.UPCYCLE) == ("timm", 4, "weights")
    none = choose(photos, [*opts, "MODEL.MOE.NUM_EXPERTS", "0"]).config
    assert (none.MODEL.MOE.NUM_EXPERTS, none.MODEL.UPCYCLE) == (0, "")


@pytest.mark.parametrize("how", ["weights", "name", "folder"])
def test_weights_of_any_model_of_timm(tmp_path, how):
    """By MODEL.PRETRAINED, by MODEL.NAME alone, or by timm's config.json beside a file."""
    photos = str(write(tmp_path / "photos", {"cat": 5, "dog": 5}))
    name = "vit_tiny_patch16_224.augreg_in21k"
    opts = {
        "weights": ["MODEL.PRETRAINED", f"timm:{name}"],
        "name": ["MODEL.TYPE", "timm", "MODEL.NAME", name],
        "folder": ["MODEL.PRETRAINED", str(tmp_path / "folder")],
    }[how]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(f'{{"architecture": "{name}"}}')
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"content")
    dense = choose(photos, opts).config
    assert ("timm", name) == (dense.MODEL.TYPE, dense.MODEL.NAME)
    assert (dense.DATA.IMG_SIZE, dense.DATA.MEAN) == (224, [0.5, 0.5, 0.5])
    assert dense.MODEL.MOE.NUM_EXPERTS == 0
    if how == "name":
        assert f"timm:{name}" == dense.MODEL.PRETRAINED
    experts = choose(photos, [*opts, "MODEL.UPCYCLE", "weights"]).config.MODEL.MOE
    assert (experts.NUM_EXPERTS, experts.TOP_K, experts.NORMALIZE_GATES) == (8, 2, True)


@pytest.mark.parametrize(("side", "trained"), [(128, 0), (129, 256)])
def test_the_size_of_the_weights_counts_for_pictures_with_as_many_pixels(tmp_path, side, trained):
    photos = str(write(tmp_path / "photos", {"cat": 5, "dog": 5}, (300, side)))
    opts = ["MODEL.PRETRAINED", "timm:swinv2_tiny_window8_256.ms_in1k"]
    assert choose(photos, opts).trained == trained


def test_a_swinv2_is_of_timm_if_the_type_says_so(tmp_path):
    photos = str(write(tmp_path / "photos", {"cat": 5, "dog": 5}))
    name = "swinv2_tiny_window8_256.ms_in1k"
    config = choose(photos, ["MODEL.TYPE", "timm", "MODEL.PRETRAINED", f"timm:{name}"]).config
    assert ("timm", name) == (config.MODEL.TYPE, config.MODEL.NAME)


def test_experts_are_made_of_dense_weights(tmp_path):
    write(tmp_path / "photos", {"cat": 5, "dog": 5})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("MODEL: {MOE: {NUM_EXPERTS: 4, BLOCKS: [[], [], [1], []]}}\n")
    text = message(tmp_path / "photos", "MODEL.PRETRAINED", str(run), "MODEL.UPCYCLE", "weights")
    assert text == (
        f"MODEL.UPCYCLE is 'weights': it makes experts of dense weights, and MODEL.PRETRAINED"
        f" {run} has 4 experts"
    )
    text = message(tmp_path / "photos", "MODEL.PRETRAINED", str(run), "MODEL.MOE.NUM_EXPERTS", "6")
    assert text.startswith(f"MODEL.MOE.NUM_EXPERTS is 6: MODEL.PRETRAINED {run} is 4 experts;")


def test_a_dense_run_goes_on_with_its_configuration(tmp_path):
    write(tmp_path / "photos", {"cat": 5, "dog": 5})
    assert "which --cfg must name" in message(tmp_path / "photos", "MODEL.UPCYCLE", "run")


def test_an_architecture_with_experts(tmp_path):
    photos = write(tmp_path / "photos", {"cat": 5, "dog": 5})
    (tmp_path / "config.json").write_text('{"architecture": "swinv2_moe"}')
    text = message(photos, "MODEL.PRETRAINED", str(tmp_path))
    assert text.endswith("is a swinv2_moe; without --cfg only a dense model of timm can be used")


def test_a_file_of_timm_with_its_description_beside_it(tmp_path):
    photos = str(write(tmp_path / "photos", {"cat": 5, "dog": 5}))
    file = tmp_path / "model.safetensors"
    file.touch()
    described = {"architecture": "swinv2_tiny_window8_256"}
    for class_names, class_map in (([], "new"), (["dog", "x"], "")):
        content = json.dumps(described | {"label_names": class_names})
        (tmp_path / "config.json").write_text(content)
        for name in (str(file), str(tmp_path), f"local-dir:{tmp_path}"):
            model = choose(photos, ["MODEL.PRETRAINED", name]).config.MODEL
            assert (name, [2, 2, 6, 2]) == (model.PRETRAINED, model.SWINV2.DEPTHS)
            assert class_map == model.CLASS_MAP
