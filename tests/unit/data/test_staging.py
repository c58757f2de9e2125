"""Copying shards to a local disk: verified, resumed, and nothing half-copied under a final name."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tool_cases
from tool_cases import snapshot

from moe_core.files import temporary_name
from swinv2_moe import files
from swinv2_moe.data.prepare.staging import stage
from swinv2_moe.data.shards import load_shards
from swinv2_moe.errors import UserError
from swinv2_moe.locks import lock


def names(root: Path) -> set[str]:
    return set(snapshot(root))


def refusal(source: Path, target: Path, **keys) -> str:
    return tool_cases.refusal(stage, str(source), str(target), **keys)


def test_a_copy_is_the_same_and_is_timed(made, tmp_path):
    local = tmp_path / "disk/local"
    staged = stage(str(made), str(local))
    copied = snapshot(local)
    recorded = copied.pop("staging.json")
    record = json.loads(recorded)
    assert copied == snapshot(made)
    size = sum(len(content) for name, content in copied.items() if name != "index.json")
    assert (staged.bytes, staged.kept, staged.shards) == (size, 0, len(list(made.rglob("*.tar"))))
    assert record.pop("bytes") == record.pop("source_bytes") == size
    assert record == {"started": staged.started, "seconds": staged.seconds}
    assert staged.seconds > 0
    assert len(load_shards(str(local)).train) == 40
    again = stage(str(made), str(local))
    assert (again.bytes, again.kept) == (0, staged.shards + 2)
    # what took time is still known
    assert (local / "staging.json").read_bytes() == recorded


@pytest.mark.parametrize("trust", [False, True])
def test_only_what_is_missing_or_damaged_is_copied_again(made, tmp_path, trust):
    local = tmp_path / "local"
    stage(str(made), str(local))
    for name in ("index.json", "staging.json", "train/000001.tar"):
        (local / name).unlink()
    os.truncate(local / "val/000001.tar", 100)
    damaged = local / "train/000002.tar"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-2000] + bytes([1]) + whole[-1999:])
    temporary_name(local / "val/000000.tar").touch()  # of a copy that was killed
    again = stage(str(made), str(local), trust=trust)
    copied = ["train/000001.tar", "val/000001.tar"] + ["train/000002.tar"] * (not trust)
    assert again.bytes == sum((made / name).stat().st_size for name in copied)
    assert (damaged.read_bytes() == whole) is not trust
    assert not [name for name in names(local) if "tmp" in name]


@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_damaged_shard_is_named_and_not_copied(made, tmp_path, how):
    bad, local = made / "train/000001.tar", tmp_path / "local"
    whole = bad.read_bytes()
    half = whole[: len(whole) // 2]
    says = "is damaged: its size or checksum is not the one that index.json records"
    if how == "gone":
        bad.unlink()
        says = "cannot be read (No such file or directory)"
    else:
        bad.write_bytes(half if how == "cut" else half.ljust(len(whole), b"\0"))
    assert refusal(made, local, workers=2) == f"{bad}: {says}"
    assert not [name for name in names(local) if name == "train/000001.tar" or "tmp" in name]
    with pytest.raises(UserError, match="has no index"):
        load_shards(str(local))
    bad.write_bytes(whole)
    stage(str(made), str(local))
    assert len(load_shards(str(local)).train) == 40


def test_a_disk_that_is_too_small_or_fills_up(made, tmp_path, monkeypatch):
    local = tmp_path / "local"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert re.search(r"local': 0 MB are needed there, 0 MB are free$", refusal(made, local))
    write = files.HashedFile.write

    def full(self, content):
        if "000002" in self._file.name:
            write(self, content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(files.HashedFile, "write", full)
        message = refusal(made, local, workers=1)
    assert message == f"{local}/train/000002.tar: cannot be written (No space left on device)"
    there = names(local)
    assert there >= {"train/000000.tar", "train/000001.tar"}
    assert not there & {"train/000002.tar", "index.json"}
    assert not [name for name in there if "tmp" in name]
    assert stage(str(made), str(local)).kept == len(there - {"arriving.json"})


def test_directories_that_are_not_for_it(made, tmp_path):
    assert re.match(r"SHARDS is '.*': it has no index\.json", refusal(tmp_path, tmp_path / "local"))
    assert "that is SHARDS itself" in refusal(made, made)
    shutil.copytree(made, tmp_path / "other")
    index = tmp_path / "other/index.json"
    index.write_text(index.read_text().replace('"seed": 0', '"seed": 1'))
    assert "it holds other shards than" in refusal(made, tmp_path / "other")
    (tmp_path / "file").touch()
    assert "cannot be made" in refusal(made, tmp_path / "file")
    (tmp_path / "busy").mkdir()
    with lock(str(tmp_path / "busy")):
        assert "another process is writing there" in refusal(made, tmp_path / "busy")
