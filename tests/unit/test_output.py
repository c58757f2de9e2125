"""What others name reaches terminals, tables, CSV files, pages and figures as text."""

import importlib.util
import io
from pathlib import Path

import pytest
from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.panel import Panel
from rich.progress import Progress, TextColumn

from swinv2_moe.commands import interrupt
from swinv2_moe.commands.options import CommandParser
from swinv2_moe.measure.report import _shown
from swinv2_moe.output import csv_cell, csv_text, print_lines, printable, without_credentials
from swinv2_moe.plots import to_svg
from swinv2_moe.routing_pictures import shorten
from swinv2_moe.tables import Console, number_table

ROOT = Path(__file__).parents[2]
CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
HOSTILE = {
    CLIPBOARD: r"\x1b]52;c;ZXZpbA==\x07",
    "\x1b[2J": r"\x1b[2J",
    "\x9b31m": r"\x9b31m",
    "a\nerror: b\r\tc": r"a\nerror: b\r\tc",
    "\u202egpj.exe\u2066": r"\u202egpj.exe\u2066",
    "\u2028\x00\x7f\ufeff": r"\u2028\x00\x7f\ufeff",
    "\udcff\ud800": r"\xff\ud800",
    "[red]x[/red] :smile:": "[red]x[/red] :smile:",
    "Bär 犬\u3000\u200d\xa0": "Bär 犬\u3000\u200d\xa0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_exit_escapes_names(name, capsys):
    shown = HOSTILE[name]
    assert printable(name) == shown
    print_lines(name, f"class {name}")
    assert capsys.readouterr().out == f"{shown}\nclass {shown}\n"
    console = Console(file=io.StringIO(), width=200)
    console.print(name)
    console.print(Path(name.replace("\0", "")))
    console.print(number_table(["class", name], [[name, "1"]]))
    console.print(Panel("", title=name.replace("\n", "")))
    with Progress(TextColumn(name, markup=False), console=console) as bar:
        bar.add_task("")
    text = console.file.getvalue()
    assert text.startswith(f"{shown}\n")
    assert text.count(shown) >= 4
    assert all(char.isprintable() or char in "\n\u200d\xa0\u3000" for char in text)


class Terminal(io.StringIO):
    def isatty(self):
        return True


LINE = "warning: accuracies until now were measured otherwise"
IN_20_COLUMNS = "warning: accuracies\nuntil now were\nmeasured otherwise\n"
PASTED = "to continue: swinv2-moe train output/mine"


def printed(line, file):
    print_lines(line, file=file)
    return file.getvalue()


def test_terminals_break_lines_between_words(monkeypatch):
    """Files and pipes get one line. A command stays in one line, so that it can be copied, and a
    path in one word."""
    monkeypatch.setenv("COLUMNS", "20")
    for line, shown in (
        (LINE, IN_20_COLUMNS),
        (PASTED, f"{PASTED}\n"),
        ("a" * 30, "a" * 30 + "\n"),
    ):
        assert printed(line, Terminal()) == shown
        assert printed(line, io.StringIO()) == f"{line}\n"
        console = Console(file=io.StringIO(), force_terminal=True, width=20)
        console.print(line)
        assert console.file.getvalue() == shown


def test_cells_of_csv_are_no_formulas():
    rows = [["=1+1", "+a", "-a", "@a", "-1.5", "+2e-3", -1.5, None, "\t=1", 'a,"b', CLIPBOARD]]
    assert csv_text(rows) == (
        "'=1+1,'+a,'-a,'@a,-1.5,+2e-3,-1.5,,\\t=1,\"a,\"\"b\",\\x1b]52;c;ZXZpbA==\\x07\n"
    )


def test_markdown_tables_keep_their_columns():
    console = Console(file=io.StringIO(), width=80)
    console.print(number_table(["class"], [["a|b"]], markdown=True))
    assert r"a\|b" in console.file.getvalue()


def test_pages_show_names_as_text():
    page = Environment(autoescape=True, finalize=_shown).from_string("{{ name }}{{ made }}")
    text = page.render(name=f"<b>\u202e{CLIPBOARD}\n", made=Markup("<svg>"))
    assert text == "&lt;b&gt;\\u202e\\x1b]52;c;ZXZpbA==\\x07\n<svg>"


def test_figures_show_names_as_text():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], label=f"$\\frac${CLIPBOARD}")
    axes.set_title("\u202etitle")
    axes.set_yticks([1, 2], [shorten("\x1b[2J"), "<b>"])
    axes.legend()
    svg = to_svg(figure, f"{CLIPBOARD}<b>")
    assert svg.isascii() or "\u202e" not in svg
    assert "\x1b" not in svg
    assert "<b>" not in svg


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://user:secret@host:5000/mlflow.", "at https://***@host:5000/mlflow."),
        ("postgresql+psycopg2://u:p/a@s#s@db/x", "postgresql+psycopg2://***@db/x"),
        ("https://secret@host/a", "https://***@host/a"),
        ("https://:secret@host/a", "https://***@host/a"),
        ("proxy 'http://u:secret@proxy:3128': refused", "proxy 'http://***@proxy:3128': refused"),
        ("s3://b/k?X-Amz-Signature=secret&a=1", "s3://b/k?X-Amz-Signature=***&a=1"),
        ("wasbs://c/?sig=secret&api_key=secret", "wasbs://c/?sig=***&api_key=***"),
        ("https://host/a@1.2?page=2", "https://host/a@1.2?page=2"),
        (f"https://u:{'x' * 10_000}@host", "https://***@host"),
        ("user@example.org", "user@example.org"),
    ],
)
def test_credentials_are_not_shown(text, shown):
    assert without_credentials(text) == shown
    assert printable(text) == shown
    assert csv_text([[text]]) == f"{shown}\n"


@pytest.mark.parametrize(
    ("start", "part"),
    [
        ("", "a://b:"),
        ("", "a://b"),
        ("a://", "?pass"),
        ("", "a://@:"),
    ],
)
def test_the_time_to_mask_credentials_is_linear(start, part):
    """With the square of the length these 3 MB would take minutes to hours: the suite's timeout."""
    text = start + part * (3_000_000 // len(part))
    assert without_credentials(text).startswith("a://")


def test_the_example_without_this_package_follows_the_same_rule():
    spec = importlib.util.spec_from_file_location("classify", ROOT / "examples" / "classify.py")
    classify = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(classify)
    for text in [chr(code) for code in range(0x3000)] + list(HOSTILE) + ["=1", "-1", "+a", "-"]:
        assert classify.printable(text) == printable(text)
        assert classify.cell(text) == csv_cell(text)


def test_a_traceback_shows_names_and_credentials_as_text(capsys):
    error = ValueError(f"{CLIPBOARD} at http://user:secret@proxy")
    interrupt._report(ValueError, error, None)
    assert capsys.readouterr().err == ("ValueError: \\x1b]52;c;ZXZpbA==\\x07 at http://***@proxy\n")


def test_a_word_of_the_command_line_is_shown_as_text(capsys):
    with pytest.raises(SystemExit):
        CommandParser().parse_args([f"-{CLIPBOARD}"])
    assert r"-\x1b]52" in capsys.readouterr().err
