"""Reading files that nobody has checked."""

import os
from pathlib import Path

import pytest

from moe_core import open_regular
from swinv2_moe.files import check_plain_name, parse_json, read_bounded, read_json


@pytest.mark.timeout(20)
def test_a_named_pipe_or_a_device_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert open_regular(tmp_path / "file").read() == b"content"
    assert read_bounded(tmp_path / "file", 7) == b"content"


def test_a_large_file_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        read_bounded(tmp_path / "large", 1000)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"1" * 5000, b"\xff\xfe\xff", b"", b"{"])
def test_what_is_not_usable_json_is_a_value_error(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(text)
    with pytest.raises(ValueError):  # noqa: PT011 - the decoder's own messages
        read_json(tmp_path / "file.json", 1 << 20)


def test_json_is_read() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "/a", "a\0b", None, 3, ["a"]])
def test_names_that_lead_elsewhere_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="is not a plain file name"):
        check_plain_name(name)


def test_plain_names_pass() -> None:
    assert check_plain_name("shard-000001.tar") == "shard-000001.tar"
    assert check_plain_name("..a") == "..a"
