"""Reading files that nobody has checked."""

import os
from pathlib import Path

import pytest

from moe_core.files import open_regular
from swinv2_moe.files import (
    check_inner_path,
    check_plain_name,
    parse_json,
    parse_yaml,
    read_bounded,
    read_json,
)


@pytest.mark.timeout(120)
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


def test_a_file_of_unknown_size_is_read_to_its_end() -> None:
    assert read_bounded("/proc/self/stat", 1 << 16).endswith(b"\n")  # its size is given as 0
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_bounded("/proc/self/stat", 10)


def test_what_names_no_file_is_an_os_error() -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="not a file name"):
            open_regular(name)


def test_json(tmp_path: Path) -> None:
    for text in (b"[" * 100_000, b"1" * 5000, b"\xff\xfe\xff", b"", b"{"):
        (tmp_path / "file.json").write_bytes(text)
        with pytest.raises(ValueError):  # noqa: PT011 - the decoder's own messages
            read_json(tmp_path / "file.json", 1 << 20)
    assert parse_json(b'{"a": [1]}') == {"a": [1]}


NO_NAMES = ["", ".", "..", "../a", "/a", "\ud800", None, 3]


@pytest.mark.parametrize("name", [*NO_NAMES, "a/b", "a\0b", "a\nb", "é" * 128, ["a"]])
def test_names_that_lead_elsewhere_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="is not a plain file name"):
        check_plain_name(name)


NO_PATHS = ["", ".", "..", "../a", "/a", None, 3]
NO_PATHS += ["a/.", "a/../../b", "a/..", "a//b", "a/", "a/b\0", "a\n/b"]


@pytest.mark.parametrize("path", NO_PATHS)
def test_paths_that_leave_their_directory_are_refused(path: object) -> None:
    with pytest.raises(ValueError, match="does not name a file below its directory"):
        check_inner_path(path)


def test_names_and_paths_in_their_directory_pass() -> None:
    for name in ("shard-000001.tar", "..a"):
        assert check_plain_name(name) == name
    for path in ("a.jpg", "train/a.jpg", "./a.jpg", "a..b/..c"):
        assert check_inner_path(path) == path


def alias_bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


def merge_bomb(levels: int) -> str:
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (alias_bomb(9), "too large with its aliases written out"),
        (merge_bomb(9), "too large with its aliases written out"),
        ("a: &a [*a]", "too large with its aliases written out"),
        ("a: &a " + "x" * 60_000 + "\nb: [*a, *a, *a]", "too large with its aliases written out"),
        ("[" + "1," * 30_000 + "]", "too large"),
        ("[" * 60_000, "nested more than 32 levels deep"),
        ("- " * 30_000, "nested more than 32 levels deep"),
        ("x" * 70_000, "longer than 65,536 characters"),
        ("a: " + "9" * 5000, "digits"),
        ("a: !!bool x", "not what its tag says"),
        ("a: !!timestamp x", "not what its tag says"),
        ("a: 2001-13-45", "month"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: *b", "undefined alias"),
        ("a: \0", "special characters are not allowed"),
        ("a: [1", "expected"),
        ("T: {E: 1}\nb: {c: 2}\nT: {F: 2}", "line 3: 'T' is there twice"),
        ("b: {c: 1, c: 2}", "line 1: 'c' is there twice"),
    ],
)
def test_yaml_that_cannot_be_used_is_a_value_error_of_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_yaml_with_its_aliases_is_read() -> None:
    expected = {"a": [1, 2], "b": [1, 2], "c": {"d": 3, "e": [1, 2]}}
    assert parse_yaml("a: &x [1, 2]\nb: *x\nc: {<<: {d: 3}, e: *x}") == expected
    assert parse_yaml("") is None
    assert parse_yaml(alias_bomb(3))["a2"][0][0] == ["x"] * 9
