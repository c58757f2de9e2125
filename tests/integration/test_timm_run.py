"""A model of timm with experts through every command: MODEL.TYPE and MODEL.NAME select it."""

import json
import shutil

import pytest
from PIL import Image
from tool_cases import ROOT, command

from swinv2_moe.checkpoints.checkpoint import open_checkpoint

CONFIG = ROOT / "configs" / "vit_moe_digits.yaml"
ARGS = "patch_size=4 embed_dim=16 depth=2 num_heads=2 global_pool=avg"
KEYS = (
    "DEVICE cpu DATA.NUM_WORKERS 0 DATA.BATCH_SIZE 16 PRINT_FREQ 1 TRAIN.WARMUP_EPOCHS 0"
    " MODEL.MOE.BLOCKS [[0,1]]"
    " MODEL.MOE.NUM_EXPERTS 4 MODEL.MOE.CAPACITY_FACTOR 0 MODEL.MOE.GATE_NOISE 0"
    " MODEL.MOE.EVAL_CAPACITY_FACTOR 0 MODEL.DROP_PATH_RATE 0"
)
LAYERS = ["blocks.0.mlp.moe", "blocks.1.mlp.moe"]


def arguments(run, steps: int, batch_size: int = 16) -> list[str]:
    file = run.parent / "timm.yaml"
    file.write_text(f"BASE: [{CONFIG}]\nMODEL: {{ARGS: {ARGS}}}\n")
    opts = [*KEYS.split(), "DATA.BATCH_SIZE", str(batch_size), "TRAIN.MAX_STEPS", str(steps)]
    return ["--cfg", str(file), "--output", str(run), "--opts", *opts]


@pytest.fixture
def run_tool(monkeypatch, capsys):
    """`run_tool(name, *arguments)`: a command of tools/ in this process, which has to succeed."""

    def run(name: str, *words: object) -> str:
        finished = command(name, monkeypatch, capsys)(*words)
        assert (finished.status, finished.err) == (0, "")
        return finished.out

    return run


@pytest.fixture(scope="module")
def trained(start_ranks, tmp_path_factory):
    """A run of two steps in one process, to be read only."""
    run = tmp_path_factory.mktemp("timm") / "run"
    (ended,) = start_ranks(1, "tools/train.py", *arguments(run, steps=2))
    assert (ended.status, ended.err) == (0, "")
    return run


def losses(run) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_run_goes_on_with_its_experts_over_two_ranks(trained, run_tool, start_ranks, tmp_path):
    """The losses are those of one process: the global batch stays, and nothing is dropped."""
    run_tool("train", *arguments(tmp_path / "single", steps=4))
    run = tmp_path / "run"
    shutil.copytree(trained, run, symlinks=True)
    words = arguments(run, steps=4, batch_size=8)
    outcomes = start_ranks(2, "tools/train.py", *words, "--resume auto")
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    expected = losses(tmp_path / "single")
    found = losses(run)
    assert list(found) == list(expected) == [1, 2, 3, 4]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-4)  # as in test_ranks.py
    meta = open_checkpoint(run / "checkpoints" / "step-00000004").meta
    assert list(meta["experts"]) == LAYERS
    assert meta["windows"] == []


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["TRAIN.SHARD_TRUNK True", "TRAIN.USE_CHECKPOINT True"])
def test_its_blocks_are_sharded_and_recomputed(trained, start_ranks, tmp_path, keys):
    words = arguments(tmp_path / "two", steps=2, batch_size=8)
    outcomes = start_ranks(2, "tools/train.py", *words, *keys.split())
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert losses(tmp_path / "two") == pytest.approx(losses(trained), rel=1e-4)  # test_ranks.py


def test_it_is_evaluated_and_inspected(trained, run_tool, tmp_path):
    out = run_tool("evaluate", "--resume", trained, "--output", tmp_path / "evaluation.json")
    assert "360" in out
    out = run_tool("convert_checkpoint", "inspect", trained)
    assert f"timm, vit_tiny_patch16_224, {ARGS}, 16 px, 4 experts" in out


def test_its_routing_is_pictured(trained, run_tool, tmp_path):
    run_tool("show_routing", "--resume", trained, "--output", tmp_path / "routing", "--count", 3)
    found = json.loads((tmp_path / "routing" / "routing.json").read_text())
    assert list(found["layers"]) == ["blocks.0", "blocks.1"]
    assert sorted(found["figures"]) == ["classes.png", "load.png", "routing.png"]
    assert Image.open(tmp_path / "routing" / "routing.png").size[1] > 3 * 128


def test_features_and_report(trained, run_tool, tmp_path):
    run_tool("few_shot", "--resume", trained, "--shots", 1, "--output", tmp_path / "few_shot.json")
    run_tool("report", trained, "--output", tmp_path / "report.html")
    assert "Expert load, block 1" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_it_is_exported(trained, run_tool, tmp_path, kind):
    """The command compares the program with the model before it writes it."""
    if kind == "onnx":
        pytest.importorskip("onnxruntime", reason="needs the export extra")
    output = tmp_path / "exported"
    run_tool("export", "--resume", trained, "--output", output, "--format", kind)
    facts = json.loads((output / "model.json").read_text())
    assert facts["input"]["shape"] == [None, 3, 16, 16]


def test_weights_start_a_model_with_other_classes(trained, run_tool, tmp_path):
    """MODEL.CLASS_MAP new leaves out the classifier, whose name is the model's."""
    words = arguments(tmp_path / "new", steps=1)
    run_tool("train", *words, "MODEL.PRETRAINED", trained, "MODEL.CLASS_MAP", "new")


def test_a_single_file_and_back(trained, run_tool, tmp_path):
    file = tmp_path / "one.safetensors"
    run_tool("convert_checkpoint", "export", "single", trained, "--output", file)
    run_tool("convert_checkpoint", "import", "single", file, "--output", tmp_path / "back")
    out = run_tool("convert_checkpoint", "inspect", tmp_path / "back")
    assert "vit_tiny_patch16_224" in out
    tables = []
    for run in (trained, file):
        out = run_tool("evaluate", run, "--checkpoint", "latest")
        tables.append(out[out.index("images") :])
    assert tables[0] == tables[1]
