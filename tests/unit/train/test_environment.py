"""A run records the commit of its code, whether files have changed since, and no other commit."""

import os
import shutil
import subprocess

import pytest

from swinv2_moe.ranks.environment import commit_of


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # signing, hooks
    monkeypatch.delenv("GIT_DIR", raising=False)  # of a hook that runs the tests

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert commit_of(tmp_path) is None  # as an unpacked archive
    git("init")
    assert commit_of(tmp_path) is None  # nothing is committed
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-m", "First")
    commit = git("rev-parse", "HEAD")
    assert len(commit) >= 40
    (tmp_path / "notes.txt").write_text("not tracked")
    assert commit_of(tmp_path) == commit
    (tmp_path / "code.py").write_text("2, of another size")
    assert commit_of(tmp_path) == f"{commit}+"
    assert commit_of(inside) is None  # a package that is installed inside of a repository
