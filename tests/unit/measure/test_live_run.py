"""A run followed line by line, its picture, and curves of braille characters."""

import fcntl
import io
import json
import os
import time

import pytest
import yaml
from rich.console import Console

from swinv2_moe.errors import UserError
from swinv2_moe.measure import live_run
from swinv2_moe.measure.live_picture import Curve, draw, picture
from swinv2_moe.measure.live_run import LiveRun

LAYER = "layers.{}.blocks.0.mlp.moe"
CONFIG = {"TRAIN": {"EPOCHS": 3, "MAX_STEPS": 0, "ACCUMULATION_STEPS": 2}}
CONFIG |= {"DATA": {"BATCH_SIZE": 8}}


def start(step=0, **more):
    return {"step": step, "steps_per_epoch": 10, "environment": {"processes": 4}} | more


def logged(step, layers=2, experts=8, **more):
    line = {"step": step, "epoch": 1 + (step - 1) // 10, "loss": 3 - step / 100, "lr": 1e-3}
    line |= {"images_per_second": 64.0, "data_wait": 0.1}
    if layers:
        load = {"load": [0.0] + [1.0] * (experts - 2) + [2.0]}
        line |= {"moe/dropped_share": 0.01, "moe/load_max": 2.0}
        line["moe_layers"] = {LAYER.format(layer): load for layer in range(layers)}
    return line | more


def epoch(number, **more):
    values = {"step": 10 * number, "epoch": number, "val_top1": 40.0 + number, "val_top5": 90}
    return values | {"val_loss": 2.0, "seconds": 14.0} | more


@pytest.fixture
def write(tmp_path):
    """`write(*lines)`: add lines to the run, which has not removed its lock; its directory."""
    (tmp_path / ".lock").touch()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    def run(*lines):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for line in lines:
                file.write(line if isinstance(line, str) else json.dumps(line) + "\n")
        return tmp_path

    return run


def read(directory):
    run = LiveRun(directory)
    run.read()
    return run


def test_lines_are_taken_in_as_they_come(write):
    run = LiveRun(write())
    run.read()
    assert (run.last, run.position()) == (None, None)
    write(start(), logged(5), '{"step": 6, "lo')
    run.read()
    run.read()
    assert run.losses == [(5, 2.95)]
    write('ss": 1}\n', "damaged\n", logged(10, loss=None), epoch(1), logged(11))
    run.read()
    assert run.losses == [(5, 2.95), (11, 2.89)]
    assert [line["val_top1"] for line in run.epochs] == [41.0]
    assert run.position() == (3, 0, 10, 1, 1, 11)


def test_a_line_without_end_is_read_in_parts(write, monkeypatch):
    monkeypatch.setattr(live_run, "MAX_LINE", 1 << 12)
    run = read(write(start(), "x" * (3 << 12), "x\n", logged(5)))
    assert run.losses == [(5, 2.95)]


def test_a_resumed_run_drops_lines(write, tmp_path):
    run = read(write(start(), logged(5), logged(10)))
    (tmp_path / "new").write_text(json.dumps(start()) + "\n" + json.dumps(logged(5)) + "\n")
    os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
    run.read()
    assert [step for step, _ in run.losses] == [5]
    (tmp_path / "metrics.jsonl").write_text("")
    run.read()
    assert run.last is None


def test_time_left(write):
    """A step of 64 images takes a second, a validation 4."""
    run = read(write(start(), logged(5)))
    now = run.written
    assert run.seconds_left(now) == 25  # no validation is known yet
    assert run.seconds_left(now + 5) == 20  # although nothing new was written
    assert run.seconds_left(now + 99) == 0
    write(logged(10), epoch(1))
    run.read()
    assert run.seconds_left(run.written) == pytest.approx(20 + 2 * 4)
    write(*(logged(step) for step in range(11, 31)), epoch(2), epoch(3))
    run.read()
    assert run.seconds_left(run.written) == 0


def test_an_earlier_version_logged_no_length_of_an_epoch(write):
    line = start()
    del line["steps_per_epoch"]
    run = read(write(line, logged(5)))
    assert (run.position(), run.seconds_left(run.written)) == (None, None)
    write(epoch(1), logged(15))
    run.read()
    assert run.position() == (3, 0, 10, 1, 5, 15)


@pytest.mark.parametrize("lines", [[logged(5)], [start(environment={}), logged(5)]])
def test_unknown_environments(lines, write):
    run = read(write(*lines))
    assert run.seconds_left(run.written) is None
    assert "step 5" in drawn(run)


def test_a_damaged_configuration(write):
    directory = write(start(), logged(5))
    for text in ("", "TRAIN: [", "TRAIN: 3", "{TRAIN: {EPOCHS: 1}}", "[" * 9000, "a: \0"):
        (directory / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"config\.yaml: is not the configuration of a run"):
            read(directory)


def test_no_run(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: is not a run directory"):
        LiveRun(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no run \(no metrics\.jsonl\)"):
        LiveRun(tmp_path)
    (tmp_path / ".lock").touch()
    with pytest.raises(UserError, match="holds no run"):
        LiveRun(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="is not a file"):
        LiveRun(tmp_path).read()


def test_states(write, tmp_path, run_processes):
    run = read(write(start(), logged(5)))
    assert run.state(run.written) == "running"
    assert run.state(run.written + 100) == "stopped"
    run_processes(hold_lock_and_look, 1, tmp_path)
    (tmp_path / ".lock").unlink()  # what a run does at its end
    assert run.state(run.written) == "stopped"
    (tmp_path / "summary.json").write_text("{}")
    assert run.state(run.written) == "finished"


def hold_lock_and_look(rank, directory):
    """A child of this process asks about the lock that this process holds."""
    with (directory / ".lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        child = os.fork()
        if child == 0:
            state = read(directory).state(time.time() + 100)
            os._exit(int(state != "nothing new for 2 min"))
        assert os.waitpid(child, 0)[1] == 0


def drawn(run, width=80, height=24):
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(picture(run, width, height, run.written), height=height)
    return console.export_text()


@pytest.mark.parametrize(("layers", "experts"), [(0, 0), (2, 8), (12, 8), (24, 64), (3, 300)])
def test_pictures_fit(layers, experts, write):
    lines = [logged(step, layers, experts) for step in range(1, 31)]
    run = read(write(start(), *lines[:10], epoch(1), *lines[10:], epoch(2)))
    for width, height in ((80, 24), (140, 40), (200, 50), (60, 16)):
        text = drawn(run, width, height).splitlines()
        assert len(text) == height
        assert max(map(len, text)) <= width
        assert all(line.endswith(("╮", "│", "╯")) for line in text)


def test_what_a_picture_shows(write):
    text = drawn(read(write(start(), logged(10), epoch(1), logged(15))))
    for words in (
        ": running",
        "epoch 2/3",
        "about 23 s left",
        "step 15/30",
        "loss 2.850",
        "top-1 41.00% (best 41.00%)",
        "64 images/s",
        "1.0% of the choices dropped",
        "10% waiting for data",
        "stage 0, block 0 ·▄▄▄▄▄▄█ 0.0-2.0   stage 1, block 0 ·▄▄▄▄▄▄█ 0.0-2.0",
    ):
        assert words in text


def test_layers_and_experts_without_room(write):
    run = read(write(start(), logged(5, layers=40, experts=90)))
    text = drawn(run)
    assert "and 35 more layers" in text
    assert "stage 0, block 0  ▂▄" in text  # means of two experts


def test_a_run_ended_by_max_steps(write, tmp_path):
    train = CONFIG["TRAIN"] | {"MAX_STEPS": 7}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"TRAIN": train}))
    run = read(write(start(), logged(5)))
    assert run.seconds_left(run.written) == 2
    assert "step 5/7" in drawn(run)


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
