"""Curves of braille characters."""

from swinv2_moe.measure.braille import Curve, draw

RISING = Curve([(0, 0.0), (7, 7.0)], "cyan")


def plain(curves, last_step, width, height):
    return [line.plain for line in draw(curves, last_step, width, height)]


def test_a_line_from_corner_to_corner():
    lines = ["       7│⠀⠀⡠⠊", "       0│⡠⠊⠀⠀", "    step 0  7"]
    assert plain([RISING], 7, 13, 3) == lines


def test_marks_lie_over_lines():
    lines = ["       7│⠀⠀⡠o", "       0│⡠⠊⠀⠀", "    step 0  7"]
    assert plain([RISING, Curve([(7, 7.0)], "red", "o")], 7, 13, 3) == lines


def test_a_column_shows_the_mean_of_its_points():
    points = [(step, float(step % 2)) for step in range(100)]
    assert plain([Curve(points, "")], 99, 13, 2)[0] == "       1│⠤⠤⠤⠤"


def test_a_single_point_and_large_numbers():
    assert plain([Curve([(5, 123456.0)], "")], 5, 13, 3)[0] == " 1.2e+05│⠀⠀⠀⠀"
    assert plain([Curve([(0, -1e-9)], "")], 0, 13, 2)[0].endswith("│⠄⠀⠀⠀")


def test_no_room_or_no_points():
    for width, height in ((0, 5), (10, 5), (40, 1), (40, 0)):
        assert draw([RISING], 7, width, height) == []
    assert draw([Curve([], "")], 7, 40, 10) == []


def test_sizes():
    points = [(step, 1e5 / (1 + step)) for step in range(1, 2000)]
    for width, height in ((11, 2), (30, 7), (120, 40)):
        lines = plain([Curve(points, ""), Curve(points[::400], "", "●")], 2500, width, height)
        assert len(lines) == height
        assert {len(line) for line in lines[:-1]} == {width}
