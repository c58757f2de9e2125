"""tools/train.py on folders of JPEGs: training, resuming, and every input that cannot work."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tool_cases import assert_one_line

from swinv2_moe.config import load_config
from swinv2_moe.train.run import train

CONFIG = Path(__file__).parents[2] / "configs" / "imagenette_96.yaml"
CFG = ("--cfg", CONFIG)


def snapshot(directory):
    return {
        path: (path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in [directory, *directory.rglob("*")]
    }


def test_training_with_a_broken_file_then_more(
    make_photographs, start_ranks, train_command, small, tmp_path
):
    data, run = make_photographs(broken=1), tmp_path / "run"
    arguments = [*CFG, "--data", data, "--output", run, "--opts", *small]
    arguments += ["DATA.MAX_BAD_SHARE 0.05 SEED 3"]
    stopped = [*arguments, "TRAIN.MAX_STEPS 3"]  # three steps of 16 are the first epoch
    (first,) = start_ranks(1, "tools/train.py", *stopped)
    assert (first.status, first.err) == (0, "")
    assert "1 of 64 images could not be read; the first: " in first.out
    assert "red/00.jpg" in first.out.replace("\\", "/")
    assert "48 + 16 images, 2 classes" in first.out
    assert json.loads((run / "summary.json").read_text())["unreadable_images"] == 1

    more = train_command(*arguments[:6], "--resume", "auto", *arguments[6:])
    assert (more.status, more.err) == (0, "")
    assert "resuming from" in more.out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["epoch"] for line in lines if "train_loss" in line] == [1, 2]


def test_too_many_broken_files_stop_the_run(make_photographs, train_command, small, tmp_path):
    data = make_photographs(broken=6)
    finished = train_command(*CFG, "--data", data, "--output", tmp_path / "run", "--opts", *small)
    says = "images could not be read ... DATA.MAX_BAD_SHARE allows a share of 0.01 ... .jpg"
    assert finished.status == 2
    assert finished.err.startswith("error: ")
    assert finished.err.count("\n") == 1
    assert [part for part in says.split(" ... ") if part not in finished.err] == []


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, photographs, small):
    """A finished run among other outputs, and weight files that do not fit."""
    root = tmp_path_factory.mktemp("outputs")
    opts = [*small, "TRAIN.MAX_STEPS", "1"]
    train(load_config(CONFIG, opts, data=str(photographs), output=str(root / "run")))
    (root / "a_file").write_text("mine")
    (root / "empty").mkdir()
    (root / "no_images" / "train" / "red").mkdir(parents=True)
    (root / "no_images" / "val" / "red").mkdir(parents=True)
    tensors = {"head.fc.weight": torch.zeros(2, 2), "surplus": torch.zeros(1)}
    save_file(tensors, root / "weights.safetensors")
    return root


# what is wrong: arguments after the good ones ({root} is the outputs' directory), and what the line
# must name
BAD_INPUT = {
    "--data {root}/nowhere": "DATA.PATH ... nowhere",
    "--data {root}/empty": "DATA.PATH ... empty ... train",
    "--data {root}/no_images": "no_images ... no images",
    "--data {root}/a_file": "DATA.PATH ... a_file",
    "--opts MODEL.NUM_CLASSES 3": "MODEL.NUM_CLASSES is 3 ... 2 classes",
    "--opts DATA.IMG_SIZE 20": "DATA.IMG_SIZE is 20 ... MODEL.SWINV2.WINDOW_SIZE",
    "--opts TRAIN.BASE_LRR 1": "unknown key TRAIN.BASE_LRR ... did you mean TRAIN.BASE_LR?",
    "--cfg {root}/none.yaml": "none.yaml ... cannot be read",
    "--opts DATA.BATCH_SIZE 64": "DATA.BATCH_SIZE is 64 ... 48",
    "--resume {root}/empty": "--resume ... empty ... holds no checkpoint",
    "--resume {root}/a_file": "--resume ... a_file: is a file ... must be a run, a checkpoint or",
    "--resume {root}/run --opts MODEL.MOE.NUM_EXPERTS 8": (
        "layers.1.blocks.0.mlp.moe.experts: 4 there, 8 in the model ... nothing was loaded"
    ),
    "--opts MODEL.PRETRAINED {root}/weights.safetensors": (
        "head.fc.weight ([2, 2] there ... MODEL.CLASS_MAP new ... "
        "weights.safetensors ... missing:  ... surplus ... nothing was loaded"
    ),
    "--opts MODEL.PRETRAINED {root}/none.pth": "none.pth ... no such file",
    "--opts MODEL.PRETRAINED {root}/empty": "MODEL.PRETRAINED ... empty",
    "--output {root}/run": "--output ... already holds a run",
    "--output {root}/a_file": "--output ... a_file ... is a file",
    "--opts AUG.AUTO_AUGMENT rnad-m9": "AUG.AUTO_AUGMENT ... rnad-m9",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_one_line_and_touches_nothing(
    words, photographs, outputs, train_command, small, tmp_path
):
    options, _, keys = words.partition("--opts")
    before = snapshot(outputs)
    good = [*CFG, "--data", photographs, "--output", tmp_path / "some" / "new"]
    finished = train_command(*good, options, "--opts", *small, keys, root=outputs)
    assert_one_line(finished, BAD_INPUT[words])
    assert snapshot(outputs) == before
    assert list(tmp_path.iterdir()) == []


def test_bad_input_in_a_process_of_its_own(outputs, start_ranks, tmp_path):
    before = snapshot(outputs)
    arguments = [*CFG, "--data", outputs / "nowhere", "--output", tmp_path / "new"]
    (finished,) = start_ranks(1, "tools/train.py", *arguments)
    assert_one_line(finished, "DATA.PATH ... nowhere")
    assert snapshot(outputs) == before
    assert list(tmp_path.iterdir()) == []
