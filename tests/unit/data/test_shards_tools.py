"""data/make_shards.py and data/stage.py as a user runs them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tool_cases import command, snapshot

from swinv2_moe.data.build import build_data

ROOT = Path(__file__).parents[3]


def test_from_a_folder_to_a_local_disk_to_batches(
    make_folder, make_data, tmp_path, monkeypatch, capsys
):
    root, shards, local = make_folder(per_class=6), tmp_path / "shards", tmp_path / "local"
    make, stage = (command(name, monkeypatch, capsys, "data") for name in ("make_shards", "stage"))
    done = make("--data", root, "--output", shards, "--shard-mb", 0.01, "--workers", 2)
    assert done.status == 0, done.err
    assert f"{shards}: 2 classes" in done.out
    assert "train: 12 images in 4 shards, 0.0 MB" in done.out
    again = make("--data", root, "--output", shards, "--seed", 1)
    assert (again.status, again.err.count("\n")) == (2, 1)
    assert "was begun with seed 0, not 1" in again.err
    staged = stage(shards, local)
    assert staged.status == 0, staged.err
    assert f"{local}: 8 shards, " in staged.out
    assert "bytes/s" in staged.out
    assert stage(shards, shards).status == 2
    data = build_data(make_data({"DATA.DATASET": "shards", "DATA.PATH": str(local)}))
    assert sum(len(batch.targets) for batch in data.train_loader) == 12


def test_arguments_that_cannot_work(monkeypatch, capsys):
    make_shards = command("make_shards", monkeypatch, capsys, "data")
    lists = "DATA.TRAIN_LIST and DATA.VAL_LIST must name"
    for arguments, message in (
        ("", "give either --output"),
        ("--output x --index y", "give either --output"),
        ("--output x --workers 0", "--workers is 0, it must be at least 1"),
        ("--output x --shard-mb -1", "--shard-mb is -1.0, it must be at least 0.001"),
        ("--output x", "DATA.PATH (or --data) must name its directory"),
        ("--output x --dataset list --data .", lists),
        ("--output x --dataset foldr --data .", "did you mean folder?"),
        ("--index nowhere", "there is no train/*.tar"),
    ):
        done = make_shards(*arguments.split())
        assert done.status == 2
        assert message in done.err


@pytest.mark.slow
def test_a_killed_command_goes_on_to_the_same_shards(make_folder, tmp_path):
    root, whole, killed = make_folder(per_class=1500), tmp_path / "whole", tmp_path / "killed"
    call = [sys.executable, ROOT / "data/make_shards.py", "--data", root]
    call += ["--shard-mb", "0.05", "--workers", "2", "--output"]
    subprocess.run([*call, whole], check=True)
    for count in (3, 30, 100):
        run = subprocess.Popen([*call, killed])
        while run.poll() is None and len(list(killed.glob("*/*.members.json"))) < count:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        time.sleep(0.5)  # its workers notice
    subprocess.run([*call, killed], check=True)
    assert snapshot(killed) == snapshot(whole)
    assert [path.name for path in killed.rglob("*json")] == ["index.json"]
