"""A detector's training in the per-expert store and in mmengine's own files: resumed, tested,
exported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import make_data, tiny_config

from swinv2_moe.detection import run
from swinv2_moe.detection.shapes import CLASSES
from swinv2_moe.errors import UserError
from swinv2_moe.train.checkpoint import open_checkpoint, read_weights_of

TWO_EPOCHS = {"train_cfg__max_epochs": 2, "train_cfg__val_interval": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("shapes") / "data", train=4)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """Two epochs of two steps without interruption."""
    work_dir = tmp_path_factory.mktemp("run") / "whole"
    run.train(tiny_config(data, work_dir, **TWO_EPOCHS, default_hooks__checkpoint__keep_last=2))
    return work_dir


@pytest.mark.timeout(20)
def weights(data: Path, source: Path) -> dict[str, torch.Tensor]:
    return run.build_detector(tiny_config(data, source), str(source)).state_dict()


def assert_equal(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_what_a_run_leaves(trained):
    checkpoints = trained / "checkpoints"
    found = {path.name for path in checkpoints.iterdir()}
    assert {"step-00000002", "step-00000004", "latest", "best", "best.json"} <= found
    assert (checkpoints / "latest").resolve().name == "step-00000004"
    best = json.loads((checkpoints / "best.json").read_text())
    assert (checkpoints / "best").resolve().name == best["checkpoint"]
    experts = sorted(
        str(p.relative_to(checkpoints / "latest"))
        for p in (checkpoints / "latest/experts").rglob("*.safetensors")
    )
    assert experts == [
        f"experts/backbone.trunk.layers.{block}.mlp.moe/000{e}.safetensors"
        for block in ("2.blocks.1", "3.blocks.0")
        for e in (0, 1)
    ]


def test_resumed_at_an_epoch_equals_uninterrupted(data, tmp_path):
    """The second epoch again from the first one's checkpoint: the same weights, moments and rates,
    by bits."""
    options = TWO_EPOCHS | {
        "model__backbone__moe__gate_noise": 0.0,
        "default_hooks__checkpoint__keep_last": 2,
    }
    whole, resumed = (
        tiny_config(data, tmp_path / name, **options) for name in ("whole", "resumed")
    )
    for config in (whole, resumed):  # with nothing left to draw: mmengine does not save generators
        pipeline = config.train_dataloader.dataset.pipeline
        config.train_dataloader.dataset.pipeline = [
            step for step in pipeline if step["type"] != "RandomFlip"
        ]
        config.model.train_cfg.rpn.sampler.num = config.model.train_cfg.rcnn.sampler.num = 10**6
    run.train(whole)
    run.train(resumed, str(tmp_path / "whole/checkpoints/step-00000002"))
    last, again = (
        open_checkpoint(tmp_path / name / "checkpoints/step-00000004")
        for name in ("whole", "resumed")
    )
    assert again.meta["training"] == last.meta["training"]
    assert again.meta["files"] == last.meta["files"]  # checksums


def test_auto_goes_on_from_the_newest(data, trained, tmp_path):
    config = tiny_config(data, tmp_path / "run")
    run.train(config, "auto")  # nothing there: a fresh start
    assert (tmp_path / "run/checkpoints/latest").resolve().name == "step-00000002"
    config = tiny_config(data, tmp_path / "run", **TWO_EPOCHS)
    run.train(config, "auto")
    assert (tmp_path / "run/checkpoints/latest").resolve().name == "step-00000004"


def test_a_pth_and_the_store_give_the_same_metrics(data, trained, tmp_path):
    config = tiny_config(data, tmp_path / "test")
    file = tmp_path / "model.pth"
    run.export_pth(config, str(trained), str(file))
    assert_equal(weights(data, file), weights(data, trained))
    store = run.test(tiny_config(data, tmp_path / "a"), str(trained))
    pth = run.test(tiny_config(data, tmp_path / "b"), str(file))
    assert store == pth
    with pytest.raises(UserError, match="already exists"):
        run.export_pth(config, str(trained), str(file))


def test_mmengines_own_checkpoints_resume(data, tmp_path):
    hook = {"type": "CheckpointHook", "interval": 1}
    config = tiny_config(data, tmp_path / "run")
    config.default_hooks.checkpoint = hook
    run.train(config)
    assert (tmp_path / "run/epoch_1.pth").is_file()
    config = tiny_config(data, tmp_path / "run", **TWO_EPOCHS)
    config.default_hooks.checkpoint = hook
    run.train(config, "auto")
    assert (tmp_path / "run/epoch_2.pth").is_file()
    first, second = (weights(data, tmp_path / f"run/epoch_{epoch}.pth") for epoch in (1, 2))
    assert not torch.equal(first["rpn_head.rpn_conv.weight"], second["rpn_head.rpn_conv.weight"])


def test_another_models_checkpoint_is_one_line(data, trained, tmp_path):
    file = tmp_path / "model.pth"
    run.export_pth(tiny_config(data, tmp_path), str(trained), str(file))
    for source in (trained, file):
        for changes in ({"num_experts": 4}, {"embed_dim": 16}):
            with pytest.raises(UserError, match=f"checkpoint {source}.*") as raised:
                run.build_detector(
                    tiny_config(data, tmp_path / "other", backbone=changes), str(source)
                )
            assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="experts: 2 there, 4 in the model"):
        run.test(tiny_config(data, tmp_path / "other", backbone={"num_experts": 4}), str(trained))
    with pytest.raises(UserError, match="size mismatch"):
        run.test(tiny_config(data, tmp_path / "other", backbone={"num_experts": 4}), str(file))
    with pytest.raises(UserError, match=r"nothing\.pth"):
        run.test(tiny_config(data, tmp_path / "other"), str(tmp_path / "nothing.pth"))


def test_another_detector_starts_from_its_backbone(data, trained, tmp_path):
    pretrained = {"model__backbone__pretrained": str(trained)}
    new = run.build_detector(tiny_config(data, tmp_path / "new", **pretrained))
    new.init_weights()
    of_trunk = {n: t for n, t in weights(data, trained).items() if n.startswith("backbone.trunk.")}
    assert_equal(
        {n: t for n, t in new.state_dict().items() if n.startswith("backbone.trunk.")}, of_trunk
    )
    wider = tiny_config(data, tmp_path / "wide", **pretrained, model__backbone__num_experts=4)
    with pytest.raises(UserError, match="num_experts is 2 there, 4 in the backbone"):
        run.build_detector(wider).init_weights()


def test_a_damaged_checkpoint_is_passed_over(data, trained, tmp_path):
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    victim = next((tmp_path / "checkpoints/step-00000004/experts").rglob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1])
    config = tiny_config(data, tmp_path)
    found = run.build_detector(config, str(tmp_path)).state_dict()
    wanted = read_weights_of(
        open_checkpoint(trained / "checkpoints/step-00000002"), run.build_detector(config)
    )
    assert_equal(found, wanted)


@pytest.mark.slow
def test_mmdets_own_test_script_gives_the_same(data, trained, tmp_path):
    import mmdet

    config = tiny_config(data, tmp_path / "ours")
    ours = run.test(tiny_config(data, tmp_path / "ours"), str(trained))
    file = tmp_path / "config.py"
    config.work_dir = str(tmp_path / "theirs")
    config.dump(str(file))
    export = tmp_path / "model.pth"
    run.export_pth(config, str(trained), str(export))
    script = Path(mmdet.__file__).parent / ".mim/tools/test.py"
    for source in (export, trained):
        done = subprocess.run(
            [
                sys.executable,
                script,
                file,
                source,
                "--output",
                tmp_path / f"theirs{source.suffix}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        record = next((tmp_path / f"theirs{source.suffix}").glob("*/*.json"))
        theirs = json.loads(record.read_text())
        assert {name: theirs[name] for name in ours} == pytest.approx(ours, abs=1e-3)


def test_classes_are_those_of_the_checkpoint_by_name(data, trained, tmp_path):
    """Of a run, of a checkpoint and of a .pth file."""
    config, file = tiny_config(data, tmp_path / "run"), tmp_path / "model.pth"
    run.export_pth(config, str(trained), str(file))
    for source in (trained, trained / "checkpoints/step-00000004", file):
        config.test_dataloader.dataset.metainfo.classes = ("triangle", "square", "star")
        line = run.use_trained_classes(config, str(source), ["test"], any_names=True)
        words = "has the classes 'circle' that the configuration lacks, and lacks 'star'"
        assert line == f"checkpoint {source}: {words}"
        assert config.test_dataloader.dataset.metainfo.classes == CLASSES
        assert run.use_trained_classes(config, str(source), ["test"]) == ""


def test_a_resumed_run_keeps_its_classes(data, trained, tmp_path):
    config = tiny_config(data, tmp_path / "run", **TWO_EPOCHS)
    part = config.train_dataloader.dataset
    part.metainfo.classes = ("triangle", "square", "star")
    with pytest.raises(UserError, match=r"lacks 'star'; model\.backbone\.pretrained loads"):
        run.train(config, str(trained))
    part.metainfo.classes = CLASSES[::-1]
    line = run.use_trained_classes(config, str(trained), ["train", "val"])
    assert line == f"classes are numbered as in {trained}"
    assert part.metainfo.classes == CLASSES


class Runs:
    """A pickle that makes a directory, if anything runs it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("resume", [None, "a file"])
def test_a_pth_runs_nothing(resume, data, tmp_path):
    """mmengine reads again, and then runs it, what torch refuses to."""
    file, marker = tmp_path / "evil.pth", tmp_path / "ran"
    torch.save({"state_dict": {}, "meta": Runs(marker)}, file)
    config = tiny_config(data, tmp_path / "run")
    with pytest.raises(UserError, match=r"evil\.pth: cannot be read as weights"):
        run.train(config, str(file)) if resume else run.build_detector(config, str(file))
    assert not marker.exists()


def test_the_configuration_in_a_pth_is_not_run(data, tmp_path):
    """It is Python, which mmengine runs when it resumes."""
    config = tiny_config(data, tmp_path / "run")
    detector, marker = run.build_detector(config), tmp_path / "ran"
    meta = {"epoch": 0, "iter": 0, "config": f"import os\nos.mkdir({str(marker)!r})"}
    torch.save({"state_dict": detector.state_dict(), "meta": meta}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w\.pth: its training cannot be resumed"):
        run.train(tiny_config(data, tmp_path / "run"), str(tmp_path / "w.pth"))
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", ["", "null", '{"score": "high"}', '{"score": NaN}', "[" * 100_000]
)
def test_a_damaged_record_of_the_best(content, tmp_path):
    from swinv2_moe.detection.store import _best_score

    warnings = []
    runner = SimpleNamespace(logger=SimpleNamespace(warning=warnings.append))
    file = tmp_path / "best.json"
    assert _best_score(file, runner) is None
    assert warnings == []
    file.write_text(content)
    assert _best_score(file, runner) is None
    assert len(warnings) == 1
    file.write_text('{"score": 0.5}')
    assert _best_score(file, runner) == 0.5
