"""A configuration is read and checked without torch, whose import takes seconds."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import moe_core
import swinv2_moe.data
from moe_core import ACTIVATIONS, ALL_TO_ALLS, LOSSES, ROUTERS, MoEConfig, Registry
from moe_core.config import _ROUTING

ROOT = Path(__file__).parents[2]
SLOW = ("torch", "torchvision", "timm", "matplotlib", "scipy", "sklearn")
# Prints what of SLOW has been imported once the rest of the program has run.
REPORT = f"""
import sys
try:
    {{}}
finally:
    print("imported:", *[name for name in {SLOW} if name in sys.modules])
"""
COMMAND = "from swinv2_moe.commands import main; main()"
LOAD = "from swinv2_moe.config import all_sections, load_config; all_sections(load_config({!r}))"


def run(code: str, *words: str) -> subprocess.CompletedProcess:
    """Run code, in which `sys.argv` holds `words`, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", REPORT.format(code), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    "name",
    [
        "quickstart_digits",
        "vit_moe_digits",
        "tiny_imagenet/8expert",
        "in22k/swin_moe_base_window12_192_32expert",
    ],
)
def test_a_configuration_is_loaded_without_torch(name):
    code = LOAD.format(name)
    if not name.endswith("digits"):
        code = code.replace(f"{name!r}", f"{name!r}, data='images'")
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "imported:\n"


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
        (["roofline", *CFG, "--output", "none"], CONTRADICTION, "MODEL.MOE.TOP_K is 9"),
        (
            ["plan-cluster", *CFG, "--nodes", "1", "--gpus-per-node", "8"],
            CONTRADICTION,
            "MODEL.MOE.TOP_K is 9",
        ),
        (["quickstart"], CONTRADICTION, "MODEL.MOE.TOP_K is 9"),
        (["workflow"], UNKNOWN, "unknown key MODEL.MOE.TOPK"),
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
def test_an_error_of_the_configuration_is_found_without_torch(words, opts, message):
    done = run(COMMAND, *words, "--opts", *opts)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == "imported:\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--cfg", "tiny_imagenet/dense", "--data", "gone"], "DATA.PATH is 'gone'"),
        (["evaluate", "gone"], "RUN gone: no such directory"),
        (["predict", "configs", "a.jpg"], "RUN configs: holds no checkpoint"),
        (["convert-checkpoint", "inspect", "gone"], "CHECKPOINT gone: no such file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_missing_path_is_found_without_torch(words, message):
    done = run(COMMAND, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == "imported:\n"


@pytest.mark.parametrize("name", ["config", "configs"])
def test_listings_need_no_torch(name):
    done = run(COMMAND, name)
    assert done.returncode == 0
    assert done.stdout.endswith("\nimported:\n")


def test_a_model_that_has_its_section_in_its_own_file_is_found():
    code = "from swinv2_moe import model_types as m; del m._TYPES['vit_moe']"
    done = run(f"{code}; print(*m.model_types())")
    assert done.stdout.startswith("swinv2_moe swin_moe vit_moe\nimported: torch")


@pytest.mark.parametrize("package", [moe_core, swinv2_moe.data], ids=lambda p: p.__name__)
def test_a_lazy_package_has_the_names_that_type_checkers_see(package):
    """Each is the object of the module that the block for type checkers imports it from."""
    tree = ast.parse(Path(package.__file__).read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(package.__name__):
            for alias in node.names:
                names.add(alias.name)
                found = getattr(import_module(node.module), alias.name)
                assert getattr(package, alias.name) is found
    assert set(package.__all__) - names <= {"register_dataset"}
    assert set(package.__all__) <= set(dir(package))
    assert {name for names in package._MODULES.values() for name in names} <= names
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_names_of_the_engine_without_imports_before():
    """`prepared` is a function although a module has its name; modules are attributes."""
    code = "import moe_core; assert 'torch' not in sys.modules; import moe_core.experts"
    code += "; print(type(moe_core.prepared).__name__, moe_core.parallel.__name__)"
    assert run(code).stdout.startswith("function moe_core.parallel\n")


@pytest.mark.parametrize("registry", [ROUTERS, LOSSES, ACTIVATIONS, ALL_TO_ALLS])
def test_every_announced_entry_is_registered_by_its_module(registry):
    for name, module in registry._modules.items():
        assert registry[name].__module__ == module
    own = {name for name, value in registry.items() if value.__module__.startswith("moe_core.")}
    assert own == set(registry._modules)


def test_an_entry_is_imported_when_it_is_looked_up():
    code = "from moe_core import {0} as r; assert 'torch' not in sys.modules; print(r[{1!r}])"
    done = run(code.format("ROUTERS", "soft"))
    assert done.stdout == "<class 'moe_core.soft.SoftRouter'>\nimported: torch\n"
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
    done = run(f"import {order}; print(timm.is_model('swinv2_moe_tiny_window8_256'))")
    assert (done.stderr, done.stdout.split()[0]) == ("", "True")
