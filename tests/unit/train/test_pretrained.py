"""MODEL.PRETRAINED: weights of an earlier run as the start of another, with other classes or with
experts."""

import json
import os
import shutil

import pytest
import tool_cases
import torch
import trainer_cases
from run_cases import assert_same, copy_of
from safetensors.torch import load_file, save_file

from swinv2_moe.checkpoints.checkpoint import open_checkpoint, write_weights
from swinv2_moe.config import default_config
from swinv2_moe.convert.convert import export_weights
from swinv2_moe.convert.hub import export_hub
from swinv2_moe.errors import UserError
from swinv2_moe.models.hub import description, local_file, timm_config
from swinv2_moe.start import initial
from swinv2_moe.start.initial import load_pretrained
from swinv2_moe.train.run import train

HEAD = ("head.fc.weight", "head.fc.bias")


@pytest.fixture
def pretrained(make_trainer, save, tmp_path):
    """`pretrained(keys)`: the weights of a trainer with 10 classes, and their checkpoint."""

    def make(keys=None):
        trainer = make_trainer({"SEED": 3} | (keys or {}))
        with torch.no_grad():
            trainer.step.model.head.fc.bias.copy_(torch.arange(10.0))
        return trainer.step.model.state_dict(), save(trainer, tmp_path / "before")

    return make


@pytest.fixture
def load(make_trainer):
    """`load(source, keys)`: the model that starts from it, with as many classes as `classes`
    says."""

    def run(source, keys=None, classes="0123456789", notes=()):
        trainer = make_trainer({"MODEL.PRETRAINED": str(source)} | (keys or {}))
        trainer.step.model.reset_classifier(len(classes))
        own = {name: trainer.step.model.state_dict()[name].clone() for name in HEAD}
        found = load_pretrained(
            trainer.config.model, trainer.step.model, trainer.world, list(classes)
        )
        assert found == tuple(notes)
        return trainer.step.model.state_dict(), own

    return run


@pytest.mark.parametrize("as_file", [False, True])
def test_experts_for_a_dense_model(as_file, pretrained, load):
    _, source = pretrained()
    source = source / "model.safetensors" if as_file else source
    refusal = r"NUM_EXPERTS is 0 and the weights have experts; .*: TRAIN\.DISTILL\.TEACHER"
    with pytest.raises(UserError, match=refusal):
        load(source, {"MODEL.MOE.NUM_EXPERTS": 0})


@pytest.mark.parametrize("as_file", [False, True])
def test_other_classes(as_file, pretrained, load, tmp_path):
    before, source = pretrained({"MODEL.MOE.NUM_EXPERTS": 0} if as_file else None)
    dense = {"MODEL.MOE.NUM_EXPERTS": 0} if as_file else {}
    source = (
        (source / "model.safetensors").rename(tmp_path / "file.safetensors") if as_file else source
    )
    refusal = "the data have other classes.*MODEL.CLASS_MAP new starts a new head"
    if as_file:  # without class names
        refusal = r"head\.fc\.weight \(\[10, 64\] there, \[4, 64\].*MODEL\.CLASS_MAP new"
    with pytest.raises(UserError, match=refusal):
        load(source, dense, "abcd")
    found, own = load(source, dense | {"MODEL.CLASS_MAP": "new"}, classes="abcd")
    assert_same(found, before | own)
    (tmp_path / "map.txt").write_text("7\n1\n1\n0\n")
    mapped = dense | {"MODEL.CLASS_MAP": str(tmp_path / "map.txt")}
    found, _ = load(source, mapped, classes="abcd")
    assert found["head.fc.bias"].tolist() == [7.0, 1.0, 1.0, 0.0]
    assert torch.equal(found["head.fc.weight"], before["head.fc.weight"][[7, 1, 1, 0]])
    (tmp_path / "map.txt").write_text("7\n-1\n1\n0\n")
    found, own = load(source, mapped, classes="abcd")
    assert torch.equal(found["head.fc.weight"][1], own["head.fc.weight"][1])
    assert torch.equal(found["head.fc.weight"][[0, 2, 3]], before["head.fc.weight"][[7, 1, 0]])


def test_rows_of_a_single_files_classifier_are_matched_by_name(pretrained, load, tmp_path):
    before, source = pretrained({"MODEL.MOE.NUM_EXPERTS": 0})
    file = tmp_path / "single.safetensors"
    keys = {"MODEL.MOE.NUM_EXPERTS": 0}
    imagenet = [f"n{number:08d}" for number in range(7)] + ["n02123045", "n01440764", "n02124075"]
    pets = ["Egyptian_cat", "tabby cat", "stone"]
    for names, classes in ((imagenet, pets), ("abcdefghij", "cxa"), ("abcdefghijk", "ka")):
        metadata = {"class_names": json.dumps(list(names))}
        save_file(load_file(source / "model.safetensors"), file, metadata)
        if names[-1] == "k":
            with pytest.raises(UserError, match="classifier has 10 rows, with 11 class names"):
                load(file, keys, classes)
            continue
        note = f"MODEL.PRETRAINED {file}: the classifier's rows of 2 classes are copied by name"
        if names is imagenet:  # WordNet ids, and English names
            found, own = load(file, keys, classes, [f"{note}, 1 classes are new: stone"])
            assert found["head.fc.bias"].tolist() == [9, 7, own["head.fc.bias"][2]]
            continue
        found, own = load(file, keys, classes, [f"{note}, 1 classes are new: x"])
        assert found["head.fc.bias"].tolist() == [2, own["head.fc.bias"][1], 0]
    save_file(before, file, {"class_names": "[1]"})
    with pytest.raises(UserError, match=r"single\.safetensors: class_names"):
        load(file, keys)


@pytest.fixture
def named_weights(make_trainer, tmp_path):
    """`named_weights(form)`: dense weights of the classes a to j, in this form of their names."""
    trainer = make_trainer({"MODEL.MOE.NUM_EXPERTS": 0})
    model, names = trainer.step.model, list("abcdefghij")
    with torch.no_grad():
        model.head.fc.bias.copy_(torch.arange(10.0))
    ours, hub, single = (tmp_path / name for name in ("ours", "hub", "single.safetensors"))
    write_weights(ours, model, model.state_dict(), trainer.config.yaml, names)
    export_hub(ours, hub)
    export_weights("single", ours, single)

    def make(form):
        content = json.loads((hub / "config.json").read_text())
        by_number = {str(number): name for number, name in enumerate(names)}
        if form == "in pretrained_cfg":
            content["pretrained_cfg"]["label_names"] = content.pop("label_names")
        elif form == "by number":
            content["label_names"] = by_number
        elif form == "older":
            content = {"architecture": "swinv2_moe", "labels": by_number}
        (hub / "config.json").write_text(json.dumps(content))
        torch.save(model.state_dict(), hub / "other.pth")
        places = {"checkpoint": ours, "file of a checkpoint": ours / "model.safetensors"}
        places |= {"single": single, "local-dir": f"local-dir:{hub}", ".pth": hub / "other.pth"}
        return str(places.get(form, hub))

    return make


FORMS = ["checkpoint", "file of a checkpoint", "single", "hub", "local-dir", ".pth"]
FORMS += ["in pretrained_cfg", "by number", "older"]


@pytest.mark.parametrize("form", FORMS)
def test_class_names_are_read_in_each_form_of_weights(form, named_weights, load):
    source = named_weights(form)
    note = f"MODEL.PRETRAINED {source}: the classifier's rows of 2 classes are copied by name"
    keys = {"MODEL.MOE.NUM_EXPERTS": 0}
    found, own = load(source, keys, "cxa", [f"{note}, 1 classes are new: x"])
    assert found["head.fc.bias"].tolist() == [2, own["head.fc.bias"][1], 0]


@pytest.mark.parametrize("names", [["a"], {"0": "a", "2": "b"}, "ab", [1, 2]])
def test_class_names_that_cannot_be_used(names, named_weights, load, tmp_path):
    source = named_weights("hub")
    content = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(content | {"label_names": names}))
    message = (
        "classifier has 10 rows, with 1 class names"
        if names == ["a"]
        else (r"config\.json: does not describe the weights beside it \(label_names")
    )
    with pytest.raises(UserError, match=message):
        load(source, {"MODEL.MOE.NUM_EXPERTS": 0}, "xa")


@pytest.mark.parametrize("upcycle", ["", "weights"])
def test_rows_of_a_runs_classifier_are_matched_by_name(pretrained, load, upcycle):
    before, source = pretrained({"MODEL.MOE.NUM_EXPERTS": 0} if upcycle else None)
    note = f"MODEL.PRETRAINED {source}: the classifier's rows of 3 classes are copied by name"
    keys = {"MODEL.UPCYCLE": upcycle}
    found, own = load(source, keys, "37x0", [f"{note}, 1 classes are new: x"])
    assert found["head.fc.bias"].tolist() == [3, 7, own["head.fc.bias"][2], 0]
    assert torch.equal(found["head.fc.weight"][[0, 1, 3]], before["head.fc.weight"][[3, 7, 0]])
    assert torch.equal(found["head.fc.weight"][2], own["head.fc.weight"][2])
    note = f"MODEL.PRETRAINED {source}: the classes are matched by number, only one side has names"
    found, _ = load(source, keys, "abcdefghij", [note])
    assert torch.equal(found["head.fc.weight"], before["head.fc.weight"])
    places = [0, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    found, _ = load(
        source,
        keys,
        ["00", "2", *"3456789", "1"],
        [f"MODEL.PRETRAINED {source}: the classifier's rows of 10 classes are copied by name"],
    )
    assert torch.equal(found["head.fc.weight"], before["head.fc.weight"][places])
    note = f"MODEL.PRETRAINED {source}: the classifier's rows of 9 classes are copied by name"
    remark = " (if the data count the same classes from 1, lower their numbers by 1)"
    load(source, keys, [str(number) for number in range(1, 10)], [note + remark])
    with pytest.raises(
        UserError, match=r"0 to 9, those of the data 1 to 10: .*CLASS_MAP new starts"
    ):
        load(source, keys, [str(number) for number in range(1, 11)])


def test_nameless_rows_are_in_the_order_of_the_numbers_in_names(pretrained, load, tmp_path):
    keys = {"MODEL.MOE.NUM_EXPERTS": 0}
    _, source = pretrained(keys)
    source = (source / "model.safetensors").rename(tmp_path / "file.safetensors")
    names = [f"class_{number}" for number in (1, 10, 2, 3, 4, 5, 6, 7, 8, 9)]
    note = (
        f"MODEL.PRETRAINED {source}: has no class names, they are taken to be, in order: class_1,"
        " class_2, class_3, ... (10 in all); programs order such names differently: class 1 may be"
        " 'class_10', not 'class_2' (MODEL.CLASS_MAP FILE says which row each class has)"
    )
    found, _ = load(source, keys, names, [note])
    assert found["head.fc.bias"].tolist() == [0, 9, 1, 2, 3, 4, 5, 6, 7, 8]


def test_class_maps_that_do_not_fit(pretrained, load, tmp_path):
    _, source = pretrained()
    file = tmp_path / "map.txt"

    def refused(says: str) -> None:
        with pytest.raises(UserError, match=rf"MODEL\.CLASS_MAP .*map\.txt: {says}"):
            load(source, {"MODEL.CLASS_MAP": str(file)}, classes="abcd")

    refused(r"cannot be read .*No such file")
    for text, says in (
        ("1 2 3", "it has 3 lines and numbers up to 3; .* each of the model's 4 classes"),
        ("1 2 3 10", "it has 4 lines and numbers up to 10; .* numbers up to 9,"),
        ("1 2 x 4", "line 3: 'x' is not"),
        ("1 2 -3 4", "line 3: '-3' is not"),
        ("1 2 3 " + "4" * 5000, r"line 4: '444\d+\.\.\. is not"),
    ):
        file.write_text(text)
        refused(says)
    file.unlink()
    os.mkfifo(file)
    refused(r"cannot be read .*not a regular file")


def test_a_dense_run_upcycled(pretrained, load):
    before, source = pretrained({"MODEL.MOE.NUM_EXPERTS": 0})
    found, _ = load(source, {"MODEL.UPCYCLE": "weights"})
    for block in ("layers.1.blocks.0", "layers.2.blocks.0"):
        experts, ffn = f"{block}.mlp.moe.experts", f"{block}.mlp"
        for e in range(4):
            assert torch.equal(found[f"{experts}.w1"][e], before[f"{ffn}.fc1.weight"])
            assert torch.equal(found[f"{experts}.w2"][e], before[f"{ffn}.fc2.weight"].t())


def test_what_is_frozen_must_have_been_trained(pretrained, load):
    _, source = pretrained({"MODEL.MOE.NUM_EXPERTS": 0})
    frozen = {"MODEL.MOE.FREEZE": True}
    for keys in (frozen, frozen | {"MODEL.UPCYCLE": "weights"}):
        message = r"FREEZE is True: weights .* have no .*moe\..*, it would stay random"
        with pytest.raises(UserError, match=message):
            load(source / "model.safetensors", keys)


def test_a_run_cannot_be_frozen_on_its_way(pretrained, make_trainer):
    _, source = pretrained()
    trainer = make_trainer({"MODEL.PRETRAINED": str(source), "MODEL.MOE.FREEZE": True})
    message = r"was written with MODEL\.MOE\.FREEZE False, which cannot change"
    with pytest.raises(UserError, match=message):
        trainer_cases.resume(trainer, source)


def test_experts_cannot_be_upcycled_again(pretrained, load):
    _, source = pretrained()
    with pytest.raises(UserError, match=r"has experts, MODEL\.UPCYCLE needs dense weights"):
        load(source, {"MODEL.UPCYCLE": "weights"})


def test_another_window_says_which_one_the_weights_know(pretrained, load):
    before, source = pretrained()
    larger = {"DATA.IMG_SIZE": 32, "MODEL.SWINV2.WINDOW_SIZE": 8}
    message = r"are for windows of \[4, 4, 2\], .* for \[8, 8, 4\]; set .*_SIZES \[4,4,2\]"
    with pytest.raises(UserError, match=message):
        load(source, larger)
    found, _ = load(source, larger | {"MODEL.SWINV2.PRETRAINED_WINDOW_SIZES": [4, 4, 2]})
    assert_same(found, before)


def test_frozen_experts_stay_and_route_as_in_evaluation(pretrained, make_trainer, save, tmp_path):
    _, source = pretrained()
    frozen = {"MODEL.PRETRAINED": str(source), "MODEL.MOE.FREEZE": True}
    frozen["MODEL.DROP_PATH_RATE"] = 0.0
    trainer, again = make_trainer(frozen), make_trainer(frozen)
    for each in (trainer, again):
        load_pretrained(each.config.model, each.step.model, each.world, list("0123456789"))
    before = copy_of(trainer.step.model)
    trainer_cases.train_steps(trainer, 2)
    for name, tensor in trainer.step.model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (".moe." in name), name
    images = torch.randn(4, *trainer.data.train_loader.dataset.shape)
    trainer.step.wrapped.train()
    outputs = [trainer.step.wrapped(images) for _ in range(2)]
    assert torch.equal(outputs[0][0], outputs[1][0])  # no gate noise
    assert float(outputs[0][1]) == 0  # no auxiliary loss
    trainer_cases.resume(again, save(trainer, tmp_path / "frozen"))
    trainer_cases.train_steps(trainer, 1)
    trainer_cases.train_steps(again, 1)
    assert_same(trainer.step.model.state_dict(), again.step.model.state_dict())


def test_what_weights_were_trained_with_is_taken_over(make_config, tmp_path, capsys):
    """Unless the user has set the key; a resumed run keeps its values."""
    shape = {"DATA.IMG_SIZE": 32, "MODEL.SWINV2.WINDOW_SIZE": 4, "TRAIN.MAX_STEPS": 1}
    first = {
        "DATA.MEAN": [0.1, 0.2, 0.3],
        "DATA.STD": [0.5, 0.5, 0.4],
        "DATA.INTERPOLATION": "bilinear",
    }
    train(make_config(tmp_path / "first", shape | first))
    keys = shape | {"DATA.INTERPOLATION": "bicubic", "MODEL.PRETRAINED": str(tmp_path / "first")}
    keys |= {"MODEL.SWINV2.WINDOW_SIZE": 8}
    config = make_config(tmp_path / "second", keys)
    assert "DATA.MEAN" not in config.given
    capsys.readouterr()
    train(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "settings of the weights" in said
    assert "DATA.MEAN [0.1, 0.2, 0.3], DATA.STD [0.5, 0.5, 0.4]" in said
    assert "MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [4, 4, 4]" in said
    assert "DATA.INTERPOLATION is bicubic, its weights were trained with bilinear" in said
    (tmp_path / "first").rename(tmp_path / "moved")
    train(make_config(tmp_path / "second", keys | {"TRAIN.MAX_STEPS": 2}), "auto")
    assert "settings of the weights" not in capsys.readouterr().out
    newest = open_checkpoint(tmp_path / "second" / "checkpoints" / "step-00000002")
    assert "MEAN:\n  - 0.1" in newest.meta["config"]
    assert "INTERPOLATION: bicubic" in newest.meta["config"]


def test_a_description_of_timm():
    described = {"mean": (0.5, 0.4, 0.3), "std": [1, 1, 1], "interpolation": "bicubic"}
    expected = {"DATA.MEAN": [0.5, 0.4, 0.3], "DATA.STD": [1.0, 1.0, 1.0]}
    expected |= {"DATA.INTERPOLATION": "bicubic"}
    assert initial.settings_of_timm(described) == expected
    cropped = {"TEST.CROP_RATIO": 0.9}
    assert initial.settings_of_timm(described | {"crop_pct": 0.9}) == expected | cropped
    assert initial.settings_of_timm({"crop_mode": "squash"}) == {"TEST.CROP_RATIO": 0.0}
    content = timm_config("timm:vit_tiny_patch16_224.augreg_in21k")
    named = initial.settings_of_timm(description(content))
    assert named["DATA.MEAN"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ({"interpolation": "lanczos"}, "interpolation 'lanczos'"),
        ({"crop_mode": "border", "crop_pct": 0.9}, "crop_mode 'border' with crop_pct 0.9"),
        ({"crop_pct": 1.15}, "crop_mode 'center' with crop_pct 1.15"),
    ],
)
def test_settings_without_a_key_are_said(described, says, tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": described}))
    trained = initial.settings_of_weights(str(tmp_path), 1)
    assert trained.values == {}
    assert trained.line == f"its config.json has {says}, for which there is no key"


def test_one_of_several_state_dicts_is_named(tmp_path):
    state = {"a": torch.ones(1)}
    torch.save({"model": state, "model_ema": state, "epoch": 3}, tmp_path / "both.pth")
    trained = initial.settings_of_weights(str(tmp_path / "both.pth"), 1)
    _, notes = initial.take_over(default_config(), trained, "both.pth")
    assert notes == ["both.pth: holds 'model' and 'model_ema': 'model' is used"]
    torch.save({"model": state, "epoch": 3}, tmp_path / "one.pth")
    assert initial.settings_of_weights(str(tmp_path / "one.pth"), 1).line == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"architecture": "swinv2_tiny_win', "Unterminated string"),
        ("[]", "is a list"),
        ("\xff", "can't decode byte 0xff"),
        ('{"pretrained_cfg": null}', "pretrained_cfg is null"),
        ('{"pretrained_cfg": {"mean": [NaN, 0, 0]}}', "mean/0 is nan, it must be a number from 0"),
        ('{"pretrained_cfg": {"std": [58.4]}}', "std/0 is 58.4, it must be a number from 0.001 to"),
        ('{"pretrained_cfg": {"interpolation": "cubic"}}', "interpolation is 'cubic'"),
        ('{"pretrained_cfg": {"crop_mode": "middle"}}', "crop_mode is 'middle', it must be one of"),
        ('{"pretrained_cfg": {"crop_pct": 0}}', "crop_pct is 0, it must be a number from 0.1"),
        ('{"model_type": "swin"}', "it needs one of architecture, pretrained_cfg, label_names"),
        (None, "No such file"),
    ],
)
def test_settings_beside_weights_that_cannot_be_used(content, says, tmp_path):
    if content is None:
        (tmp_path / "config.json").symlink_to("nowhere")
    else:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    for file in ("", "model.safetensors", "other.pth"):
        message = tool_cases.refusal(initial.settings_of_weights, str(tmp_path / file), 1)
        assert message.startswith(f"{tmp_path}/config.json: does not describe the weights beside")
        assert says in message


def test_settings_that_may_not_be_read(tmp_path):
    (tmp_path / "config.json").mkdir()
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"config\.json: does not .*not a regular file"):
        initial.settings_of_weights(str(tmp_path / "other.pth"), 1)


def test_the_settings_of_a_run_whose_newest_checkpoint_is_damaged(make_trainer, save, tmp_path):
    trainer = make_trainer({"DATA.MEAN": [0.1, 0.2, 0.3]})
    older = save(trainer, tmp_path / "checkpoints")
    trainer.progress.step = 7
    (save(trainer, tmp_path / "checkpoints") / "meta.json").write_text('{"step": 7, "conf')
    trained = initial.settings_of_weights(str(tmp_path), 3)
    assert trained.values["DATA.MEAN"] == [0.1, 0.2, 0.3]
    shutil.rmtree(older)
    assert initial.settings_of_weights(str(tmp_path), 3) == initial.TrainedWith()


def test_an_older_description_of_timm(tmp_path):
    (tmp_path / "config.json").write_text('{"architecture": "x", "mean": [0.1, 0.2, 0.3]}')
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    trained = initial.settings_of_weights(str(tmp_path), 1)
    assert trained.values == {"DATA.MEAN": [0.1, 0.2, 0.3]}


V2_ARGS = {"img_size": 64, "patch_size": 4, "depths": [1, 2], "window_size": 4}
V2_ARGS |= {"pretrained_window_sizes": [6, 0], "embed_dim": 10**9}
TINY = {"architecture": "swinv2_tiny_window8_256"}
DESCRIBED = [
    (TINY, [8, 8, 8, 8]),
    ({"architecture": "swinv2_moe", "model_args": V2_ARGS}, [6, 4]),
    ({"architecture": "vit_tiny_patch16_224"}, []),
    (TINY | {"model_args": {"window_size": 10**9}}, []),
    (TINY | {"model_args": {"depths": ["a"]}}, []),
    ({"architecture": ["swinv2_moe"], "model_args": None}, []),
]


def test_a_directory_of_timm(tmp_path):
    config = tmp_path / "config.json"
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    for content, windows in DESCRIBED:
        config.write_text(json.dumps(content))
        assert initial.settings_of_weights(str(tmp_path), 1).windows == windows
    config.write_text(json.dumps({"pretrained_cfg": {"std": [0.5] * 3}}))
    for name in (f"local-dir:{tmp_path}", str(tmp_path), f"{tmp_path}/model.safetensors"):
        assert local_file(name) == str(tmp_path / "model.safetensors")
        assert initial.settings_of_weights(name, 1).values == {"DATA.STD": [0.5] * 3}
