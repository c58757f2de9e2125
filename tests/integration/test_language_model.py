"""examples/language_model.py: it learns, ranks do not show in the losses, and bad input is one
line."""

import re
import sys

import pytest
from gloo_processes import run_script

EXAMPLE = "examples/language_model.py"
TINY = ["--batch-size", "8", "--context", "16", "--layers", "2", "--dim", "16", "--heads", "2"]
TINY += ["--experts", "4", "--every", "5", "--sample", "8", "--device", "cpu"]
SENTENCE = b"the quick brown fox jumps over the lazy dog. "


@pytest.fixture
def example(monkeypatch, capsys, tmp_path):
    """`example(*arguments)`: what the example prints after training on a sentence."""
    text = tmp_path / "text.txt"
    text.write_bytes(40 * SENTENCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])

    def run(*arguments: object) -> str:
        run_script(EXAMPLE, [*TINY, "--text", str(text), *map(str, arguments)])
        return capsys.readouterr().out

    return run


def losses(printed: str) -> list[str]:
    """Training and validation losses in order."""
    return re.findall(r"(?:loss|validation) ([\d.]+)", printed)


@pytest.mark.parametrize("experts", [0, 4])
def test_it_learns_a_sentence(example, experts):
    printed = example("--experts", experts, "--steps", 150, "--lr", 0.01)
    found = list(map(float, losses(printed)))
    assert len(found) == 60
    assert found[0] > 5
    assert found[-1] < 1


def test_experts_have_the_active_parameters_of_the_dense_model(example, tmp_path):
    from safetensors.torch import load_file

    sizes = {}
    for experts in (0, 4):
        directory = tmp_path / f"{experts}"
        example("--experts", experts, "--steps", 1, "--save", directory)
        files = [directory / "model.safetensors"]
        # of the four experts, two are active
        files += sorted(directory.glob("experts/*/*.safetensors"))[: experts // 2]
        tensors = [tensor for file in files for tensor in load_file(file).values()]
        sizes[experts] = sum(tensor.numel() for tensor in tensors if tensor.ndim > 1)
    router = 4 * 16
    assert sizes[4] == sizes[0] + router


def test_the_number_of_ranks_does_not_show(example, start_ranks, tmp_path):
    """Neither in the losses nor in what is saved, which one rank loads."""
    arguments = ["--steps", 10, "--save", tmp_path / "saved"]
    alone = losses(example("--steps", 10))
    text = ["--text", tmp_path / "text.txt"]
    outcomes = start_ranks(2, EXAMPLE, *TINY, *text, *arguments)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    together, other = outcomes[0].out, outcomes[1].out
    assert other == ""
    assert len(alone) == 4
    assert list(map(float, losses(together))) == pytest.approx(list(map(float, alone)), abs=2e-4)
    loaded = example("--steps", 0, "--load", tmp_path / "saved")
    assert loaded.startswith("The ")
    assert loaded in together


BAD_INPUT = {
    "no heads": (["--heads", 0], "--heads is 0, it must be at least 1"),
    "heads": (["--heads", 3], "--dim is 16, it must be divisible by --heads (3)"),
    "experts": (["--experts", -1], "--experts is -1, it must not be negative"),
    "top-k": (["--top-k", 5], "--top-k is 5, it must be at most --experts (4)"),
    "learning rate": (["--lr", 0], "--lr is 0.0, it must be above 0"),
    "no prompt": (["--prompt", ""], "--prompt is empty, it must have a character"),
    "no text": (["--text", "none.txt"], "--text none.txt: cannot be read (No such file"),
    "short text": (["--context", 500], "the text has 1,800 bytes; its last tenth must hold"),
    "save": (["--save", "README.md"], "--save README.md: cannot be written (File exists)"),
    "nothing saved": (["--load", "none"], "--load none: none/model.safetensors is missing"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line(case, example):
    arguments, message = BAD_INPUT[case]
    with pytest.raises(SystemExit) as stop:
        example(*arguments)
    assert str(stop.value).startswith(message)
    assert "\n" not in str(stop.value)


def test_a_checkpoint_of_another_model_is_one_line(example, tmp_path):
    example("--steps", 1, "--save", tmp_path / "saved")
    with pytest.raises(SystemExit, match="another model"):
        example("--load", tmp_path / "saved", "--experts", 0)


def test_a_python_without_its_documentation_is_one_line(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(SystemExit, match="give a file by --text"):
        run_script(EXAMPLE, TINY)
