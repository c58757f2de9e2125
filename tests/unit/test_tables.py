"""Tables of numbers in a terminal and in Markdown."""

from rich.console import Console

from swinv2_moe.tables import number_table


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


def test_markdown() -> None:
    found = lines(number_table(["", "ms"], [["a", "1"]], markdown=True))
    assert [line.replace(" ", "") for line in found] == ["||ms|", "|---|----|", "|a|1|"]
