"""A configuration is read and checked without torch, whose import takes seconds."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import moe_core
from moe_core import ACTIVATIONS, ALL_TO_ALLS, LOSSES, ROUTERS, MoEConfig, Registry
from moe_core.config import _ROUTING

ROOT = Path(__file__).parents[2]
SLOW = ("torch", "torchvision", "timm", "matplotlib", "scipy", "sklearn")
COMMAND = "from swinv2_moe.commands import main; main()"
LOAD = "from swinv2_moe.config import all_sections, load_config; all_sections(load_config({!r}))"

# Runs each line of its input, (code, words), in a child of its own, where `sys.argv` holds the
# words; answers with a line of (status, output, errors, what of SLOW has been imported). Every
# case imports the last two, so they are imported once.
SERVER = """
import json, os, sys, tempfile, traceback
import swinv2_moe.commands, swinv2_moe.config

def answer(code, words, slow):
    status = 0
    files = [tempfile.TemporaryFile() for _ in range(2)]
    sys.stdout.flush()
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    sys.argv[1:] = words
    try:
        exec(code, {"sys": sys})
    except SystemExit as stop:
        status = stop.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read().decode())
    return [status, *texts, [name for name in slow if name in sys.modules]]

for line in sys.stdin:
    reader, writer = os.pipe()
    if os.fork() == 0:
        with open(writer, "w") as pipe:
            json.dump(answer(*json.loads(line)), pipe)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        print(pipe.read(), flush=True)
    os.wait()
"""


class Finished(NamedTuple):
    returncode: int
    stdout: str
    stderr: str
    imported: list[str]


@pytest.fixture(scope="module")
def run():
    """`run(code, *words)`: run code, in which `sys.argv` holds the words, in a new process that
    has imported `swinv2_moe.commands` and `swinv2_moe.config` alone."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as server:

        def run(code: str, *words: str) -> Finished:
            server.stdin.write(json.dumps([code, words, SLOW]) + "\n")
            server.stdin.flush()
            return Finished(*json.loads(server.stdout.readline()))

        yield run
        server.stdin.close()


def alone(code: str) -> str:
    """What code prints in a process that has imported nothing."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "quickstart_digits",
        "tiny_imagenet/8expert",
        "in22k/swin_moe_base_window12_192_32expert",
    ],
)
def test_a_configuration_is_loaded_without_torch(name, run):
    code = LOAD.format(name)
    if not name.endswith("digits"):
        code = code.replace(f"{name!r}", f"{name!r}, data='images'")
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.imported == []


UNKNOWN, WRONG_TYPE = ["MODEL.MOE.TOPK", "2"], ["TRAIN.EPOCHS", "abc"]
CONTRADICTION = ["MODEL.MOE.TOP_K", "9"]
CFG = ["--cfg", "quickstart_digits"]


@pytest.mark.parametrize(
    ("words", "opts", "message"),
    [
        (["train", *CFG], UNKNOWN, "unknown key MODEL.MOE.TOPK"),
        (["train", *CFG], WRONG_TYPE, "TRAIN.EPOCHS is 'abc'"),
        (["train", *CFG], CONTRADICTION, "MODEL.MOE.TOP_K is 9"),
        (["train", *CFG], ["MODEL.MOE.ROUTER", "cosin"], "did you mean cosine?"),
        (["train", *CFG], ["MODEL.TYPE", "swin"], "MODEL.TYPE is 'swin'"),
        (["throughput", *CFG, "--output", "none"], CONTRADICTION, "MODEL.MOE.TOP_K is 9"),
        (
            ["plan-cluster", *CFG, "--nodes", "1", "--gpus-per-node", "8"],
            CONTRADICTION,
            "MODEL.MOE.TOP_K is 9",
        ),
        (["quickstart"], CONTRADICTION, "MODEL.MOE.TOP_K is 9"),
        (
            ["convert-checkpoint", "import", "single", "none", *CFG, "--output", "none"],
            CONTRADICTION,
            "MODEL.MOE.TOP_K is 9",
        ),
        (["evaluate", "--resume", "none"], UNKNOWN, "unknown key MODEL.MOE.TOPK"),
        (["few-shot", "--resume", "none"], UNKNOWN, "unknown key MODEL.MOE.TOPK"),
        (["show-routing", "--resume", "none"], UNKNOWN, "unknown key MODEL.MOE.TOPK"),
        (["export", "--resume", "none", "--output", "none"], UNKNOWN, "key MODEL.MOE.TOPK"),
        (["predict", "none", "none.jpg"], UNKNOWN, "unknown key MODEL.MOE.TOPK"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_an_error_of_the_configuration_is_found_without_torch(words, opts, message, run):
    done = run(COMMAND, *words, "--opts", *opts)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.imported == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--cfg", "tiny_imagenet/dense", "--data", "gone"], "DATA.PATH is 'gone'"),
        (["train", "--data", "gone"], "DATA.PATH is 'gone'"),
        (["train", "--data", "docs"], "docs: images/ lies where each folder is a class"),
        (["predict", "bundled:huge", "a.jpg"], "there is no such model in this package"),
        (["evaluate", "gone"], "RUN gone: no such directory"),
        (["predict", "configs", "a.jpg"], "RUN configs: holds no checkpoint"),
        (["convert-checkpoint", "inspect", "gone"], "CHECKPOINT gone: no such file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_missing_path_is_found_without_torch(words, message, run):
    done = run(COMMAND, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.imported == []


def test_the_list_of_keys_needs_no_torch(run):
    done = run(COMMAND, "config")
    assert done.returncode == 0
    assert done.imported == []


def test_a_model_that_has_its_section_in_its_own_file_is_found(run):
    code = "from swinv2_moe.models import section as s; del s.TRUNKS['swin_moe']"
    done = run(f"{code}; s.import_own_types(); print(*s.TRUNKS)")
    assert done.stdout == "swinv2_moe timm swin_moe\n"
    assert "torch" in done.imported


def test_the_lazy_engine_has_the_names_that_type_checkers_see():
    """Each is the object of the module that the block for type checkers imports it from."""
    tree = ast.parse(Path(moe_core.__file__).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(moe_core.__name__):
            for alias in node.names:
                names.add(alias.name)
                found = getattr(import_module(node.module), alias.name)
                assert getattr(moe_core, alias.name) is found
    assert set(moe_core.__all__) <= names
    assert set(moe_core.__all__) <= set(dir(moe_core))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        moe_core.nothing  # noqa: B018


def test_names_of_the_engine_without_imports_before():
    """`prepared` is a function although a module has its name; modules are attributes."""
    code = "import sys, moe_core; assert 'torch' not in sys.modules; import moe_core.experts"
    code += "; print(type(moe_core.prepared).__name__, moe_core.parallel.__name__)"
    assert alone(code) == "function moe_core.parallel\n"


@pytest.mark.parametrize("registry", [ROUTERS, LOSSES, ACTIVATIONS, ALL_TO_ALLS])
def test_every_announced_entry_is_registered_by_its_module(registry):
    for name, module in registry._modules.items():
        assert registry[name].__module__ == module
    own = {name for name, value in registry.items() if value.__module__.startswith("moe_core.")}
    assert own == set(registry._modules)


def test_an_entry_is_imported_when_it_is_looked_up(run):
    code = "from moe_core import {0} as r; assert 'torch' not in sys.modules; print(r[{1!r}])"
    done = run(code.format("ROUTERS", "soft"))
    assert (done.stdout, done.imported) == ("<class 'moe_core.router.SoftRouter'>\n", ["torch"])
    done = run("import moe_core; moe_core.register_activation('gelu')")
    assert "activation 'gelu' is registered already: moe_core.activations.gelu" in done.stderr


def test_a_registry_of_ones_own_has_no_modules():
    registry = Registry("mine")
    registry.register("a")(len)
    assert dict(registry) == {"a": len}


def test_the_routing_of_routers_is_what_their_classes_say():
    assert set(_ROUTING) == set(ROUTERS._modules)
    for name, routing in _ROUTING.items():
        assert getattr(ROUTERS[name], "routing", "token_choice") == routing
        assert MoEConfig(1, 1, 1, router=name).routing == routing


def test_the_endings_of_images_begin_with_torchvisions():
    from torchvision.datasets.folder import IMG_EXTENSIONS

    from swinv2_moe.data.images import SUFFIXES

    assert SUFFIXES[: len(IMG_EXTENSIONS)] == IMG_EXTENSIONS


@pytest.mark.parametrize("order", ["swinv2_moe, timm", "timm, swinv2_moe"])
def test_timm_knows_the_models_in_either_order_of_imports(order):
    code = f"import {order}; print(timm.is_model('swinv2_moe_tiny_window8_256'))"
    assert alone(code) == "True\n"


def test_a_module_of_the_models_may_be_the_first_that_imports_timm():
    code = "import swinv2_moe.models.attention, timm; from swinv2_moe.models import build_model"
    assert alone(f"{code}; print(timm.is_model('swinv2_moe_tiny_window8_256'))") == "True\n"
