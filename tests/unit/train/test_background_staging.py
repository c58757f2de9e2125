"""DATA.STAGE: the shards come while training reads them, and nothing else changes."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from swinv2_moe import tables
from swinv2_moe.config import data_config, load_config
from swinv2_moe.data import ImageArrays, Sources, load_sources
from swinv2_moe.data.prepare import staging
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.shards import ShardFile
from swinv2_moe.errors import UserError
from swinv2_moe.train.arrival import in_order_of_use
from swinv2_moe.train.run import train

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """200 digits as shards of some 20 images."""
    digits = load_sources(data_config(load_config(ROOT / "configs/quickstart_digits.yaml")))
    root = tmp_path_factory.mktemp("made") / "shards"
    parts = []
    for source in (digits.train, digits.val):
        parts.append(ImageArrays("digits", source.images, source.targets))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables.TransferBar, "start", lambda self: None)
        sources = Sources(parts[0], parts[1], digits.class_names)
        make_shards(sources, str(root), ShardOptions(shard_mb=0.03), 1)
    assert len(list(root.rglob("train/*.tar"))) > 5
    return root


def keys_for(made: Path, **more) -> dict:
    keys = {"DATA.DATASET": "shards", "DATA.PATH": str(made)}
    keys |= {"DATA.BATCH_SIZE": 16, "TRAIN.EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0}
    return keys | more


def losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "loss" in record]


def content(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "staging.json"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def unstaged(made, make_config, tmp_path_factory) -> list[float]:
    output = tmp_path_factory.mktemp("unstaged")
    train(make_config(output, keys_for(made)))
    return losses(output)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_source_changes_the_time_alone(
    made, unstaged, make_config, tmp_path, monkeypatch, workers
):
    late = []
    check = staging._Reading._copy_checked

    def slow(self, file):
        if file.name.endswith(".tar"):
            time.sleep(0.1)
            late.append(file.name)
        check(self, file)

    monkeypatch.setattr(staging._Reading, "_copy_checked", slow)
    local = tmp_path / "local"
    keys = keys_for(made, **{"DATA.STAGE": str(local), "DATA.NUM_WORKERS": workers})
    summary = train(make_config(tmp_path / "run", keys | {"TRACKER": "mlperf"}))
    assert losses(tmp_path / "run") == unstaged
    assert content(local) == content(made)
    assert len(late) == len(list(made.rglob("*.tar")))
    record = json.loads((local / "staging.json").read_text())
    assert record["overlapped"] is True
    assert summary["staging_seconds"] == record["seconds"]
    assert "staging" not in summary["phases"]  # the waiting is in "data"
    log = (tmp_path / "run/events.log").read_text()
    assert log.count('"staging_start"') == log.count('"staging_stop"') == 1
    assert log.index('"init_start"') < log.index('"staging_stop"') < log.index('"run_stop"')
    # the next run reads nothing from the source
    hidden = tmp_path / "hidden"
    shutil.copytree(made, hidden)
    for tar in hidden.rglob("*.tar"):
        tar.write_bytes(b"")
    again = keys | {"DATA.PATH": str(hidden)}
    train(make_config(tmp_path / "again", again))
    assert losses(tmp_path / "again") == unstaged


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_ends_the_run_with_its_name(made, make_config, tmp_path, workers):
    source = tmp_path / "source"
    shutil.copytree(made, source)
    bad = source / "train/000003.tar"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-600] + bytes([1]) + whole[-599:])
    local = tmp_path / "local"
    keys = keys_for(source, **{"DATA.STAGE": str(local), "DATA.NUM_WORKERS": workers})
    keys |= {"TRAIN.EPOCHS": 50}
    with pytest.raises(UserError) as caught:
        train(make_config(tmp_path / "run", keys))
    assert str(caught.value) == (
        f"staging the data failed: {bad}: is damaged: its size or checksum is not the one that"
        " index.json records"
    )
    assert not (local / "index.json").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "staging"]
    # mended, the same command goes on
    bad.write_bytes(whole)
    train(make_config(tmp_path / "mended", keys | {"TRAIN.EPOCHS": 1}))
    assert content(local) == content(made)


def test_what_cannot_be_staged_is_refused_at_the_start(made, make_config, tmp_path):
    def refusal(**keys) -> str:
        with pytest.raises(UserError) as caught:
            train(make_config(tmp_path / "run", keys_for(made, **keys)))
        assert not (tmp_path / "run/metrics.jsonl").exists()
        return str(caught.value)

    local = tmp_path / "local"
    message = refusal(**{"DATA.STAGE": str(local), "DATA.DATASET": "folder"})
    assert message.startswith(f"DATA.STAGE is {str(local)!r}: it copies shards, DATA.DATASET is")
    assert "that is SHARDS itself" in refusal(**{"DATA.STAGE": str(made)})
    (tmp_path / "file").touch()
    assert "cannot be made" in refusal(**{"DATA.STAGE": str(tmp_path / "file")})
    other = tmp_path / "other"
    other.mkdir()
    (other / "index.json").write_text("{}")
    assert "it holds other shards than" in refusal(**{"DATA.STAGE": str(other)})


def test_shards_come_in_the_order_of_their_first_use():
    files = [ShardFile("train/members.npy", 1, ""), ShardFile("val/members.npy", 1, "")]
    train_files = [ShardFile(f"train/{number}.tar", 1, "") for number in range(4)]
    files += train_files
    files.append(ShardFile("val/0.tar", 1, ""))
    order = in_order_of_use(files, np.array([2, 2, 0, 2, 3, 0]))
    assert order[:3] == [train_files[2], train_files[0], train_files[3]]
    assert sorted(order) == sorted(files)  # an unused one comes too


@pytest.mark.slow
def test_two_nodes_read_the_source_once(made, make_config, tmp_path):
    # each process takes its own directory, as each node has its own disk
    program = tmp_path / "train.py"
    program.write_text(
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "os.environ['LOCAL_RANK'] = '0'\n"
        "sys.argv = [word.replace('RANK', rank) for word in sys.argv]\n"
        "from swinv2_moe.commands import run\n"
        "run('train')\n"
    )
    shared = keys_for(made, **{"DATA.NUM_WORKERS": 0, "DATA.BATCH_SIZE": 16})
    found = {}
    for name, stage in (("staged", str(tmp_path / "localRANK")), ("unstaged", "")):
        file = tmp_path / f"{name}.yaml"
        file.write_text(make_config(tmp_path / name, shared).dump())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2"]
        command += [str(program), "--cfg", str(file), "--output", str(tmp_path / name)]
        if stage:
            command += ["--opts", "DATA.STAGE", stage]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = losses(tmp_path / name)
    assert found["staged"] == found["unstaged"]
    from_source = 0
    for rank in (0, 1):
        local = tmp_path / f"local{rank}"
        assert content(local) == content(made)
        from_source += json.loads((local / "staging.json").read_text())["source_bytes"]
    sizes = [len(data) for name, data in content(made).items() if name != "index.json"]
    assert from_source == sum(sizes)
