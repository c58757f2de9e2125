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
from shapes_cases import CLASSES

from swinv2_moe.checkpoints.checkpoint import open_checkpoint, read_weights_of
from swinv2_moe.detection import run
from swinv2_moe.errors import UserError

TWO_EPOCHS = {"train_cfg__max_epochs": 2, "default_hooks__checkpoint__keep_last": 2}
NO_VALIDATION = {"train_cfg__val_interval": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_data(tmp_path_factory.mktemp("shapes") / "data", train=4)


def drawing_nothing(data: Path, work_dir: Path, **keys):
    """A configuration that draws no random number in training: mmengine saves no generators."""
    config = tiny_config(data, work_dir, model__backbone__moe__gate_noise=0.0, **keys)
    dataset = config.train_dataloader.dataset
    dataset.pipeline = [step for step in dataset.pipeline if step["type"] != "RandomFlip"]
    config.model.train_cfg.rpn.sampler.num = config.model.train_cfg.rcnn.sampler.num = 10**6
    return config


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """Two epochs of two steps without interruption; there is nothing that "auto" could resume."""
    work_dir = tmp_path_factory.mktemp("run") / "whole"
    run.train(drawing_nothing(data, work_dir, **TWO_EPOCHS), "auto")
    return work_dir


@pytest.fixture(scope="module")
def exported(data, trained, tmp_path_factory) -> Path:
    """The newest checkpoint as a .pth file."""
    file = tmp_path_factory.mktemp("export") / "model.pth"
    run.export_pth(tiny_config(data, file.parent), str(trained), str(file))
    return file


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


@pytest.mark.parametrize("resume", ["auto", "a checkpoint"])
def test_resumed_at_an_epoch_equals_uninterrupted(resume, data, trained, tmp_path):
    """The second epoch again from the first one's checkpoint: the same weights, moments and rates,
    by bits."""
    first = trained / "checkpoints/step-00000002"
    if resume == "auto":
        shutil.copytree(first, tmp_path / "checkpoints" / first.name)
    config = drawing_nothing(data, tmp_path, **TWO_EPOCHS | NO_VALIDATION)
    run.train(config, "auto" if resume == "auto" else str(first))
    last, again = (
        open_checkpoint(directory / "checkpoints/step-00000004")
        for directory in (trained, tmp_path)
    )
    assert again.meta["training"] == last.meta["training"]
    assert again.meta["files"] == last.meta["files"]  # checksums


def test_a_pth_and_the_store_give_the_same_metrics(data, trained, exported, tmp_path):
    assert_equal(weights(data, exported), weights(data, trained))
    store = run.test(tiny_config(data, tmp_path / "a"), str(trained))
    pth = run.test(tiny_config(data, tmp_path / "b"), str(exported))
    assert store == pth
    with pytest.raises(UserError, match="already exists"):
        run.export_pth(tiny_config(data, tmp_path), str(trained), str(exported))


def test_mmengines_own_checkpoints_resume(data, tmp_path):
    for epoch in (1, 2):
        keys = {"train_cfg__max_epochs": epoch}
        config = tiny_config(data, tmp_path / "run", **keys | NO_VALIDATION)
        config.default_hooks.checkpoint = {"type": "CheckpointHook", "interval": 1}
        run.train(config, "auto")
        assert (tmp_path / f"run/epoch_{epoch}.pth").is_file()
    first, second = (weights(data, tmp_path / f"run/epoch_{epoch}.pth") for epoch in (1, 2))
    assert not torch.equal(first["rpn_head.rpn_conv.weight"], second["rpn_head.rpn_conv.weight"])


def test_another_models_checkpoint_is_one_line(data, trained, exported, tmp_path):
    def other(**changes):
        return tiny_config(data, tmp_path / "other", backbone=changes)

    for source, changes in ((trained, {"num_experts": 4}), (exported, {"embed_dim": 16})):
        with pytest.raises(UserError, match=f"checkpoint {source}.*") as raised:
            run.build_detector(other(**changes), str(source))
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="experts: 2 there, 4 in the model"):
        run.test(other(num_experts=4), str(trained))
    with pytest.raises(UserError, match="size mismatch"):
        run.test(other(num_experts=4), str(exported))
    with pytest.raises(UserError, match=r"nothing\.pth"):
        run.test(other(), str(tmp_path / "nothing.pth"))


def test_another_detector_starts_from_its_backbone(data, trained, tmp_path):
    pretrained = {"model__backbone__pretrained": str(trained)}
    new = run.build_detector(tiny_config(data, tmp_path / "new", **pretrained))
    new.init_weights()
    of_trunk = {n: t for n, t in weights(data, trained).items() if n.startswith("backbone.trunk.")}
    assert_equal(
        {n: t for n, t in new.state_dict().items() if n.startswith("backbone.trunk.")}, of_trunk
    )


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
def test_mmdets_own_test_script_gives_the_same(data, trained, exported, tmp_path):
    import mmdet

    config = tiny_config(data, tmp_path / "ours")
    ours = run.test(tiny_config(data, tmp_path / "ours"), str(trained))
    file = tmp_path / "config.py"
    config.work_dir = str(tmp_path / "theirs")
    config.dump(str(file))
    script = Path(mmdet.__file__).parent / ".mim/tools/test.py"
    for source in (exported, trained):
        work_dir = tmp_path / f"theirs{source.suffix}"
        command = [sys.executable, script, file, source, "--work-dir", work_dir]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        record = next(work_dir.glob("*/*.json"))
        theirs = json.loads(record.read_text())
        assert {name: theirs[name] for name in ours} == pytest.approx(ours, abs=1e-3)


def test_classes_are_those_of_the_checkpoint_by_name(data, trained, exported, tmp_path):
    """Of a run, of a checkpoint and of a .pth file."""
    config = tiny_config(data, tmp_path / "run")
    for source in (trained, trained / "checkpoints/step-00000004", exported):
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


def test_the_configuration_in_a_pth_is_not_run(data, exported, tmp_path):
    """It is Python, which mmengine runs when it resumes."""
    state, marker = torch.load(exported)["state_dict"], tmp_path / "ran"
    meta = {"epoch": 0, "iter": 0, "config": f"import os\nos.mkdir({str(marker)!r})"}
    torch.save({"state_dict": state, "meta": meta}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w\.pth: its training cannot be resumed"):
        run.train(tiny_config(data, tmp_path / "run"), str(tmp_path / "w.pth"))
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", ["", "null", '{"score": "high"}', '{"score": NaN}', "[" * 100_000]
)
def test_a_damaged_record_of_the_best(content, tmp_path):
    from swinv2_moe.detection.hooks import _best_score

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


def test_killed_before_the_link_to_the_best(tmp_path):
    from swinv2_moe.detection.hooks import _best_score

    for step in (2, 4):
        (tmp_path / f"step-0000000{step}").mkdir()
    file, link = tmp_path / "best.json", tmp_path / "best"
    link.symlink_to("step-00000002")
    file.write_text('{"score": 0.5, "checkpoint": "step-00000004"}')
    assert _best_score(file, None) == 0.5
    assert os.readlink(link) == "step-00000004"
    warnings = []
    runner = SimpleNamespace(logger=SimpleNamespace(warning=warnings.append))
    for name in ("step-00000006", "../elsewhere"):  # removed by hand, or not of this run
        file.write_text(json.dumps({"score": 0.7, "checkpoint": name}))
        assert _best_score(file, runner) is None
    assert len(warnings) == 1  # of the second
    assert os.readlink(link) == "step-00000004"
