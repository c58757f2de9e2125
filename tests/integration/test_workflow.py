"""tools/workflow.py on a few of the photographs: every step of the chain, and the same command
again."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SWINV2_MOE_TEST_DATA", ROOT.parent / "shared" / "data"))
TARS = [DATA / name / f"{name}.tar" for name in ("tinyimagenet64", "imagenette224_small")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all(tar.is_file() for tar in TARS),
        reason=f"{TARS[0].name} or {TARS[1].name} is not in {DATA}",
    ),
]


@pytest.fixture
def small_tars(tmp_path):
    """The first three classes of each, as tars."""
    return [_first_classes(tar, tmp_path / tar.stem) for tar in TARS]


def _first_classes(tar: Path, folder: Path) -> Path:
    with tarfile.open(tar) as whole:
        files = [
            member
            for member in whole.getmembers()
            if member.isfile() and member.name.count("/") == 2
        ]
        kept = sorted({member.name.split("/")[1] for member in files})[:3]
        files = [member for member in files if member.name.split("/")[1] in kept]
        whole.extractall(folder, files, filter="data")
    small = folder.with_suffix(".tar")
    with tarfile.open(small, "w") as part:
        for split in ("train", "val"):
            part.add(folder / split, split)
    return small


def test_the_whole_chain_and_again(small_tars, tmp_path):
    words = ["tools/workflow.py", "--pretrain", small_tars[0], "--transfer", small_tars[1]]
    words += ["--output", tmp_path / "out", "--epochs", 2, "--finetune-epochs", 3]
    keys = "--opts DATA.BATCH_SIZE 32 TRAIN.MAX_STEPS 3 DEVICE cpu DATA.NUM_WORKERS 0"
    command = [sys.executable, *map(str, words), *keys.split()]
    tables = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        tables.append([line for line in lines if "top-1," in line or "shot, " in line])
    assert len(tables[0]) == 3
    assert tables[0] == tables[1]  # nothing was trained again
    for name in ("8expert", "dense"):
        summary = json.loads((tmp_path / "out" / "finetuned" / name / "summary.json").read_text())
        assert summary["steps"] == 3
    assert (tmp_path / "out" / "staged" / "index.json").is_file()
