"""Real photographs, where the machine has them: a few of two classes, one epoch."""

import json
import os
import tarfile
from pathlib import Path

import pytest

DATA = Path(os.environ.get("SWINV2_MOE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
TAR = DATA / "imagenette224_small" / "imagenette224_small.tar"


@pytest.mark.skipif(
    not TAR.is_file(),
    reason="imagenette224_small.tar is neither in SWINV2_MOE_TEST_DATA nor in ../shared/data",
)
def test_one_epoch_on_photographs(train_command, tmp_path, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    with tarfile.open(TAR) as tar:
        images = [
            member for member in tar.getmembers() if member.isfile() and "/n0" in f"/{member.name}"
        ]
        classes = sorted({Path(member.name).parent.name for member in images})[:2]
        chosen = [m for m in images if Path(m.name).parent.name in classes]
        tar.extractall(tmp_path / "photographs", members=chosen, filter="data")
    root = next((tmp_path / "photographs").rglob("train")).parent
    opts = (
        "DATA.IMG_SIZE 48 DATA.BATCH_SIZE 32 DATA.NUM_WORKERS 0 MODEL.SWINV2.WINDOW_SIZE 6 DEVICE"
        " cpu MODEL.SWINV2.DEPTHS [1,1,2] MODEL.SWINV2.NUM_HEADS [3,6,12]"
        " MODEL.SWINV2.PRETRAINED_WINDOW_SIZES [0,0,0] MODEL.SWINV2.PATCH_SIZE 4"
        " MODEL.SWINV2.EMBED_DIM 48 MODEL.MOE.BLOCKS [[],[],[1]] MODEL.MOE.NUM_EXPERTS 4"
        " TRAIN.EPOCHS 1 TRAIN.WARMUP_EPOCHS 0"
    )
    words = ["--cfg", "configs/imagenette_96.yaml", "--data", root, "--output", tmp_path / "run"]
    finished = train_command(*words, "--opts", opts)
    assert (finished.status, finished.err) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["unreadable_images"] == 0
    assert summary["epochs"] == 1
    assert 0 < summary["val_top1"] <= 100
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["train_loss"] < 1.5  # ln 2 is chance
