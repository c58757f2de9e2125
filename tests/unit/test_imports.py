"""--import FILE: a file outside of the package registers what a configuration may then name."""

import re
import sys

import pytest

from moe_core import ACTIVATIONS, LOSSES, ROUTERS
from swinv2_moe import imports
from swinv2_moe.commands.call import resume_command
from swinv2_moe.commands.options import CommandParser
from swinv2_moe.config import config_from_text, load_config, model_config
from swinv2_moe.errors import UserError
from swinv2_moe.imports import import_file, imported_files

EXPERTS = ["MODEL.MOE.NUM_EXPERTS", "4", "MODEL.MOE.BLOCKS", "[[], [], [1], []]"]
SQUARED_RELU = """
from moe_core import register_activation

@register_activation("squared_relu_from_outside")
def squared_relu(x):
    return x.relu().square()
"""


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    for registry in (ROUTERS, LOSSES, ACTIVATIONS):
        monkeypatch.setattr(registry, "_values", dict(registry))
    monkeypatch.setattr(imports, "_imported", [])
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("imported_"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "mine.py"):
        file = tmp_path / name
        file.write_text(text)
        return file

    return write_file


def test_a_registered_activation_is_a_choice_and_is_in_the_help(write, capsys):
    opts = [*EXPERTS, "MODEL.MOE.ACTIVATION", "squared_relu_from_outside"]
    with pytest.raises(UserError, match=r"MODEL\.MOE.ACTIVATION is 'squared_relu_from_outside'"):
        load_config(None, opts)
    file = write(SQUARED_RELU)
    CommandParser().parse_args(["--import", str(file)])
    config = load_config(None, opts)
    assert model_config(config).experts.layer.activation == "squared_relu_from_outside"
    assert imported_files() == (file,)
    with pytest.raises(SystemExit):
        CommandParser().parse_args(["--help"])
    listed = capsys.readouterr().out
    assert re.search(r"gelu_tanh, quick_gelu, relu, silu,.* squared_relu_from_outside", listed)


def test_a_checkpoint_that_names_what_is_not_imported(write):
    text = "MODEL: {MOE: {ROUTER: two_layers}}"
    with pytest.raises(
        UserError, match=r"run: .*MODEL\.MOE\.ROUTER is 'two_layers', allowed: linear"
    ):
        config_from_text(text, "run")
    import_file(str(write("from moe_core import ROUTERS\nROUTERS.register('two_layers')(object)")))
    assert config_from_text(text, "run").MODEL.MOE.ROUTER == "two_layers"


def test_a_file_is_imported_once(write):
    file = write(SQUARED_RELU)
    parser = CommandParser()
    commands = parser.add_subparsers()
    commands.add_parser("run")
    parser.parse_args(["--import", str(file), "run", "--import", f"{file.parent}/./mine.py"])
    assert imported_files() == (file,)


def test_dataclasses_of_an_imported_file(write):
    text = "from __future__ import annotations\nimport dataclasses\n"
    import_file(str(write(text + "@dataclasses.dataclass\nclass A:\n    x: dataclasses.KW_ONLY\n")))


def test_the_command_that_goes_on_imports_the_same_files(write, monkeypatch):
    file = write(SQUARED_RELU)
    import_file(str(file))
    assert f"swinv2-moe train --import {file} --cfg c.yaml" in resume_command("c.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ny = 1 / 0", "line 2, ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(3)", "line 2, SystemExit: 3"),
        ("import no_such_module_at_all", "line 1, ModuleNotFoundError"),
        ("raise ValueError('a\\nb')", "ValueError: a b"),
        (
            "from moe_core import register_activation\nregister_activation('gelu')(abs)",
            "line 2, ValueError: activation 'gelu' is registered already",
        ),
    ],
)
def test_a_file_that_raises_is_named_with_its_line(write, text, says):
    file = write(text)
    with pytest.raises(UserError) as caught:
        import_file(str(file))
    assert str(caught.value).startswith(f"--import {file}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert imported_files() == ()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"--import .*gone\.py: does not exist"):
        import_file(str(tmp_path / "gone.py"))
    with pytest.raises(UserError, match="is not a file"):
        import_file(str(tmp_path))
