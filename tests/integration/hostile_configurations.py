"""Configurations that must be refused, or mean what they say; `fuzz.py` uses them."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

Configuration = tuple[
    str, Callable[[Path], object], list[str] | None
]  # name, how to write it, options that say the same

KEYS = (
    "SEED",
    "TRAIN.EPOCHS",
    "TRAIN.BASE_LR",
    "MODEL.MOE.NUM_EXPERTS",
    "MODEL.SWINV2.DEPTHS",
    "DATA.DATASET",
    "OUTPUT",
)
VALUES = {  # a value that no key of KEYS takes
    "null": "null",
    "an object": "{a: 1}",
    "a deep list": "[" * 3000 + "]" * 3000,
    "NUL": '"a\\0b"',
    "NaN": ".nan",
    "infinity": ".inf",
    "a date": "2020-01-01",
    "5,000 digits": "9" * 5000,
    "a set": "!!set {a, b}",
    "binary": "!!binary aGVsbG8=",
    "a Python object": "!!python/object/apply:os.system ['touch /tmp/a-yaml-ran']",
    "an unknown tag": "!mine 3",
    "an unknown alias": "*nowhere",
}


def nested(key: str, value: str) -> str:
    """TRAIN.EPOCHS, 3 -> YAML."""
    *groups, name = key.split(".")
    lines = [f"{'  ' * depth}{group}:" for depth, group in enumerate(groups)]
    return "\n".join([*lines, f"{'  ' * len(groups)}{name}: {value}"]) + "\n"


def _text(content: str | bytes) -> Callable[[Path], object]:
    if isinstance(content, str):
        content = content.encode()
    return lambda file: file.write_bytes(content)


def _base_levels(levels: int, times: int) -> Callable[[Path], None]:
    """Each level names the next one several times."""

    def write(file: Path) -> None:
        for level in range(levels):
            name = file if level == 0 else file.with_name(f"level-{level}.yaml")
            name.write_text(f"BASE: [{', '.join(times * [f'level-{level + 1}.yaml'])}]\n")
        file.with_name(f"level-{levels}.yaml").write_text("SEED: 7\n")

    return write


def _circle(file: Path) -> None:
    file.write_text("BASE: [other.yaml]\n")
    file.with_name("other.yaml").write_text(f"BASE: [{file.name}]\n")


def _aliases(levels: int) -> str:
    """A list of lists of lists, ten times as long with each level."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join(10 * [f'*a{i - 1}'])}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


def _special() -> Iterator[Configuration]:
    yield "a named pipe", lambda file: os.mkfifo(file), None
    yield "/dev/zero", lambda file: file.symlink_to("/dev/zero"), None
    yield "a directory", lambda file: file.symlink_to("/tmp"), None
    yield "nothing", lambda file: file.symlink_to("nothing"), None
    yield "1 TB of holes", lambda file: file.touch() or os.truncate(file, 1 << 40), None
    yield (
        "a base that is a pipe",
        lambda file: os.mkfifo(file.with_name("p")) or file.write_text("BASE: [p]\n"),
        None,
    )
    yield "a base that is /dev/zero", _text("BASE: [/dev/zero]\n"), None
    yield "a base with NUL", _text('BASE: ["a\\0b"]\n'), None
    yield "a base that is a number", _text("BASE: [3]\n"), None
    yield "a base that is missing", _text("BASE: [missing.yaml]\n"), None
    yield "a circle of bases", _circle, None
    yield "a million bases", _text("BASE: [" + ", ".join(["a.yaml"] * 1_000_000) + "]\n"), None
    yield "24 levels, twice each", _base_levels(24, 2), ["SEED", "7"]
    yield "3 levels, twice each", _base_levels(3, 2), ["SEED", "7"]
    yield "2,000 levels", _base_levels(2000, 1), None
    yield "nine levels of aliases", _text(_aliases(9)), None
    yield (
        "aliases in a key that exists",
        _text(_aliases(9) + "MODEL: {SWINV2: {DEPTHS: *a8}}\n"),
        None,
    )
    yield "an alias within itself", _text("MODEL: &m {SWINV2: {DEPTHS: &d [*d]}}\n"), None
    yield (
        "a small alias",
        _text("SEED: &s 7\nTRAIN: {EPOCHS: *s, WARMUP_EPOCHS: 1}\n"),
        ["SEED", "7", "TRAIN.EPOCHS", "7", "TRAIN.WARMUP_EPOCHS", "1"],
    )
    yield "not UTF-8", _text(b"\xff\xfe\xff"), None
    yield "NUL", _text(b"SEED: 1\0\n"), None
    yield "a list", _text("[1, 2]\n"), None
    yield "two documents", _text("SEED: 1\n---\nSEED: 2\n"), None
    yield "10 MB of one line", _text("SEED: " + "9" * 10_000_000), None
    yield "100,000 keys", _text("".join(f"KEY{i}: {i}\n" for i in range(100_000))), None
    yield "deep groups", _text("{a: " * 3000 + "1" + "}" * 3000), None
    yield "an unknown key", _text("SEEED: 1\n"), None
    yield "a key that is a list", _text("[1, 2]: 3\n"), None
    yield "a key that is null", _text("null: 3\n"), None
    yield "a key that is a number", _text("3: 3\n"), None
    yield (
        "a merge key",
        _text("TRAIN: {<<: {EPOCHS: 7, WARMUP_EPOCHS: 1}}\n"),
        ["TRAIN.EPOCHS", "7", "TRAIN.WARMUP_EPOCHS", "1"],
    )
    yield "nothing in it", _text(""), []


def configurations(work: Path, count: int, rng: random.Random) -> Iterator[Configuration]:
    """The special ones, then values that no key takes."""
    found = list(_special())
    pairs = [(key, value) for key in KEYS for value in VALUES]
    rng.shuffle(pairs)
    for key, value in pairs[: count - len(found)]:
        found.append((f"{key}: {value}", _text(nested(key, VALUES[value])), None))
    yield from found[:count]
