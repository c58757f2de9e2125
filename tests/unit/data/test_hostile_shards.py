"""Shards from anyone: whatever index.json, members.npy or a tar says, one clear line, and nothing
written elsewhere."""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tool_cases
from PIL import Image
from shard_cases import OPTIONS, SOURCES, edit_index

from swinv2_moe import files
from swinv2_moe.data.classes import class_names
from swinv2_moe.data.datasets import read_image
from swinv2_moe.data.prepare.index_shards import index_shards
from swinv2_moe.data.prepare.make_shards import make_shards
from swinv2_moe.data.prepare.staging import stage
from swinv2_moe.data.shards import MEMBER, load_shards

pytestmark = pytest.mark.timeout(300)  # pipes and devices would be read for ever


def refusal(function: Callable, *args) -> str:
    message = tool_cases.refusal(function, *args)
    assert len(message) < 1000
    return message


def refused_by_both(made: Path, says: str) -> None:
    """Reading and staging refuse the shards with these words, and staging writes nothing."""
    before = set(made.parent.parent.rglob("*"))
    assert says in refusal(load_shards, str(made))
    assert says in refusal(stage, str(made), str(made.parent / "local"))
    assert set(made.parent.parent.rglob("*")) == before


def shard(index: dict, number: int = 1) -> dict:
    return index["train"]["shards"][number]


# index.json

ELSEWHERE = ["../../x.tar", "/etc/x.tar", "a/b.tar", "..", ".", "", "a\0.tar", "a\n.tar"]
NAMES = [  # names that are none of shards, and what the line says
    *(
        (name, f"`swinv2-moe make-shards` writes it ({name!r} is not a plain file")
        for name in ELSEWHERE
    ),
    ("members.npy", "'members.npy', which does not end in .tar"),
    (".000000.tar.tmp", "which does not end in .tar"),
    ("000000.tar", "train: 2 shards have the name '000000.tar'"),
    ("\ud800.tar", "is not a plain file name"),
    (None, "no name, or not of its type"),
    ("x" * 10_000 + "/", "is not a plain file name"),
    ("x" * 10_000 + ".tar", "is not a plain file name"),
]
MEMBERS = [
    ("../../members.npy", "'../../members.npy' is not a plain file"),
    ("000000.tar", "train: members has the name '000000.tar'"),
]


def test_names_that_lead_elsewhere_or_are_none_of_shards(made: Path) -> None:
    for name, says in NAMES:
        edit_index(made, lambda index, name=name: shard(index).update(name=name))
        refused_by_both(made, says)
    edit_index(made, lambda index: shard(index).update(name="000001.tar"))
    for name, says in MEMBERS:
        edit_index(made, lambda index, name=name: index["train"]["members"].update(name=name))
        refused_by_both(made, says)


FIELDS = [
    (lambda i: i.update(format_version=True), "format version True, this program knows 1"),
    (lambda i: i.update(format_version=10**4000), "format version 1000"),
    (lambda i: i.update(train=[]), "(train is [])"),
    (lambda i: i["train"].pop("members"), "(KeyError: 'members')"),
    (lambda i: i["train"].update(shards=None), "(train: shards is None)"),
    (lambda i: i["train"]["shards"].insert(1, None), "(train: shard 1 is None)"),
    (lambda i: shard(i).update(bytes=-1), "shard 1 (000001.tar) has -1 bytes"),
    (lambda i: shard(i).update(bytes=10**4000), "has 1000"),
    (lambda i: shard(i).update(bytes=True), "(no bytes, or not of its type)"),
    (lambda i: shard(i).update(images=None), "(no images, or not of its type)"),
    (lambda i: shard(i).update(images=2**60), f"has images {2**60}"),
    (lambda i: shard(i).update(left_out=-1), "has left_out -1"),
    (lambda i: shard(i).update(sha256=None), "(no sha256, or not of its type)"),
    (lambda i: shard(i).update(sha256="0" * 63), "has the checksum '000"),
    (lambda i: i.update(class_names=None), "(no class_names, or not of its type)"),
    (lambda i: i.update(class_names=["a", 3]), "(no class_names, or not of its type)"),
    (lambda i: i.update(made=[1]), "(made is [1])"),
]


def test_a_field_that_cannot_be_is_named_with_its_value(made: Path) -> None:
    whole = (made / "index.json").read_text()
    for edit, says in FIELDS:
        edit_index(made, edit)
        refused_by_both(made, says)
        (made / "index.json").write_text(whole)


def test_an_index_that_is_no_object(made: Path) -> None:
    for content, says in (
        (b"null", "format version None"),
        (b"[" * 1_000_000, "is damaged (nested too deeply)"),
        (b'{"format_version": ' + b"1" * 5000 + b"}", "is damaged (Exceeds the limit"),
        (b"\xff\xfe", "is damaged"),
    ):
        (made / "index.json").write_bytes(content)
        assert says in refusal(load_shards, str(made))
    os.truncate(made / "index.json", 1 << 40)
    assert "cannot be read (larger than" in refusal(load_shards, str(made))


@pytest.mark.parametrize("name", ["index.json", "train/members.npy", "train/000001.tar"])
def test_a_pipe_or_a_device_in_the_place_of_a_file(made: Path, tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (made / name).unlink()
        make(made / name)
        assert "not a regular file" in refusal(load_shards, str(made))
        assert "not a regular file" in refusal(stage, str(made), str(tmp_path / "local"))


def test_a_pipe_where_staging_writes(made: Path, tmp_path: Path) -> None:
    (tmp_path / "local" / "train").mkdir(parents=True)
    os.mkfifo(tmp_path / "local" / "index.json")
    assert "not a regular file" in refusal(stage, str(made), str(tmp_path / "local"))


def test_a_shard_that_goes_on_beyond_its_size_is_not_copied_to_its_end(
    made: Path, tmp_path: Path, monkeypatch
) -> None:
    os.truncate(made / "train/000001.tar", 1 << 33)
    written = []
    write = files.HashedFile.write
    monkeypatch.setattr(
        files.HashedFile, "write", lambda self, part: written.append(len(part)) or write(self, part)
    )
    assert "000001.tar: is damaged" in refusal(stage, str(made), str(tmp_path / "local"), 1)
    assert sum(written) < 1 << 28


# members.npy


def test_a_header_is_read_again_where_threads_disturb_python(made, monkeypatch):
    """Python before 3.11.8 raises SystemError if two threads compile at the same time."""
    read, calls = np.lib.format.read_array_header_1_0, []

    def disturbed(file):
        calls.append(file.tell())
        found = read(file)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=48, after=45)")
        return found

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", disturbed)
    load_shards(str(made))
    assert len(calls) > 1
    assert len(set(calls)) == 1


def edit_rows(made: Path, edit: Callable[[np.ndarray], object]) -> None:
    rows = np.load(made / "train/members.npy")
    edit(rows)
    np.save(made / "train/members.npy", rows)


def test_an_offset_that_wraps_around_is_seen(made: Path) -> None:
    for offset in (2**64 - 100, 2**63):
        edit_rows(made, lambda rows, offset=offset: rows["offset"].put([2], [offset]))
        assert "rows that point beyond the end of their shard" in refusal(load_shards, str(made))


def test_an_image_of_gigabytes_within_a_shard_is_a_bad_image(made: Path) -> None:
    path, size = made / "train/000000.tar", 3 << 30
    os.truncate(path, size)
    edit_index(made, lambda index: shard(index, 0).update(bytes=size))
    edit_rows(made, lambda rows: rows["size"].put([2], [2**31]))
    source = load_shards(str(made)).train
    with pytest.raises(OSError, match="larger than 1,073,741,824 bytes"):
        source.read(2)
    assert read_image(source, 2, "RGB") is None
    assert read_image(source, 3, "RGB") is not None


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def rows(shape: str, descr: object = MEMBER.descr) -> bytes:
    """The header of an array, without its rows."""
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n")


def test_an_index_of_rows_that_is_none(made: Path) -> None:
    shapes = [rows("(-40,)"), rows(f"({10**30},)"), rows("()"), rows("(40,)")]
    kinds = [rows("(40,)", "'<u4'"), rows("(40,)", "'|O'")]
    headers = [npy("-" * 9000 + "1"), npy("[" * 9000), npy("x" * 60_000)]
    for content in (b"", b"PK\x03\x04" + bytes(100), *shapes, *kinds, *headers):
        (made / "train/members.npy").write_bytes(content)
        assert f"{made}/train/members.npy: " in refusal(load_shards, str(made))


# an unfinished directory


@pytest.fixture
def begun(made: Path) -> Path:
    """As `made`, but that the last step, members.npy and index.json, is still to be done."""
    index = json.loads((made / "index.json").read_text())
    for split in ("train", "val"):
        members = np.load(made / split / "members.npy")
        for number, record in enumerate(index[split]["shards"]):
            own = members[members["shard"] == number]
            places = [[int(row[key]) for key in ("offset", "size", "label")] for row in own]
            sidecar = made / split / f"{record.pop('name')}.members.json"
            sidecar.write_text(json.dumps(record | {"rows": places}))
        (made / split / "members.npy").unlink()
    (made / "plan.json").write_text(json.dumps(index["made"]))
    (made / "index.json").unlink()
    return made


def test_the_last_step_is_done(begun: Path, noise_shards: Path) -> None:
    make_shards(SOURCES, str(begun), OPTIONS, 1)
    assert (begun / "index.json").read_bytes() == (noise_shards / "index.json").read_bytes()


SIDECARS = [
    (lambda c: c.pop("rows"), "is not what was written here"),
    (lambda c: c["rows"].pop(), "is not what was written here"),
    (lambda c: c["rows"][0].__setitem__(0, 10**30), "is not what was written here"),
    (lambda c: c["rows"][0].__setitem__(0, -1), "rows out of range"),
    (lambda c: c["rows"][0].__setitem__(1, 2**32 + 1), "rows out of range"),
    (lambda c: c["rows"][0].__setitem__(2, None), "is not what was written here"),
    (lambda c: c.update(images=-1), "has images -1"),
    (lambda c: c.update(name="../../x.tar"), "'../../x.tar' is not a plain file name"),
]


def test_what_a_finished_shard_left_is_checked(begun: Path) -> None:
    sidecar = begun / "train/000001.tar.members.json"
    whole = sidecar.read_text()
    for edit, says in SIDECARS:
        content = json.loads(whole)
        edit(content)
        sidecar.write_text(json.dumps(content))
        message = refusal(make_shards, SOURCES, str(begun), OPTIONS, 1)
        assert message.startswith(f"{sidecar}: ")
        assert says in message
        assert message.endswith("; remove it")


@pytest.mark.parametrize("name", ["plan.json", "train/000001.tar.members.json"])
def test_a_plan_or_record_that_is_none(begun: Path, name: str) -> None:
    for content in (b"null", b"[1]", b"[" * 100_000, b"1" * 5000, None):
        (begun / name).unlink()
        (begun / name).write_bytes(content) if content else os.mkfifo(begun / name)
        message = refusal(make_shards, SOURCES, str(begun), OPTIONS, 1)
        assert message.startswith(f"{begun / name}: cannot be read")


def test_a_plan_with_a_number_of_images_that_cannot_be(begun: Path) -> None:
    plan = json.loads((begun / "plan.json").read_text())
    for count in (None, 0, -3, "5", 1.5):
        (begun / "plan.json").write_text(json.dumps(plan | {"train_images_per_shard": count}))
        message = refusal(make_shards, SOURCES, str(begun), OPTIONS, 1)
        assert f"train_images_per_shard {count!r}, it must be at least 1" in message


# other programs' tars


def add(tar: tarfile.TarFile, name: str, content: bytes, **fields) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in fields.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(content))


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


def foreign(root: Path, fill: Callable[[tarfile.TarFile], None]) -> str:
    shutil.rmtree(root, ignore_errors=True)
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        with tarfile.open(root / split / "a.tar", "w") as tar:
            add(tar, "ok.png", picture())
            add(tar, "ok.cls", b"0")
            fill(tar)
    return str(root)


def huge_size(tar: tarfile.TarFile) -> None:
    """A member whose header announces 2 to the power of 87 bytes."""
    member = tarfile.TarInfo("k.png")
    member.size = 2**87
    tar.fileobj.write(member.tobuf(tarfile.GNU_FORMAT))
    tar.offset += tarfile.BLOCKSIZE


def nested_headers(tar: tarfile.TarFile) -> None:
    """Headers of headers, more than Python calls within calls."""
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2
    for _ in range(3000):
        tar.fileobj.write(name.tobuf(tarfile.GNU_FORMAT) + b"a\0".ljust(tarfile.BLOCKSIZE, b"\0"))
        tar.offset += 2 * tarfile.BLOCKSIZE


def labelled(ending: str, label: bytes) -> Callable[[tarfile.TarFile], None]:
    """A picture k with this label."""
    return lambda tar: (add(tar, "k.png", picture()), add(tar, f"k.{ending}", label))


def test_tars_that_nobody_has_checked(tmp_path: Path) -> None:
    for fill, says in (
        (huge_size, "a.tar: is cut off or damaged"),
        (nested_headers, "a.tar: is cut off or damaged"),
        (labelled("cls", bytes(2 << 20)), "k: its .cls has 2,097,152 bytes"),
        (labelled("json", b"[" * 100_000), "a.tar: k has no label"),
        (labelled("json", b"1" * 5000), "a.tar: k has no label"),
        (labelled("json", b"null"), "a.tar: k has no label"),
        (labelled("cls", b"9" * 5000), "k: label '999"),
        (labelled("cls", b"2147483646"), "reach 2147483646 but 2147483645"),
        (lambda tar: add(tar, "a\nb\x1b.png", picture()), "a.tar: a b\\x1b has no label"),
    ):
        assert says in refusal(index_shards, foreign(tmp_path / "in", fill), 0, True, 1)


def test_what_is_no_file_in_a_tar_is_passed_over(tmp_path: Path) -> None:
    link = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
    root = foreign(tmp_path / "in", lambda tar: add(tar, "k.png", b"", **link))
    assert index_shards(root, 0, True, 1)["class_names"] == ["0"]


def test_a_pipe_in_the_place_of_a_tar(tmp_path: Path) -> None:
    root = foreign(tmp_path / "in", lambda tar: None)
    os.mkfifo(tmp_path / "in/train/b.tar")
    assert "b.tar: not a regular file" in refusal(index_shards, root, 0, False, 1)


def test_images_of_more_pixels_than_allowed_are_left_out_of_an_index(tmp_path: Path) -> None:
    def fill(tar: tarfile.TarFile) -> None:
        for number in range(120):
            add(tar, f"{number}.png", picture())
            add(tar, f"{number}.cls", b"0")
        add(tar, "z.png", (tmp_path / "large.png").read_bytes())
        add(tar, "z.cls", b"0")

    Image.new("L", (30, 20)).save(tmp_path / "large.png")
    index = index_shards(foreign(tmp_path / "in", fill), 0, True, 1, max_pixels=599)
    assert shard(index, 0)["left_out"] == 1
    assert shard(index, 0)["first_left_out"].endswith("a.tar: z.png")


# class names


@pytest.mark.parametrize("file", ["meta.json", "index.json"])
def test_class_names_that_are_none(tmp_path: Path, file: str) -> None:
    for content, says in (
        (b"null", "class_names is None"),
        (b"[1]", "class_names is None"),
        (b'{"class_names": "abc"}', "class_names is 'abc', it must be a list of strings"),
        (b'{"class_names": {"a": 1}}', "class_names is {'a': 1}"),
        (b'{"class_names": ["a", 3]}', "class_names is ['a', 3]"),
        (b'{"class_names": ' + b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "Exceeds the limit"),
    ):
        (tmp_path / file).write_bytes(content)
        assert says in refusal(class_names, str(tmp_path))


def test_class_names_of_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        assert "no class names can be read" in refusal(class_names, str(path))
