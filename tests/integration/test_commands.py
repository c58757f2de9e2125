"""`swinv2-moe`: its commands, their help, configurations by name, and words it does not know."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from swinv2_moe import __version__
from swinv2_moe.commands import COMMANDS, GROUPS, LEFT, main
from swinv2_moe.commands.call import command_line
from swinv2_moe.commands.options import split_pairs
from swinv2_moe.config import load_config
from swinv2_moe.config.load import find_config
from swinv2_moe.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def swinv2_moe(monkeypatch, capsys):
    """`swinv2_moe(*words)`: exit status, output and errors of the installed command."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["swinv2-moe", *words])
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        return status, *capsys.readouterr()

    return run


# A program in which torch cannot be imported; each command in turn, its modules imported anew.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from swinv2_moe.commands import COMMANDS
imported = set(sys.modules)
for name in COMMANDS:
    for module in set(sys.modules) - imported:
        if module.startswith(("swinv2_moe", "moe_core")):
            del sys.modules[module]
    from swinv2_moe.commands import main
    print("command", name, flush=True)
    sys.argv = ["swinv2-moe", name, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, name
"""
# Letters, or hyphens inside of a word, before and after the end of a line.
BROKEN_WORD = re.compile(r"[a-z]-\n *[a-z]")


def test_help_needs_no_torch():
    words = [sys.executable, "-c", WITHOUT_TORCH]
    columns = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=columns)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.split("command ")[1:]
    helps = {name: text for name, _, text in (part.partition("\n") for part in printed)}
    for name in COMMANDS:
        assert helps[name].startswith(f"usage: swinv2-moe {name} ")
        assert not BROKEN_WORD.search(helps[name])
        for line in helps[name].splitlines():  # commands to copy are longer
            assert len(line) <= 80 or line.startswith("    "), line
    assert helps["train"].startswith("usage: swinv2-moe train FOLDER|RUN [options]")
    assert "tools/" not in done.stdout
    assert "data/make" not in done.stdout


def test_every_module_is_a_command_and_every_command_has_its_script():
    modules = {path.stem for path in (ROOT / "swinv2_moe" / "commands").glob("*.py")}
    modules -= {"__init__", "call", "faults", "interrupt", "options"}  # what commands share
    assert modules == {name.replace("-", "_") for name in COMMANDS}
    for name in COMMANDS:
        assert callable(import_module(f"swinv2_moe.commands.{name.replace('-', '_')}").main)
    scripts = {
        path.stem: path for folder in ("tools", "data") for path in ROOT.glob(f"{folder}/*.py")
    }
    assert modules - scripts.keys() == {"config"}
    for name in scripts.keys() & modules:
        assert f'run("{name.replace("_", "-")}")' in scripts[name].read_text()


def test_the_overview_and_more_list_every_command(swinv2_moe):
    for words in ([], ["--help"], ["-h"]):
        status, out, err = swinv2_moe(*words)
        assert (status, err) == (0, "")
        assert sum(map(len, GROUPS.values())) <= 12
        others = swinv2_moe("more")[1]
        in_sight = {name for names in GROUPS.values() for name in names}
        for name, text in COMMANDS.items():
            line = f"\n  {name} "
            assert (line in out, line in others) == (name in in_sight, name not in in_sight)
            assert text in (out if name in in_sight else others)
        assert max(map(len, (out + others).splitlines())) <= 80
    assert swinv2_moe("--version")[1] == f"swinv2-moe {__version__}\n"


def test_an_unknown_command(swinv2_moe):
    status, _, err = swinv2_moe("evalute")
    assert (status, err) == (2, "error: 'evalute' is not a command; did you mean 'evaluate'?\n")
    assert "`swinv2-moe --help` lists them" in swinv2_moe("xyz")[2]


@pytest.mark.parametrize("name", LEFT)
def test_a_command_that_left(name, swinv2_moe):
    status, _, err = swinv2_moe(name, "--output", "x")
    assert (status, err) == (2, f"error: {name!r} has left: {LEFT[name]}\n")
    assert not {name} & COMMANDS.keys()
    for page in re.findall(r"docs/[\w/.-]+", LEFT[name]):
        assert (ROOT / page).is_file()


def test_a_script_and_the_module_run_the_same_command():
    outputs = []
    for words in (["tools/few_shot.py"], ["-m", "swinv2_moe", "few_shot"]):
        words = [sys.executable, *words, "--shots", "one"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2
        outputs.append(done.stderr.splitlines()[-1].partition(": ")[2])
    assert outputs[0] == outputs[1] == "error: argument --shots: invalid int value: 'one'"


def test_configurations_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = find_config("imagenette_96")
    assert file.samefile(ROOT / "configs" / "imagenette_96.yaml")
    for name in ("configs/imagenette_96.yaml", "imagenette_96.yaml", Path("configs/imagenette_96")):
        assert find_config(name) == file
    assert find_config("8expert_top2").samefile(
        ROOT / "configs" / "tiny_imagenet" / "8expert_top2.yaml"
    )
    assert find_config("detection/shapes/htc").suffix == ".py"
    assert load_config("quickstart_digits").DATA.IMG_SIZE == 16
    (tmp_path / "quickstart_digits").write_text("{DATA: {DATASET: digits}, SEED: 5}")
    assert load_config("quickstart_digits").SEED == 5  # a file comes first


def test_names_that_mean_no_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--cfg imagenete_96: .* did you mean 'imagenette_96'"):
        find_config("imagenete_96")
    with pytest.raises(UserError, match="--cfg recipe: there are several: in1k/recipe, in22k"):
        find_config("recipe")
    with pytest.raises(UserError, match=r"mine.yaml"):
        load_config("mine.yaml")


def test_a_command_is_named_in_one_way(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python3", "tools/train.py"])
    monkeypatch.setattr("swinv2_moe.commands.call.program", lambda name: "ls")  # a program there is
    assert command_line("make-shards") == ["ls", "make-shards"]
    assert command_line("train", ["torchrun"]) == ["torchrun", "-m", "swinv2_moe", "train"]
    monkeypatch.setattr("swinv2_moe.commands.call.program", lambda name: "no such program")
    assert command_line("make-shards") == ["python3", "-m", "swinv2_moe", "make-shards"]


def test_opts_take_pairs_and_equals_signs():
    words = ["SEED", "3", "TAG=a=b", "DATA.PATH", "x=y", "AUG.MIXUP"]
    assert split_pairs(words) == ["SEED", "3", "TAG", "a=b", "DATA.PATH", "x=y", "AUG.MIXUP"]


def test_opts_of_a_command(swinv2_moe, tmp_path):
    start = ["train", "--cfg", "quickstart_digits", "--output", str(tmp_path / "run")]
    status, _, err = swinv2_moe(*start, "--opts", "SEED=-1", "PRINT_FREQ", "5")
    assert (status, err.count("\n")) == (2, 1)
    assert "SEED" in err
    assert "-1" in err
    _, _, err = swinv2_moe(*start, "--opts", "PRINT_FREQ=1", "SEED")
    assert err == "error: --opts takes pairs of KEY VALUE; 'SEED' has no partner\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("swinv2-moe ", ["train", "evaluate", "few-shot"], ["--cfg"]),
        ("swinv2-moe ev", ["evaluate"], ["train"]),
        ("swinv2-moe train --", ["--cfg", "--resume", "--opts"], ["--shots", "train"]),
        ("swinv2-moe few-shot --sh", ["--shots"], ["--cfg"]),
        ("swinv2-moe detect ", ["train", "predict"], ["evaluate"]),
    ],
)
def test_completion_in_a_shell(line, some, none, tmp_path):
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    done = subprocess.run(
        [sys.executable, "-m", "swinv2_moe"], capture_output=True, text=True, env=environment
    )
    answers = [word.strip() for word in (tmp_path / "answer").read_text().split("\n")]
    assert set(some) <= set(answers), done.stderr
    assert not set(none) & set(answers)
    assert done.stdout == ""
