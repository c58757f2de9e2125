"""Tables of numbers in a terminal and in Markdown; how long a run will still take."""

from typing import NamedTuple

import pytest
from rich.console import Console

import swinv2_moe.tables
from swinv2_moe.tables import in_words, number_table, seconds_left, steps_left


def lines(table) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


def test_numbers_stand_on_the_right_and_text_on_the_left() -> None:
    rows = [["a", "1.0", "x"], ["bcd", "100.0", "yz"]]
    table = number_table(["name", "value", "note"], rows, text_columns=["name", "note"])
    head, _, first, second = lines(table)
    assert head.split() == ["name", "value", "note"]
    assert first.index("1.0") + 3 == second.index("100.0") + 5
    assert first.index("x") == second.index("yz")


def test_long_names_are_complete(monkeypatch, capsys) -> None:
    names = ["holiday/" + 40 * "very_long_" + ".jpg", "great white shark " * 9]
    table = number_table(["picture", "class"], [names], text_columns=["picture", "class"])
    assert sum(line.count("_") for line in lines(table)) == 80
    assert sum(line.count("shark") for line in lines(table)) == 9
    monkeypatch.setenv("COLUMNS", "60")  # no terminal: a line for each row
    swinv2_moe.tables.Console().print(table)
    assert "  ".join(names).strip() in capsys.readouterr().out


def test_markdown() -> None:
    found = lines(number_table(["", "ms"], [["a", "1"]], markdown=True))
    assert [line.replace(" ", "") for line in found] == ["||ms|", "|---|----|", "|a|1|"]


class At(NamedTuple):
    """Two epochs of three steps."""

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0
    epochs: int = 2
    max_steps: int = 0
    steps_per_epoch: int = 3


@pytest.mark.parametrize(
    ("position", "steps", "validations"),
    [
        (At(), 6, 2),
        (At(epoch_step=3, step=3), 3, 2),  # before the validation of the first epoch
        (At(epoch=1, epoch_step=3, step=6), 0, 1),
        (At(epoch=2, step=6), 0, 0),
        (At(max_steps=2), 2, 1),  # the last step is validated within an epoch
        (At(max_steps=4), 4, 2),
        (At(epoch=1, step=3, max_steps=2), 0, 0),
    ],
)
def test_what_is_left(position, steps, validations):
    assert steps_left(position) == steps
    assert seconds_left(position, 10.0) == 10 * steps
    assert seconds_left(position, 10.0, 0.5) == 10 * steps + 0.5 * validations


def test_durations():
    words = {0: "0 s", 89.4: "89 s", 90: "2 min", 3599: "1 h 00 min", 3900: "1 h 05 min"}
    for seconds, expected in (words | {100_000: "1 d 3 h"}).items():
        assert in_words(seconds) == expected
