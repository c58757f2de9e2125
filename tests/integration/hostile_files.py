"""What is done to good files to make them damaged or hostile ones; `fuzz.py` uses it.

A change is a pair of a description and a function of the file's path.
"""

import hashlib
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

Change = tuple[str, Callable[[Path], object]]

DEEP = b"[" * 100_000
# Raw JSON: what stands in the place of a value.
JSON_VALUES = {
    "null": "null",
    "true": "true",
    "-1": "-1",
    "0.5": "0.5",
    "1e308": "1e308",
    "NaN": "NaN",
    "2**63": str(2**63),
    "5,000 digits": "9" * 5000,
    "empty text": '""',
    "NUL": '"a\\u0000b"',
    "a name that leads outside": '"../../../secret"',
    "an absolute name": '"/etc/passwd"',
    "1 MB of text": '"' + "x" * 1_000_000 + '"',
    "a list": "[]",
    "an object": "{}",
    "a deep list": "[" * 500 + "]" * 500,
    "a very deep list": "[" * 50_000 + "]" * 50_000,
    "a surrogate": '"\\ud800"',
}


# 1. Any file


def flip_bit(position: float) -> Change:
    """One bit, at this share of the file."""

    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        bit = min(int(position * 8 * len(content)), 8 * len(content) - 1)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)

    return f"bit flipped at {position:.4f}", change


def cut(position: float) -> Change:
    return f"cut at {position:.4f}", lambda file: os.truncate(
        file, int(position * file.stat().st_size)
    )


def zero_block(position: float) -> Change:
    """512 bytes, as a lost sector."""

    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        start = int(position * len(content))
        end = min(start + 512, len(content))
        content[start:end] = bytes(end - start)
        file.write_bytes(content)

    return f"512 bytes zero at {position:.4f}", change


def replace_by(content: bytes, name: str) -> Change:
    return f"replaced by {name}", lambda file: file.write_bytes(content)


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


SPECIAL: list[Change] = [
    ("deleted", lambda file: file.unlink()),
    ("empty", lambda file: file.write_bytes(b"")),
    ("a named pipe", _instead(os.mkfifo)),
    ("a directory", _instead(lambda file: file.mkdir())),
    ("a link to /dev/zero", _instead(lambda file: file.symlink_to("/dev/zero"))),
    ("a link to nothing", _instead(lambda file: file.symlink_to("nothing"))),
    ("a link to itself", _instead(lambda file: file.symlink_to(file.name))),
    ("1 TB of holes", lambda file: os.truncate(file, 1 << 40)),
]


def random_damage(rng: random.Random) -> Change:
    makers = (flip_bit, flip_bit, cut, zero_block)
    return rng.choice(makers)(rng.random())


# 2. JSON


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value within a JSON value, itself included."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def edit_json(path: tuple, name: str, seal: Callable[[str], str] = lambda text: text) -> Change:
    """A value of JSON_VALUES, or nothing ("removed"), at a place. `seal` makes the checksum right
    again."""
    marker = "a place for raw JSON"

    def change(file: Path) -> None:
        content = json.loads(file.read_text())
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        if name == "removed":
            del inner[path[-1]]
        elif path:
            inner[path[-1]] = marker
        else:
            content = marker
        text = json.dumps(content, indent=1)
        if name != "removed":
            text = text.replace(json.dumps(marker), JSON_VALUES[name])
        file.write_text(seal(text), errors="surrogatepass")

    return f"{'/'.join(map(str, path)) or 'all'}: {name}", change


def random_edit(
    content: object, rng: random.Random, seal: Callable[[str], str] = lambda text: text
) -> Change:
    path = rng.choice(list(places(content)))
    names = [*JSON_VALUES, *(["removed"] if path else [])]
    return edit_json(path, rng.choice(names), seal)


def seal_meta(text: str) -> str:
    """A checkpoint's meta.json with the checksum that belongs to the rest of it, where it still has
    one."""
    try:
        checksum = json.loads(text)["checksum"]
        if not isinstance(checksum, str) or len(checksum) != 64:
            return text
    except (ValueError, KeyError, TypeError, RecursionError):
        return text
    blank = text.replace(checksum, "0" * 64)
    return blank.replace("0" * 64, hashlib.sha256(blank.encode()).hexdigest())


# 3. safetensors


def edit_header(edit: Callable[[dict, random.Random], None], name: str, seed: int) -> Change:
    """The header of a safetensors file, changed; the data stays."""

    def change(file: Path) -> None:
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        edit(header, random.Random(seed))
        new = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + length :])

    return f"header: {name} ({seed})", change


def _tensor(header: dict, rng: random.Random) -> dict:
    return header[rng.choice([name for name in header if name != "__metadata__"])]


def _huge_shape(header: dict, rng: random.Random) -> None:
    _tensor(header, rng)["shape"] = [1 << 40, 1 << 20]


def _negative_shape(header: dict, rng: random.Random) -> None:
    _tensor(header, rng)["shape"] = [-1]


def _other_type(header: dict, rng: random.Random) -> None:
    _tensor(header, rng)["dtype"] = rng.choice(["I32", "U32", "BOOL", "C64", "F64", "X9", None])


def _shifted(header: dict, rng: random.Random) -> None:
    tensor = _tensor(header, rng)
    tensor["data_offsets"] = [offset + 4 for offset in tensor["data_offsets"]]


def _past_the_end(header: dict, rng: random.Random) -> None:
    _tensor(header, rng)["data_offsets"] = [0, 1 << 50]


def _renamed(header: dict, rng: random.Random) -> None:
    name = rng.choice([name for name in header if name != "__metadata__"])
    header["../" + name + "\0"] = header.pop(name)


def _no_record(header: dict, rng: random.Random) -> None:
    name = rng.choice([name for name in header if name != "__metadata__"])
    header[name] = rng.choice([None, [], "x", {}])


HEADER_EDITS = (
    _huge_shape,
    _negative_shape,
    _other_type,
    _shifted,
    _past_the_end,
    _renamed,
    _no_record,
)


def header_edits(count: int) -> list[Change]:
    edits = [HEADER_EDITS[i % len(HEADER_EDITS)] for i in range(count)]
    return [edit_header(edit, edit.__name__.strip("_"), i) for i, edit in enumerate(edits)]


def header_length(length: int) -> Change:
    def change(file: Path) -> None:
        file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])

    return f"header of {length:,} bytes", change


# 4. torch's files


def rewrite_pth(edit: Callable[[dict], object], name: str, **options) -> Change:
    """What the file holds, changed and saved again."""

    def change(file: Path) -> None:
        torch.save(edit(torch.load(file, weights_only=True)), file, **options)

    return name, change


def rewrite_zip(
    edit: Callable[[str, bytes], bytes | None], name: str, compression: int = zipfile.ZIP_STORED
) -> Change:
    """Each record of the zip, with its checksum made right again; None leaves a record out."""

    def change(file: Path) -> None:
        with zipfile.ZipFile(file) as source:
            records = [(info.filename, source.read(info)) for info in source.infolist()]
        new = io.BytesIO()
        with zipfile.ZipFile(new, "w", compression) as target:
            for record, content in records:
                content = edit(record, content)
                if content is not None:
                    target.writestr(record, content)
        file.write_bytes(new.getvalue())

    return name, change


def _one(function: Callable[[torch.Tensor], object]) -> Callable[[dict], dict]:
    def edit(content: dict) -> dict:
        state = dict(content["model"])
        name = max(state, key=lambda name: state[name].numel())
        return {"model": state | {name: function(state[name])}}

    return edit


class Runs:
    """A pickle that starts a program, if anything runs it."""

    def __reduce__(self):
        return os.system, ("touch /tmp/a-pickle-ran",)


def _first_records(count: int, new: bytes) -> Callable[[str, bytes], bytes]:
    """The first data records replaced: compressing all of them would take minutes."""
    names = tuple(f"/data/{number}" for number in range(count))
    return lambda record, content: new if record.endswith(names) else content


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


def _data_record(edit: Callable[[bytes], bytes]) -> Callable[[str, bytes], bytes]:
    def change(record: str, content: bytes) -> bytes:
        return edit(content) if "/data/" in record else content

    return change


def _without(part: str) -> Callable[[str, bytes], bytes | None]:
    return lambda record, content: None if part in record else content


def _program(record: str, content: bytes) -> bytes:
    return pickle.dumps(Runs()) if record.endswith(".pkl") else content


def pth_changes() -> list[Change]:
    """Those that a random damage would hardly find."""

    def same(record: str, content: bytes) -> bytes:
        return content

    half, none = _data_record(lambda data: data[: len(data) // 2]), _data_record(lambda data: b"")
    longer = _data_record(lambda data: data + b"\0" * 64)
    bomb = _first_records(3, b"\0" * (1 << 29))
    huge = _one(lambda t: torch.zeros(1).expand(1 << 31))
    old = {"_use_new_zipfile_serialization": False}
    return [
        rewrite_zip(same, "records compressed", zipfile.ZIP_DEFLATED),
        rewrite_zip(same, "records compressed by LZMA", zipfile.ZIP_LZMA),
        rewrite_zip(half, "records of half the length"),
        rewrite_zip(none, "records of no length"),
        rewrite_zip(longer, "records that are too long"),
        rewrite_zip(bomb, "a zip bomb", zipfile.ZIP_DEFLATED),
        rewrite_zip(_without("/data/"), "no records"),
        rewrite_zip(_without("data.pkl"), "no pickle"),
        rewrite_zip(_program, "a program"),
        rewrite_pth(huge, "a tensor of 8 GB in 4 bytes"),
        rewrite_pth(_one(lambda t: t.int()), "integers"),
        rewrite_pth(_one(lambda t: t.to(torch.complex64)), "complex numbers"),
        rewrite_pth(_one(lambda t: t.bool()), "booleans"),
        rewrite_pth(_one(_with_nan), "a NaN"),
        rewrite_pth(_one(lambda t: t[:-1].clone()), "a row less"),
        rewrite_pth(_one(lambda t: None), "None"),
        rewrite_pth(_one(lambda t: {"a": t}), "a dictionary in place of a tensor"),
        rewrite_pth(_one(lambda t: t.to_sparse()), "a sparse tensor"),
        rewrite_pth(_one(lambda t: torch.empty(t.shape, device="meta")), "a tensor without data"),
        rewrite_pth(lambda content: list(content["model"].values()), "a list"),
        rewrite_pth(lambda content: {}, "nothing"),
        rewrite_pth(lambda content: {"model": {}}, "an empty model"),
        rewrite_pth(_numbered, "numbers as names"),
        rewrite_pth(lambda content: content, "as before torch 1.6", **old),
        rewrite_pth(huge, "8 GB before 1.6", **old),
        replace_by(pickle.dumps({"model": 1}), "a plain pickle"),
        replace_by(pickle.dumps(Runs()), "a pickle that runs a program"),
        replace_by(b"PK\x03\x04" + bytes(range(256)), "half a zip"),
        replace_by(b"\x80\x02" + b"(" * 100_000, "a deep pickle"),
        replace_by(b"<html>404</html>", "a web page"),
    ]


def _numbered(content: dict) -> dict:
    return {"model": dict(enumerate(content["model"].values()))}
