"""How messages show what files hold: one line, of a sensible length, whatever it is."""

import pytest

from swinv2_moe.command import run_command
from swinv2_moe.errors import UserError, one_line, short


def nested(depth: int) -> list:
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_values_are_shown_as_they_are_written_and_cut():
    assert short("a\nb") == "'a\\nb'"
    assert short([1, None]) == "[1, None]"
    assert short("x" * 100, 10) == "'xxxxxxxxx..."


def test_values_that_cannot_be_printed():
    assert short(1 << 20_000) == "int that is too large to print"
    assert short(nested(100_000)) == "list that is too large to print"


def test_a_line_has_no_line_ends_and_no_control_characters():
    assert one_line("a\nb\r\n\x1b[31mc\udc80\0 é") == "a b \\x1b[31mc\\udc80\\x00 é"


def test_a_command_prints_one_line_whatever_a_name_has_in_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")

    def main() -> None:
        raise UserError("a\nb\x1b[2J.tar: is damaged")

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: a b\\x1b[2J.tar: is damaged\n"
