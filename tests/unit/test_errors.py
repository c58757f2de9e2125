"""How messages show what files hold: one line, of a sensible length, whatever it is."""

import subprocess
import sys
from pathlib import Path

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
    assert one_line("a\nb\r\n\x1b[31mc\udc80\0 é") == "a b \\x1b[31mc\\x80\\x00 é"


def test_a_command_prints_one_line_whatever_a_name_has_in_it(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")

    def main() -> None:
        raise UserError("a\nb\x1b[2J.tar: is damaged")

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: a b\\x1b[2J.tar: is damaged\n"


RANK_1_FIRST = """
import os, sys, time
from swinv2_moe.command import run_command
from swinv2_moe.errors import UserError

def main():
    if os.environ["RANK"] == "0":
        time.sleep(float(sys.argv[1]))
    raise UserError("KEY is 1, it must be 2")

run_command(main)
"""


@pytest.mark.parametrize(
    ("rank_0_seconds", "line"),
    [
        (2, "error: KEY is 1, it must be 2\n"),  # though torchrun ends all when rank 1 exits
        (600, "error: KEY is 1, it must be 2 (rank 1)\n"),
    ],
)
def test_one_rank_of_torchrun_prints(rank_0_seconds, line, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RANK_1_FIRST)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "2"]
    words += [str(program), str(rank_0_seconds)]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error: KEY") == 1, done.stderr
    assert line in done.stderr
