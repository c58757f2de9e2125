"""The arguments that commands share, and the command lines that they print."""

import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import swinv2_moe
from swinv2_moe.commands.call import next_line, program
from swinv2_moe.commands.convert_checkpoint import written
from swinv2_moe.config import EVERYDAY, default_config, everyday_opts, flatten, load_config
from swinv2_moe.config.everyday import everyday_name
from swinv2_moe.errors import UserError
from swinv2_moe.input_paths import check_run, check_training
from swinv2_moe.measure.run_record import read_run

NEEDED = {
    "evaluate": [],
    "few_shot": [],
    "show_routing": [],
    "export": ["--output", "exported"],
}


def parse(name: str, *words: str, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *words])
    return import_module(f"swinv2_moe.commands.{name}").parse()


@pytest.mark.parametrize("name", NEEDED)
def test_a_run_is_the_first_argument_or_an_option(name, monkeypatch, capsys):
    option, needed = "--resume", NEEDED[name]
    first = parse(name, "a run", *needed, monkeypatch=monkeypatch)
    assert getattr(first, option.removeprefix("--")) == "a run"
    assert parse(name, *needed, option, "a run", monkeypatch=monkeypatch) == first
    for words in (needed, ["a", option, "b", *needed]):
        with pytest.raises(SystemExit):
            parse(name, *words, monkeypatch=monkeypatch)
    assert "RUN" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*NEEDED, "predict"])
def test_a_path_below_the_users_directory(name, tmp_path, monkeypatch):
    """The shell does not expand it in `--output=~/new.png`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    output = "new.csv" if name == "predict" else "new.json"
    words = ["~/run", *NEEDED.get(name, ["picture.png"]), f"--output=~/{output}"]
    args = parse(name, *words, monkeypatch=monkeypatch)
    assert f"{tmp_path}/run" in vars(args).values()
    assert args.output == f"{tmp_path}/{output}"


def test_train_continues_a_run_by_its_directory(tmp_path, monkeypatch):
    train = import_module("swinv2_moe.commands.train")
    seen = []
    monkeypatch.setattr(train, "config_from", lambda args: seen.append(args) or sys.exit())
    run = str(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", run])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="holds no run to continue"):
        train.main()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(SystemExit):
        train.main()
    assert (seen[0].cfg, seen[0].output, seen[0].resume) == (f"{run}/config.yaml", run, "auto")
    monkeypatch.setattr(sys, "argv", ["train", run, "--output", "other"])
    with pytest.raises(UserError, match="--output other"):
        train.main()


def test_an_option_that_left(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--data", "pictures", "--bind", "none"])
    with pytest.raises(UserError, match="--bind has left: `torchrun --numa-binding node`"):
        import_module("swinv2_moe.commands.train").main()


def test_train_takes_a_folder_of_pictures(tmp_path, monkeypatch):
    train = import_module("swinv2_moe.commands.train")
    seen = []
    monkeypatch.setattr(train, "choice_for", lambda args: seen.append(args) or sys.exit())
    words = ["train", str(tmp_path), "--epochs", "7", "--lr", "3e-4", "--weights", "none"]
    monkeypatch.setattr(sys, "argv", [*words, "--opts", "SEED=2"])
    with pytest.raises(SystemExit):
        train.main()
    assert (seen[0].data, seen[0].run, seen[0].output) == (str(tmp_path), None, None)
    assert dict(zip(seen[0].opts[::2], seen[0].opts[1::2], strict=True)) == {
        "TRAIN.EPOCHS": "7",
        "TRAIN.BASE_LR": "0.0003",
        "TRAIN.LR_SCALING": "none",
        "MODEL.PRETRAINED": "",
        "SEED": "2",
    }
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path / "none")])
    with pytest.raises(UserError, match="neither a folder of pictures nor a run"):
        train.main()
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path), "--data", "other"])
    with pytest.raises(UserError, match="give one folder of pictures"):
        train.main()


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("train", "--epoch-count", "; did you mean --epochs?"),
        ("train", "--learning-rate", "; did you mean --lr?"),
        ("train", "--batch-size", "; did you mean --batch?"),
        ("train", "--image-size", "; did you mean --size?"),
        ("train", "--weight-decay", "; did you mean --opts TRAIN.WEIGHT_DECAY ...?"),
        ("evaluate", "--epochs", "; did you mean --opts TRAIN.EPOCHS ...?"),
        ("evaluate", "--chekpoint", "; did you mean --checkpoint?"),
        ("evaluate", "--zzzz", "\n"),
    ],
)
def test_an_unknown_option_names_the_nearest(name, option, hint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "run", option, "5"])
    with pytest.raises(SystemExit):
        import_module(f"swinv2_moe.commands.{name}").main()
    line = capsys.readouterr().err.splitlines(keepends=True)[-1]
    assert f"unrecognized arguments: {option}" in line
    assert hint in line
    assert ("did you mean" in line) == ("did you mean" in hint)


def test_short_options_have_the_types_of_their_keys():
    assert everyday_opts({"epochs": "5", "size": None}, ["SEED", "1"])[:2] == ["TRAIN.EPOCHS", "5"]
    with pytest.raises(UserError, match=r"--epochs is 'x' \(str\), it must be of type int"):
        everyday_opts({"epochs": "x"}, [])
    with pytest.raises(UserError, match=r"--epochs is 5 and TRAIN.EPOCHS is 6: give one of them"):
        everyday_opts({"epochs": "5"}, ["TRAIN.EPOCHS", "6"])
    for name, option in EVERYDAY.items():
        assert option.key in flatten(default_config()), name
        assert everyday_name(option.key) == f"--{name}"


def test_fit_names_its_arguments(tmp_path):
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'epoch'; it has epochs, size"):
        swinv2_moe.fit(tmp_path, epoch=3)


def test_a_next_line_is_started_as_this_process_was(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "swinv2_moe", "train"])
    assert next_line("few-shot", Path("a b")) == "python3 -m swinv2_moe few-shot 'a b'"


def test_a_program_beside_python_is_named_so_that_the_shell_finds_it(tmp_path, monkeypatch):
    file = tmp_path / "my env" / "swinv2-moe"
    file.parent.mkdir()
    file.write_text("#!/bin/sh\necho ran $1")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file.with_name("python")))
    monkeypatch.setattr(sys, "argv", ["swinv2-moe train"])
    monkeypatch.setattr(sys, "orig_argv", [str(file.with_name("python")), str(file), "train"])
    for path, folder in ((os.defpath, tmp_path), (os.defpath, "/"), (str(file.parent), "/")):
        monkeypatch.setenv("PATH", f"{path}:{os.defpath}")
        monkeypatch.chdir(folder)
        line = next_line("report", "a run")
        shown = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        assert shown.stdout == "ran report\n"
    assert shlex.split(line)[0] == program("swinv2-moe") == "swinv2-moe"


def test_what_was_written_is_named_with_its_size(tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    for name in ("config.json", "model.safetensors"):
        (hub / name).write_bytes(bytes(1_250_000))
    assert written([hub, hub / "config.json"]) == [
        f"{hub}: config.json, model.safetensors, 2.5 MB",
        f"{hub}/config.json, 1.2 MB",
    ]


def test_paths_of_a_training_are_checked_first(tmp_path, monkeypatch):
    images = tmp_path / "photos"
    (images / "train" / "cat").mkdir(parents=True)
    (images / "val").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()

    def refusal(*opts, resume=None, data=images, output=tmp_path / "new"):
        config = load_config(None, opts, data=str(data), output=str(output))
        with pytest.raises(UserError) as error:
            check_training(config, resume)
        return str(error.value)

    assert refusal(data=images / "train").endswith(f"use --data {images}")
    assert refusal(data=f"{images}/val/").endswith(f"use --data {images}")
    assert refusal(data=images / "train" / "cat").endswith(f"use --data {images}")
    assert "no such directory" in refusal(data=tmp_path / "gone")
    assert "already holds a run" in refusal(output=tmp_path / "run")
    assert refusal(output=images / "val" / "run").endswith(
        f"among the class folders of --data {images}; name a directory outside of them"
    )
    assert "lies among the class folders" in refusal(data=tmp_path, output=tmp_path / "a" / "new")
    beside = load_config(None, [], str(images), str(images / "output"))
    check_training(beside, None)  # beside train/ and val/
    assert "RUN gone: no such directory" in refusal(resume="gone")
    assert "holds no checkpoint" in refusal(resume=str(images))
    assert refusal(resume=str(tmp_path)).endswith(f"; runs in it: {tmp_path / 'run'}")
    with pytest.raises(UserError, match=r"holds no run .*; runs in it: .*/run$"):
        read_run(tmp_path)
    assert "MODEL.PRETRAINED gone.pth: no such" in refusal("MODEL.PRETRAINED", "gone.pth")
    lists = ["DATA.DATASET", "list", "DATA.TRAIN_LIST", "gone.txt", "DATA.VAL_LIST", "v.txt"]
    assert "DATA.TRAIN_LIST is 'gone.txt': no such file" in refusal(*lists)
    hub = load_config(None, ["MODEL.PRETRAINED", "timm:name"], str(images), str(tmp_path / "new"))
    check_training(hub, "auto")
    # Among several processes a path may exist for some of them only.
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_training(load_config(None, data="gone"), None)
    check_run("gone")


def test_a_configuration_of_a_classifier_is_none_of_a_detector(monkeypatch):
    detect = import_module("swinv2_moe.commands.detect")
    monkeypatch.setattr(sys, "argv", ["detect", "train", "quickstart_digits"])
    with pytest.raises(UserError, match="swinv2-moe train --cfg quickstart_digits"):
        detect.main()
